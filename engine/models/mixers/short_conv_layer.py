"""The gated short convolution of a decoder layer, beside its projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...kernels.library import Kernels
from ..layers import InFile, Linear
from .short_conv import ConvLayer, gated_conv
from .states import ConvShape, LayerStates, Segments, States

# `gated_conv` of a layer, or what computes the same by kernels.
Compute = Callable[[Tensor, LayerStates, Segments], Tensor]


class ShortConv:
    """The gates and the convolution of a layer, see short_conv.py."""

    def __init__(self, shape: ConvShape, dtype: torch.dtype, device: torch.device) -> None:
        taps = torch.empty(shape.channels, 1, shape.taps, dtype=dtype, device=device)
        bias = torch.empty(shape.channels, dtype=dtype, device=device) if shape.has_bias else None
        self.layer = ConvLayer(shape, taps, bias)
        self.compute: Compute = partial(gated_conv, self.layer)
        self.objection: str | None = None  # why the Triton kernels do not compute it on this GPU
        self.is_capturable = False  # whether it is computed without the host, as by the Triton kernels

    def __call__(self, x: Tensor, projected: Tensor, states: States | None, number: int) -> Tensor:
        """Return [tokens, channels] for the projection of x: [tokens, 3 * channels]. `number`: of the layer among those
        that keep states."""
        assert states is not None, "a step of this model has states"
        return self.compute(projected, states.layers[number], states.segments)

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts: there are no small linear layers."""
        return []

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        _, taps, bias = self.layer
        return {f"{prefix}conv.conv.weight": taps} | ({} if bias is None else {f"{prefix}conv.conv.bias": bias})

    def pack(self, kernels: Kernels | None, in_file: Mapping[Linear, InFile]) -> None:
        """There is nothing to pack, and no kernel for a CPU."""
