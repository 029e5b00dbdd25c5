"""Mixers: what a layer of a decoder may have in place of attention, between its projections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from ...kernels.launching import Job
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


def use_gpu(mixers: Iterable[Mixer], dtype: torch.dtype, device: torch.device) -> None:
    """Let the Triton kernels compute mixers whose weights have been read. Each shape is tried once; where they cannot,
    torch computes the layer, and `objection` says why."""
    found: dict[MixerShape, str | None] = {}
    for mixer in mixers:
        shape = mixer.layer.shape
        module, compute = _on_gpu(shape)
        if shape not in found:
            found[shape] = module.objection(shape, dtype, device)
        mixer.objection = found[shape]
        if mixer.objection is None:
            mixer.compute, mixer.is_capturable = partial(compute, mixer.layer), True


def by_torch(mixers: Iterable[Mixer]) -> str:
    """Return which mixers torch computes, slowly, and why; empty: none."""
    names = {DeltaNet: "linear attention token by token", Mamba2: "Mamba2 token by token"}
    for mixer in mixers:
        if not mixer.is_capturable:
            return f"torch computes {names.get(type(mixer), 'short convolutions')}: {mixer.objection}"
    return ""


def gpu_limitation(shape: MixerShape, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot compute layers of this shape on any GPU, or None."""
    reason: str | None = _on_gpu(shape)[0].limitation(shape, dtype)
    return reason


def gpu_jobs(shape: MixerShape, dtype: torch.dtype) -> Iterator[Job]:
    """Yield what compiles the Triton kernels of layers of this shape on META; nothing, if they cannot compute them."""
    if gpu_limitation(shape, dtype) is None:
        yield _on_gpu(shape)[0].job(shape, dtype)


def _on_gpu(shape: MixerShape) -> tuple[ModuleType, Callable[..., Tensor]]:
    """Return the module that launches the Triton kernels of layers of this shape, and the function that does."""
    from ..gpu import delta as gpu_delta
    from ..gpu import mamba2 as gpu_mamba2
    from ..gpu import short_conv as gpu_short_conv

    if isinstance(shape, LinearShape):
        return gpu_delta, gpu_delta.gated_delta
    if isinstance(shape, Mamba2Shape):
        return gpu_mamba2, gpu_mamba2.mamba2
    return gpu_short_conv, gpu_short_conv.gated_conv
