"""Writes quantized numbers as blocks, which the kernels pack: scales in float16, one for 32 numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.blocks import FORMATS
from .config import BLOCK, FLOAT4

NUMBERS = {form.name: number for number, form in FORMATS.items()}


def write_blocks(
    to: Tensor,  # [rows, blocks of a row, bytes of a block] uint8
    numbers: Tensor,  # [rows, columns] uint8; 4 bits if the blocks have that
    scales: Tensor,  # [rows, blocks of a row] float32, within the range of float16; of MXFP4 powers of two
    zeros: Tensor | None,  # zero points, uint8 as scales; None: in the middle, for types without them
) -> None:
    """Write rows in blocks of Q4_0, Q4_Z, Q8_0 or MXFP4; the size of a block determines the type."""
    groups, size = numbers.unflatten(-1, (-1, BLOCK)), to.shape[-1]
    if size == FORMATS[NUMBERS[FLOAT4]].block_bytes:
        to[..., 0] = scales.view(torch.int32) >> 23
    else:
        to[..., :2] = scales.half().unsqueeze(-1).view(torch.uint8)
    if size == FORMATS[NUMBERS["Q8_0"]].block_bytes:
        torch.bitwise_xor(groups, 0x80, out=to[..., 2:])
        return
    if size == FORMATS[NUMBERS["Q4_Z"]].block_bytes:
        assert zeros is not None
        to[..., 2] = (-zeros.to(torch.int8)).view(torch.uint8)
    torch.bitwise_or(groups[..., : BLOCK // 2], groups[..., BLOCK // 2 :] << 4, out=to[..., size - BLOCK // 2 :])
