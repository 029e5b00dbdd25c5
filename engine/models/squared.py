"""The first layer of MLPs without a gate, whose activation is the square of ReLU, as in Nemotron-H."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.matmul import Packed
from ..kernels.structures import Gate
from .families.family import UNGATED
from .importance import after_squares
from .layers import Clamp, Gated, InFile, Linear, plain_parts

SQUARED = 5  # the number of the activation in our kernels


class Squared(Linear):
    """relu(x @ up.T) ** 2: what MLPs without a gate have in place of Gated."""

    gate = Gate(SQUARED)

    def importance_after(self, columns: Tensor | None, in_file: InFile | None) -> Tensor:
        """Return the importance of the columns of the next weight, see Gated."""
        return after_squares(plain_parts(self.weight, in_file), columns)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = super().__call__(x)
        if not isinstance(self._packed, Packed):  # else our kernels have computed it
            out = F.relu(out).square()
        return out if residual is None else residual + out

    def product(self, x: Tensor) -> Tensor:
        """Return x @ up.T, [rows, inner]; not for weights that are packed for a CPU."""
        assert not isinstance(self._packed, Packed)
        return super().__call__(x)


def first_layer(
    inner: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    activation: str,
    *,
    bias: bool = False,
    clamp: Clamp | None = None,
) -> Gated | Squared:
    """Return the first layer of an MLP, with `inner` results."""
    if activation == UNGATED:
        return Squared(inner, columns, bias, dtype, device)
    return Gated(inner, columns, bias, dtype, device, activation=activation, clamp=clamp)
