"""Mixers: what a layer of a decoder may have in place of attention, between its projections."""

from __future__ import annotations

import torch

from .delta_layer import DeltaNet
from .mamba2_layer import Mamba2
from .short_conv import ShortConv
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
