"""Writes quantized numbers as GGUF blocks, which the kernels pack: scales in float16, one for 32 numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.blocks import FORMATS
from .config import BLOCK

NUMBERS = {form.name: number for number, form in FORMATS.items()}
RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}


def to_blocks(kind: str, numbers: Tensor, scales: Tensor) -> Tensor:
    """Return rows in blocks, [rows, bytes] uint8, of integers [rows, columns] and scales [rows, columns / 32].

    The integers are in the type's range, the scales in that of float16.
    """
    groups = numbers.unflatten(-1, (-1, BLOCK))
    parts = [scales.half().unsqueeze(-1).view(torch.uint8)]
    if kind == "Q8_0":
        parts.append(groups.to(torch.int8).view(torch.uint8))
    else:
        stored = (groups - RANGES[kind][0]).to(torch.uint8)
        if kind == "Q5_0":  # the fifth bits of eight numbers are a byte
            weights = 2 ** torch.arange(8, dtype=torch.uint8)
            parts.append(((stored >> 4).unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8))
        stored = stored & 15
        parts.append(stored[..., : BLOCK // 2] | stored[..., BLOCK // 2 :] << 4)
    return torch.cat(parts, -1).flatten(-2)
