"""Mixers: what a layer of a decoder may have in place of attention, between its projections."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from ..kernels.launching import Job
from .delta_layer import DeltaNet
from .mamba2_layer import Mamba2
from .short_conv_layer import ShortConv
from .states import ConvShape, LinearShape, Mamba2Shape, MixerShape

Mixer = DeltaNet | ShortConv | Mamba2


def make_mixer(
    shape: MixerShape | None, hidden: int, eps: float, dtype: torch.dtype, device: torch.device
) -> Mixer | None:
    """Return a layer's mixer, whose weights are to be read; None: it has attention. `eps`: of norms."""
    if isinstance(shape, LinearShape):
        return DeltaNet(shape, hidden, eps, dtype, device)
    if isinstance(shape, Mamba2Shape):
        return Mamba2(shape, eps, dtype, device)
    return ShortConv(shape, dtype, device) if isinstance(shape, ConvShape) else None


def gpu_limitation(shape: MixerShape, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot compute layers of this shape on any GPU, or None."""
    reason: str | None = _on_gpu(shape).limitation(shape, dtype)
    return reason


def gpu_jobs(shape: MixerShape, dtype: torch.dtype) -> Iterator[Job]:
    """Yield what compiles the Triton kernels of layers of this shape on META; nothing, if they cannot compute them."""
    if gpu_limitation(shape, dtype) is None:
        yield _on_gpu(shape).job(shape, dtype)


def _on_gpu(shape: MixerShape) -> ModuleType:
    """Return the module that launches the Triton kernels of layers of this shape."""
    from . import gpu_delta, gpu_mamba2, gpu_short_conv

    if isinstance(shape, LinearShape):
        return gpu_delta
    return gpu_mamba2 if isinstance(shape, Mamba2Shape) else gpu_short_conv
