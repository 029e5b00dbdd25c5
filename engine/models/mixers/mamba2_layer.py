"""The Mamba2 of a decoder layer, beside its projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...kernels.library import Kernels
from ...kernels.mamba2 import Mamba2Kernel
from ..layers import InFile, Linear
from .mamba2 import Mamba2Layer, Mamba2Weights, mamba2
from .states import LayerStates, Mamba2Shape, Segments, States, wide

# `mamba2` of a layer, or what computes the same by kernels.
Compute = Callable[[Tensor, LayerStates, Segments], Tensor]


class Mamba2:
    """The convolution, the states' rule and the norm of a layer, see mamba2.py."""

    def __init__(self, shape: Mamba2Shape, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        heads, number = shape.value_heads, wide(dtype)
        weights = Mamba2Weights(
            taps=empty(shape.channels, 1, shape.taps),
            conv_bias=empty(shape.channels) if shape.has_conv_bias else None,
            a_log=empty(heads, dtype=number),
            dt_bias=empty(heads, dtype=number),
            skip=empty(heads, dtype=number),
            norm=empty(shape.values),
        )
        self.layer = Mamba2Layer(shape, eps, weights)
        self.compute: Compute = partial(mamba2, self.layer)
        self.objection: str | None = None  # why the Triton kernels do not compute it on this GPU
        self.is_capturable = False  # whether it is computed without the host, as by the Triton kernels

    def __call__(self, x: Tensor, projected: Tensor, states: States | None, number: int) -> Tensor:
        """Return what the layer reads for each token, [tokens, values], for the projection of x. `number`: of the layer
        among those that keep states."""
        assert states is not None, "a step of this model has states"
        return self.compute(projected, states.layers[number], states.segments)

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts: there are no small linear layers."""
        return []

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into, of the weights that are no linear layers."""
        names = "conv1d.weight", "conv1d.bias", "A_log", "dt_bias", "D", "norm.weight"
        named = zip(names, self.layer.weights, strict=True)
        return {f"{prefix}mamba.{name}": weight for name, weight in named if weight is not None}

    def pack(self, kernels: Kernels | None, in_file: Mapping[Linear, InFile]) -> None:
        """Use our CPU kernel, after the weights have been read."""
        if kernels is not None:
            self.compute = Mamba2Kernel(kernels, self.layer)
