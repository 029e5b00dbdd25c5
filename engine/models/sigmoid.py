"""Sigmoids and softplus, whose results do not depend on the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.library import Kernels
from .families.family import HeadGate


def sigmoid(x: Tensor, kernels: Kernels | None) -> Tensor:
    """Return the sigmoid of each number; x may be overwritten. `kernels`: ours on a CPU.

    In float32 torch's result depends on a number's place in the tensor, in bfloat16 it does not.
    """
    if kernels is None or x.dtype != torch.float32:
        return torch.sigmoid(x)
    x = x.contiguous()
    kernels.sigmoid(x.data_ptr(), x.numel())
    return x


def softplus(x: Tensor, kernels: Kernels | None) -> Tensor:
    """Return log(1 + exp(x)) for each number, computed in float32 or wider; x may be overwritten."""
    if kernels is None:
        return F.softplus(x if x.dtype == torch.float64 else x.float()).to(x.dtype)
    wide = x.float().contiguous()
    kernels.softplus(wide.data_ptr(), wide.numel())
    return wide.to(x.dtype)


def gated(seen: Tensor, gate: Tensor, kind: HeadGate | None, kernels: Kernels | None) -> Tensor:
    """Return what each head attends to, times its gate: [tokens, heads, head_dim].

    gate: [tokens, rows] of a HeadGate's projection, or [tokens, heads, head_dim], which may be overwritten.
    """
    function = softplus if kind is not None and kind.is_softplus else sigmoid
    return seen * function(gate.reshape(*seen.shape[:2], -1).contiguous(), kernels)
