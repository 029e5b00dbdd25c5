"""The table of attention backends, and the selection of one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..types import ConfigError
from .backend import AttentionBackend
from .layer import AttentionLayer


class Entry(NamedTuple):
    """A backend in the table. Its module is imported only when the backend is considered."""

    path: str  # module:class
    device_types: tuple[str, ...]  # for which "auto" considers it


# In order of preference.
BACKENDS = {
    "cpu": Entry("engine.attention.cpu:Paged", ("cpu",)),
    "triton": Entry("engine.attention.paged_gpu:PagedGPU", ("cuda",)),
    "reference": Entry("engine.attention.reference:Reference", ("cpu", "cuda")),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for a model. `note`: why it is not the preferred one of the device, or empty."""

    name: str
    backend: type[AttentionBackend]
    note: str = ""


def check(name: str) -> None:
    """Raise ConfigError for an unknown name. `choose` checks whether a backend can serve a model."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")


def choose(
    name: str,
    device: torch.device,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    isa: str = "auto",
    *,
    cache_dtype: torch.dtype | None = None,
) -> Choice:
    """Return the backend for a model on a device; "auto" selects the first one that can serve the model.

    `cache_dtype`: the KV cache's; None: the model's. `isa`: the setting of the CPU kernels. Raises ConfigError if the
    named backend cannot serve the model.
    """
    check(name)
    candidates = [name] if name != "auto" else [each for each in BACKENDS if device.type in BACKENDS[each].device_types]
    reasons: list[str] = []
    for candidate in candidates:
        backend = _class(candidate)
        reason = backend.objection(layers, dtype, cache_dtype or dtype, device, isa)
        if reason is None:
            return Choice(candidate, backend, f"{backend.drawback}: {reasons[0]}" if reasons else "")
        reasons.append(reason)
    raise ConfigError(f"the attention backend {name} cannot be used: {'; '.join(reasons)}")


def create(name: str, isa: str = "auto", *, invariant: bool = False) -> AttentionBackend:
    """Return a new backend with the name of a Choice. Raises ConfigError, see AttentionBackend.create."""
    return _class(name).create(isa, invariant=invariant)


def _class(name: str) -> type[AttentionBackend]:
    module, _, attribute = BACKENDS[name].path.partition(":")
    backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
    return backend
