"""Sigmoids whose results do not depend on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.library import Kernels


def sigmoid(x: Tensor, kernels: Kernels | None) -> Tensor:
    """Return the sigmoid of each number; x may be overwritten. `kernels`: ours on a CPU.

    In float32 torch's result depends on a number's place in the tensor, in bfloat16 it does not.
    """
    if kernels is None or x.dtype != torch.float32:
        return torch.sigmoid(x)
    x = x.contiguous()
    kernels.sigmoid(x.data_ptr(), x.numel())
    return x
