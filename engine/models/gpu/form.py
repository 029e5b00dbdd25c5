"""Form: how the numbers of a quantized weight are stored on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.matmul import GROUP

UNIT = 32  # columns: groups are multiples of it


@dataclass(frozen=True, slots=True)
class Form:
    """How the numbers of a weight are stored. A number is scale * (stored - zero point)."""

    bits: int  # 4 or 8
    group: int = 0  # columns of a row that share a scale, a multiple of UNIT; 0: all
    has_zeros: bool = False  # zero points, one for each scale; else they are in the middle
    is_float: bool = False  # E4M3
    scale: torch.dtype = torch.float32
    weights_only: bool = False  # products have no activations in fp8

    @property
    def slice(self) -> int:
        """The number of columns that are stored together, or of which a row of floats has a multiple."""
        return UNIT if self.bits == 8 and self.group % (2 * UNIT) else 2 * UNIT

    @property
    def dtype(self) -> torch.dtype:
        """The type of stored bytes. Integers of 8 bits are stored less 128, and so are their zero points."""
        return torch.uint8 if self.bits == 4 else torch.int8

    @property
    def name(self) -> str:
        kind = "float" if self.is_float else "int"
        columns = f"groups of {self.group}" if self.group else "rows"
        return f"{kind}{self.bits} in {columns}{' with zero points' if self.has_zeros else ''}"

    def slices(self, columns: int) -> int:
        return -(-columns // self.slice)

    def groups(self, columns: int) -> int:
        """Return the number of scales of a row, with those of its padding."""
        return -(-self.slices(columns) * self.slice // self.group) if self.group else 1

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the size of a weight with its scales and zero points."""
        numbers = self.slices(columns) * self.slice * self.bits // 8
        return rows * (numbers + self.groups(columns) * (self.scale.itemsize + self.has_zeros))


# What `quantization` makes of weights, by the bits that they have on a CPU: there is no form of 5 bits.
ROUNDED = {8: Form(8), 5: Form(8), 4: Form(4, GROUP, scale=torch.bfloat16)}
