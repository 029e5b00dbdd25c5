"""The linear attention of a decoder layer, beside its large projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...kernels.delta import GatedDelta
from ...kernels.library import Kernels
from ..layers import InFile, Linear
from .delta import DeltaLayer, DeltaWeights, gated_delta
from .states import LayerStates, LinearShape, Segments, States, wide

# `gated_delta` of a layer, or what computes the same by kernels.
Delta = Callable[[Tensor, Tensor, LayerStates, Segments], Tensor]


class DeltaNet:
    """The gates, the convolution and the states' rule of a layer, see delta.py."""

    def __init__(self, shape: LinearShape, hidden: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.gates = Linear(2 * shape.value_heads, hidden, False, dtype, device)

        def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        heads, number = shape.value_heads, wide(dtype)
        weights = DeltaWeights(
            taps=empty(shape.channels, 1, shape.taps),
            a_log=empty(heads, dtype=number),
            dt_bias=empty(heads, dtype=number),
            norm=empty(shape.value_dim),
        )
        self.layer = DeltaLayer(shape, eps, weights)
        self.compute: Delta = partial(gated_delta, self.layer)
        self.objection: str | None = None  # why the Triton kernels do not compute it on this GPU
        self.is_capturable = False  # whether it is computed without the host, as by the Triton kernels

    def __call__(self, x: Tensor, qkvz: Tensor, states: States | None, number: int) -> Tensor:
        """Return what the layer reads for each token, [tokens, values], of x: [tokens, hidden_size], and its
        projection: [tokens, channels + values]. `number`: of the layer among those of linear attention."""
        assert states is not None, "a step of this model has states"
        return self.compute(qkvz, self.gates(x), states.layers[number], states.segments)

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts."""
        heads, names = self.layer.shape.value_heads, self.layer.shape.small_names
        return [(prefix + name, self.gates, first * heads, (first + 1) * heads) for first, name in enumerate(names)]

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into, of the weights that are no linear layers."""
        names = "conv1d.weight", "A_log", "dt_bias", "norm.weight"
        return {f"{prefix}linear_attn.{name}": weight for name, weight in zip(names, self.layer.weights, strict=True)}

    def pack(self, kernels: Kernels | None, in_file: Mapping[Linear, InFile]) -> None:
        """Pack the weights, which have been read, see Layer.pack. The gates are small, and errors in them grow over the
        tokens: they are not quantized."""
        self.gates.pack(kernels, in_file=in_file.get(self.gates))
        if kernels is not None:
            self.compute = GatedDelta(kernels, self.layer)
