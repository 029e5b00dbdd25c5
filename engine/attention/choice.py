"""The choice among the attention backends."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..types import ConfigError
from .backend import Attention
from .layer import LayerKV

BACKENDS = {"cpu": "engine.attention.cpu:Paged", "reference": "engine.attention.reference:Reference"}


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for a model; `note` says why it is not the one that its device has."""

    name: str
    note: str = ""


def check(name: str) -> None:
    """ConfigError for a backend that there is not; what a model needs of it is looked at by `choose`."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")


def choose(name: str, device: torch.device, layers: Sequence[LayerKV], dtype: torch.dtype, isa: str = "auto") -> Choice:
    """The backend that a setting means for a model on a device; "auto" is the best one that can be had.

    `isa` is the setting of the CPU kernels. A backend that was named and cannot serve the model is a ConfigError.
    """
    check(name)
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return Choice("reference")
    reason = _against_cpu(device, layers, dtype, isa)
    if reason is None:
        return Choice("cpu")
    if name == "cpu":
        raise ConfigError(f"the attention backend cpu cannot be used: {reason}")
    return Choice("reference", f"torch computes attention, slower and with results that depend on the batch: {reason}")


def _against_cpu(device: torch.device, layers: Sequence[LayerKV], dtype: torch.dtype, isa: str) -> str | None:
    """Why the CPU kernel cannot serve these layers, or None."""
    from . import cpu

    if device.type != "cpu":
        return f"the device is {device}"
    if dtype not in cpu.DTYPES:
        return f"it computes in {' and '.join(cpu.DTYPES.values())}, not in {str(dtype).removeprefix('torch.')}"
    if odd := next((layer for layer in layers if layer.head_dim != layer.v_head_dim), None):
        return f"it wants keys as long as values, and here they have {odd.head_dim} and {odd.v_head_dim} numbers"
    try:
        cpu.variant(isa)
    except ConfigError as error:
        return str(error)
    return None


def select(name: str, isa: str = "auto") -> Attention:
    """A new backend by the name that `choose` gave. Each is imported only when it is chosen."""
    module, _, attribute = BACKENDS[name].partition(":")
    make = getattr(importlib.import_module(module), attribute)
    backend: Attention = make.of(isa) if name == "cpu" else make()
    return backend
