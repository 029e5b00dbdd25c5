"""Chooses what samples from a model's logits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ..attention.paged_gpu import is_interpreted
from ..kernels.library import for_sampling
from ..kernels.logits import NativeLogits
from . import triton_logits
from .logits import LogitsBackend


@dataclass(frozen=True, slots=True)
class Choice:
    """What samples from float32 logits. `note`: why it is not the preferred one of the device, or empty."""

    name: str  # an instruction set of the CPU kernels, triton, or torch
    backend: LogitsBackend | None  # None: torch
    library: ctypes.CDLL | None = None  # of the CPU kernels
    note: str = ""


def choose(setting: str, device: torch.device, dtype: torch.dtype, vocab_size: int) -> Choice:
    """Return what samples for a model on a device. `setting` as for engine.kernels.library.choose, for CPUs alone."""
    kernels = for_sampling(setting, device, dtype)
    if kernels is not None:
        return Choice(kernels.isa, NativeLogits(kernels), kernels.library)
    if device.type != "cuda" and not (is_interpreted() and setting == "torch"):
        return Choice("torch", None)
    reason = triton_logits.objection(vocab_size, dtype, device)
    if reason is not None:
        return Choice("torch", None, note=f"torch samples: {reason}")
    return Choice("triton", triton_logits.TritonLogits(vocab_size, device))
