"""Rounds weights to 8 or 4 bits with torch, on any device.

To 8 bits as our CPU kernels do (see kernels/quantized.cpp). In 4 bits a group has a scale but, other than on a CPU, no
minimum, which the GPU kernels do not add. They have no form for 5 bits either, and such weights get 8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.matmul import GROUP
from .gpu.form import ROUNDED
from .gpu.weights import GPUWeight

# What the largest number of a group of 4 bits is divided by: of these scales the best is taken.
TOPS = (-8.0, -8.4, -7.2, -8.8, -7.8, -8.2, -7.0, -8.6)
TINY = 2.0**-100  # numbers below it become zeros
ROUNDED_NUMBERS = 1 << 24  # at once: several float32 copies of them are in memory


def rounded(weight: Tensor, bits: int, importance: Tensor | None = None) -> GPUWeight:
    """Return a weight [rows, columns] in 8 or 4 bits, on its device. `bits`: those that it has on a CPU, 8, 5 or 4.

    `importance`: [columns], not negative; with 4 bits the squared errors of each column are multiplied by it.
    """
    rows, columns = weight.shape
    found = GPUWeight(ROUNDED[bits], rows, columns, weight.device)
    step = max(1, ROUNDED_NUMBERS // columns)
    for first in range(0, rows, step):
        piece = weight[first : first + step].float()
        found.write(first, *(_to_8(piece) if bits > 4 else _to_4(piece, importance)))
    return found


def _to_8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers [rows, columns] uint8, of which 128 is zero, and the scales [rows, 1]."""
    top = weight.abs().amax(-1, keepdim=True)
    top = torch.where(top < TINY, 0.0, top)
    # Not 127 / top, which torch takes for 127 * (1 / top).
    inverse = torch.where(top > 0, torch.full_like(top, 127.0) / top, 0.0)
    return ((weight * inverse).round() + 128).to(torch.uint8), top / 127


def _to_4(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the numbers [rows, columns] uint8, of which 8 is zero, and the scales [rows, groups]."""
    columns = weight.shape[1]
    groups = _grouped(weight)
    matter = _grouped(weight.new_ones(1, columns) if importance is None else importance.float()[None])
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best = least = torch.zeros_like(farthest)
    for top in TOPS:
        scale = (farthest / torch.full_like(farthest, top)).bfloat16().float()
        scale = torch.where(farthest.abs() < TINY, 0.0, scale)
        off = groups - _steps(groups, scale) * scale
        errors = (matter * off * off).sum(-1, keepdim=True)
        is_better = (errors < least) | (top == TOPS[0])
        best, least = torch.where(is_better, scale, best), torch.where(is_better, errors, least)
    numbers = (_steps(groups, best) + 8).to(torch.uint8).flatten(1)[:, :columns]
    return numbers, best.squeeze(-1)


def _steps(groups: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers of groups in multiples of their scales."""
    inverse = torch.where(scale != 0, torch.ones_like(scale) / scale, 0.0)
    return (groups * inverse).round().clamp(-8, 7)


def _grouped(x: Tensor) -> Tensor:
    """Return [rows, groups, GROUP], padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
