"""Matmuls with weights in blocks, those of a GGUF file as they are; see blocks.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .library import Kernels
from .matmul import BlockRows, Joined, Packed, Packing


@dataclass(frozen=True, slots=True)
class Format:
    """A type of blocks."""

    name: str
    block: int  # numbers in a block
    block_bytes: int
    bits: int  # of a stored number
    group: int = 32  # numbers that share a scale
    has_minimum: bool = False
    has_zeros: bool = False  # minimums are scales times bytes
    is_coded: bool = False  # numbers are floats of 4 bits, and scales are powers of two

    @property
    def group_units(self) -> int:
        """The number of four-byte units of a group in a panel's row."""
        return self.group * self.bits // 32


Q8_0 = 8
Q4_Z = 256  # our own type
PIECE_NUMBERS = 1 << 22  # dequantized at once
# By the type's number in a GGUF file, which has no Q4_Z. blocks.h has the same table, and formats that are in no file.
FORMATS = {
    2: Format("Q4_0", 32, 18, 4),
    3: Format("Q4_1", 32, 20, 4, has_minimum=True),
    6: Format("Q5_0", 32, 22, 5),
    7: Format("Q5_1", 32, 24, 5, has_minimum=True),
    8: Format("Q8_0", 32, 34, 8),
    12: Format("Q4_K", 256, 144, 4, has_minimum=True),
    13: Format("Q5_K", 256, 176, 5, has_minimum=True),
    14: Format("Q6_K", 256, 210, 6, group=16),
    39: Format("MXFP4", 32, 17, 4, is_coded=True),
    Q4_Z: Format("Q4_Z", 32, 19, 4, has_minimum=True, has_zeros=True),
}


def blocks_bytes(name: str, numbers: int, dtype: torch.dtype) -> int:
    """Return the size of repacked weights of a type in a GGUF file. Types without a format become `dtype` if they are
    plain, else Q8_0; see gguf/checkpoint.py."""
    if name in ("F32", "F16", "BF16"):
        return numbers * dtype.itemsize
    form = next((form for form in FORMATS.values() if form.name == name), FORMATS[Q8_0])
    groups = form.block // form.group
    scales = (2 if groups == 1 else 2 + groups) * (2 if form.has_minimum else 1) - form.has_zeros - form.is_coded
    return numbers // form.block * (groups * form.group_units * 4 + scales)


def in_one_order(parts: Sequence[BlockRows]) -> bool:
    """Return whether the parts store the columns of a weight in the same order."""
    first = parts[0].order
    others = [part.order for part in parts[1:]]
    if first is None:
        return all(order is None for order in others)
    return all(order is not None and torch.equal(first, order) for order in others)


def in_one_format(parts: Sequence[BlockRows]) -> bool:
    """Return whether the parts are packed in one format; types without a kernel become Q8_0."""
    return len({part.format if part.format in FORMATS else Q8_0 for part in parts}) == 1


def in_q8_0(part: BlockRows) -> BlockRows:
    """Return rows of any type of the gguf package, converted to Q8_0. The rounding errors are about 1/250 of a block's
    largest number."""
    import gguf

    data, step = part.data.numpy(), max(1, PIECE_NUMBERS // part.shape[1])
    numbers = (
        gguf.dequantize(data[start : start + step], gguf.GGMLQuantizationType(part.format))
        for start in range(0, len(data), step)
    )
    pieces = [gguf.quantize(piece, gguf.GGMLQuantizationType(Q8_0)) for piece in numbers]
    return part._replace(data=torch.from_numpy(np.concatenate(pieces)), format=Q8_0, mapped=False)


def in_blocks(
    kernels: Kernels,
    parts: Sequence[BlockRows],
    bias: Tensor | None = None,
    *,
    gated: bool,
    wide: bool,
    activation_bytes: int,
    packing: Packing | None,
) -> Packed:
    """Return a weight in blocks. Parts in types without a kernel become Q8_0. `gated`: they have one format and order
    of columns."""
    parts = [part if part.format in FORMATS else in_q8_0(part) for part in parts]
    if not all(part.mapped for part in parts):
        packing = None  # now, so that only one converted weight is in memory
    if not (in_one_format(parts) and in_one_order(parts)):
        assert not gated
        return in_several_formats(kernels, parts, bias, activation_bytes=activation_bytes, packing=packing)
    return Blocks(kernels, parts, bias, gated=gated, wide=wide, activation_bytes=activation_bytes, packing=packing)


class Blocks(Packed):
    """Like Packed, for a weight in blocks of one format.

    Activations are quantized to 8 or 15 bits, each group of a row separately. `lookup` returns dequantized rows.
    """

    packer = "repack"

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[BlockRows],
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        wide: bool = False,
        stride: int | None = None,
        activation_bytes: int = 1,  # that a number of x is quantized to, 1 or 2
        packing: Packing | None = None,
    ) -> None:
        self.format, self.planes = parts[0].format, activation_bytes
        self._format, self.order = FORMATS[self.format], parts[0].order
        if not in_one_order(parts):
            raise ValueError("blocks of columns in several orders")
        if any(part.format != self.format for part in parts):
            raise ValueError(f"blocks of several formats: {sorted({FORMATS[part.format].name for part in parts})}")
        super().__init__(kernels, parts, bias, gated=gated, wide=wide, stride=stride, packing=packing)

    def row_bytes(self) -> int:
        return self.columns // self._format.block * self._format.block_bytes

    def _function(self, kernels: Kernels) -> Any:
        if self._format.is_coded:
            return kernels.multiply_codes[self.dtype]
        return kernels.multiply_blocks[self._format.bits, self.dtype]

    def _panel_shape(self) -> tuple[int, ...]:
        return (self.columns // self._format.group * self._format.group_units, self._kernels.width)

    def _allocate_scales(self, num_panels: int) -> Tensor:
        return torch.empty(num_panels, self._kernels.scales_bytes(self.format, self.columns), dtype=torch.uint8)

    def lookup(self, ids: Tensor) -> Tensor:
        rows = super().lookup(ids)
        return rows if self.order is None else rows[:, self.order.argsort()]

    def _look_up(self, ids: Tensor, out: Tensor) -> int:
        arguments = ids.data_ptr(), len(ids), out.data_ptr()
        return int(self._kernels.dequantized_blocks(self._address, self.dtype.itemsize, *arguments))


def in_several_formats(
    kernels: Kernels,
    parts: Sequence[BlockRows],
    bias: Tensor | None = None,
    *,
    activation_bytes: int = 1,
    packing: Packing | None = None,
) -> Joined:
    """Return a weight whose parts are in blocks of several formats, as queries and values in Q4_K_M, or whose
    columns are in several orders."""
    stride, start, packed = sum(part.shape[0] for part in parts), 0, []
    for rows in _alike(parts):
        end = start + sum(part.shape[0] for part in rows)
        own = None if bias is None else bias[start:end]
        packed.append(Blocks(kernels, rows, own, stride=stride, activation_bytes=activation_bytes, packing=packing))
        start = end
    return Joined(kernels, packed)


def _alike(parts: Sequence[BlockRows]) -> list[list[BlockRows]]:
    """Return the parts in runs of one format and one order of columns."""
    runs: list[list[BlockRows]] = []
    for part in parts:
        if runs and runs[-1][0].format == part.format and in_one_order([runs[-1][0], part]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
