"""Writes quantized numbers as blocks, which the kernels pack: scales in float16, one for 32 numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.blocks import FORMATS
from .config import BLOCK

NUMBERS = {form.name: number for number, form in FORMATS.items()}
RANGES = {"Q4_0": (-8, 7), "Q4_Z": (-15, 15), "Q8_0": (-128, 127)}


def to_blocks(kind: str, numbers: Tensor, scales: Tensor) -> Tensor:
    """Return rows in blocks, [rows, bytes] uint8, of integers [rows, columns] and scales [rows, columns / 32].

    The integers are in the type's range, the scales in that of float16. In Q4_Z, those of a block differ by up to 15.
    """
    groups = numbers.unflatten(-1, (-1, BLOCK))
    parts = [scales.half().unsqueeze(-1).view(torch.uint8)]
    if kind == "Q8_0":
        parts.append(groups.to(torch.int8).view(torch.uint8))
    else:
        low: int | Tensor = RANGES[kind][0]
        if kind == "Q4_Z":
            low = groups.amin(-1, keepdim=True)
            parts.append(low.to(torch.int8).view(torch.uint8))
        stored = (groups - low).to(torch.uint8)
        parts.append(stored[..., : BLOCK // 2] | stored[..., BLOCK // 2 :] << 4)
    return torch.cat(parts, -1).flatten(-2)
