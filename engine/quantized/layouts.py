"""The layouts in which checkpoints store quantized weights, and how each is read.

A word is an int32 with several numbers, the first in the lowest bits. Weights have [rows, columns] here; GPTQ and AWQ
store them transposed. A group is the columns of a row that share a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .config import Scheme

Tensors = Mapping[str, Tensor]  # by the last part of their names
Shape = tuple[int, ...]
Expected = dict[str, tuple[tuple[torch.dtype, ...], list[Shape]]]  # name -> dtypes and shapes that it may have
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WORDS, BYTES = (torch.int32,), (torch.int8,)
# A word of ones. GPTQ's first format subtracts it from words of zero points, and a zero then borrows from the next.
ONES = {4: 0x11111111, 8: 0x01010101}
# The floats of 4 bits (E2M1) by their bits: a sign, two bits of exponent and one of mantissa.
FLOATS4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
INTEGERS = (2 * FLOATS4 + 128).byte()  # twice as large, stored like integers of 8 bits
# AWQ's words hold columns 0, 2, 4, 6, 1, 3, 5, 7, which its kernels unpack faster: the position of each column.
AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


def fields(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in words [..., n]: [..., n * 32 / bits] uint8. `bits`: 4 or 8."""
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def count(size: int, shared: int | None) -> int:
    """Return the number of scales for `size` rows or columns, if `shared` of them share one; None: all."""
    return -(-size // (shared or size)) if size else 0


class Layout(ABC):
    """How a weight is stored in a checkpoint."""

    main: str  # the tensor with the numbers
    dtype: torch.dtype  # of it
    required: tuple[str, ...] = ("weight_scale",)  # in addition
    optional: tuple[str, ...] = ()
    dimensions = 2  # of it
    groups: str = ""  # the tensor with each column's group; if there is none, groups are contiguous

    @abstractmethod
    def shape(self, main: Shape, scheme: Scheme) -> Shape:
        """Return [rows, columns] of a weight from the shape of its main tensor."""

    @abstractmethod
    def expected(self, shape: Shape, scheme: Scheme) -> Expected:
        """Return what the tensors beside the main one must be."""

    @abstractmethod
    def numbers(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        """Return the stored numbers of some rows, [rows, columns] uint8; float32 if they are floats."""

    def codes(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        """Return the stored numbers of some rows, [rows, columns] uint8: of floats the bits."""
        return self.numbers(tensors, scheme, rows)

    def zeros(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor | None:
        """Return the zero points of some rows, [rows, groups] uint8; None: in the middle, or there are none."""
        return None

    def scales(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        """Return the scales of some rows, [rows, groups] float32."""
        return _of_rows(tensors["weight_scale"], scheme, rows).float()

    def schemes(self, scheme: Scheme) -> tuple[Scheme, ...]:
        """Return the schemes that a weight of this scheme may have; the shape of its scales decides."""
        return (scheme,)

    def needed(self, scheme: Scheme, names: Collection[str]) -> tuple[str, ...]:
        """Return the tensors that a weight must have beside the main one. `names`: those that it has."""
        zeros = ("weight_zero_point",) if not scheme.symmetric and "weight_zero_point" in self.optional else ()
        return self.required + zeros


class Gptq(Layout):
    main, dtype, groups = "qweight", torch.int32, "g_idx"
    required = ("qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)

    def shape(self, main: Shape, scheme: Scheme) -> Shape:
        return main[1], main[0] * 32 // scheme.bits

    def expected(self, shape: Shape, scheme: Scheme) -> Expected:
        groups = count(shape[1], scheme.columns)
        return {
            "qzeros": (WORDS, [(groups, -(-shape[0] * scheme.bits // 32))]),
            "scales": (FLOATS, [(groups, shape[0])]),
            "g_idx": (WORDS, [(shape[1],)]),
        }

    def numbers(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return fields(tensors["qweight"][:, rows].T, scheme.bits)

    def zeros(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor | None:
        stored = tensors["qzeros"]
        return fields(stored + ONES[scheme.bits] if scheme.zeros_less_one else stored, scheme.bits)[:, rows].T

    def scales(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return tensors["scales"][:, rows].T.float()


class Awq(Gptq):
    optional, groups = (), ""

    def shape(self, main: Shape, scheme: Scheme) -> Shape:
        return main[1] * 32 // scheme.bits, main[0]

    def numbers(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return _awq_fields(tensors["qweight"], rows)

    def zeros(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor | None:
        return _awq_fields(tensors["qzeros"], rows)


class Packed(Layout):
    """Words of compressed-tensors. Numbers are signed, and stored with an offset, like their zero points."""

    main, dtype, groups = "weight_packed", torch.int32, "weight_g_idx"
    optional = ("weight_zero_point", "weight_g_idx", "weight_shape")

    def shape(self, main: Shape, scheme: Scheme) -> Shape:
        return main[0], main[1] * 32 // scheme.bits

    def expected(self, shape: Shape, scheme: Scheme) -> Expected:
        rows, groups = -(-shape[0] * scheme.bits // 32), count(shape[1], scheme.columns)
        return {
            "weight_scale": (FLOATS, _scale_shapes(shape, scheme)),
            "weight_zero_point": (WORDS, [(rows, groups)]),
            "weight_g_idx": (WORDS, [(shape[1],)]),
            "weight_shape": ((torch.int32, torch.int64), [(2,)]),
        }

    def numbers(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return fields(tensors["weight_packed"][rows], scheme.bits)

    def zeros(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor | None:
        found = tensors.get("weight_zero_point")
        return None if found is None else fields(found.T, scheme.bits)[:, rows].T


class Int8(Layout):
    main, dtype, optional = "weight", torch.int8, ("weight_zero_point",)

    def shape(self, main: Shape, scheme: Scheme) -> Shape:
        return main

    def expected(self, shape: Shape, scheme: Scheme) -> Expected:
        shapes = _scale_shapes(shape, scheme)
        return {"weight_scale": (FLOATS, shapes), "weight_zero_point": (BYTES, shapes)}

    def numbers(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return tensors["weight"][rows].view(torch.uint8) ^ 0x80

    def zeros(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor | None:
        found = tensors.get("weight_zero_point")
        return None if found is None else _of_rows(found, scheme, rows).view(torch.uint8) ^ 0x80


class Float8(Layout):
    """Floats of 8 bits (E4M3), with one scale, one for each row, or one for each block."""

    main, dtype = "weight", torch.float8_e4m3fn
    optional = ("weight_scale_inv",)  # another name of weight_scale

    def shape(self, main: Shape, scheme: Scheme) -> Shape:
        return main

    def needed(self, scheme: Scheme, names: Collection[str]) -> tuple[str, ...]:
        return () if "weight_scale_inv" in names else self.required

    def schemes(self, scheme: Scheme) -> tuple[Scheme, ...]:
        return scheme, replace(scheme, rows=None, columns=None), replace(scheme, rows=1, columns=None)

    def expected(self, shape: Shape, scheme: Scheme) -> Expected:
        shapes = _scale_shapes(shape, scheme)
        return {"weight_scale": (FLOATS, shapes), "weight_scale_inv": (FLOATS, shapes)}

    def numbers(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return tensors["weight"][rows].float()

    def codes(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return tensors["weight"][rows].view(torch.uint8)

    def scales(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        name = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
        return _of_rows(tensors[name], scheme, rows).float()


class Mxfp4(Layout):
    """Floats of 4 bits (E2M1), two in a byte, with a power of two for each 32 (E8M0): the exponent plus 127. From the
    OCP Microscaling Formats specification, version 1.0."""

    main, dtype, required, dimensions = "blocks", torch.uint8, ("scales",), 3

    def shape(self, main: Shape, scheme: Scheme) -> Shape:
        return main[0], main[1] * main[2] * 2

    def expected(self, shape: Shape, scheme: Scheme) -> Expected:
        return {"scales": ((torch.uint8,), [(shape[0], count(shape[1], scheme.columns))])}

    def numbers(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return FLOATS4[self.codes(tensors, scheme, rows).int()]

    def codes(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        return fields(tensors["blocks"][rows].flatten(1), 4)

    def scales(self, tensors: Tensors, scheme: Scheme, rows: slice) -> Tensor:
        exponents = tensors["scales"][rows].int()
        # The bits of these floats. 2^-127 is not a normal number; 255 is no number.
        return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)


LAYOUTS: dict[str, Layout] = {
    "gptq": Gptq(), "awq": Awq(), "packed": Packed(), "int8": Int8(), "float8": Float8(), "mxfp4": Mxfp4()
}  # fmt: skip


def _awq_fields(words: Tensor, rows: slice) -> Tensor:
    """Return some rows of the matrix whose columns are in words, [rows, columns] uint8."""
    first = rows.start // 8
    turned = words[:, first : -(-rows.stop // 8)].T.contiguous()
    found = torch.empty(len(turned), 8, turned.shape[1], dtype=torch.uint8)
    for row, position in enumerate(AWQ_POSITIONS):
        found[:, row] = turned >> 4 * position & 15
    return found.flatten(0, 1)[rows.start - 8 * first : rows.stop - 8 * first]


def _scale_shapes(shape: Shape, scheme: Scheme) -> list[Shape]:
    rows, groups = count(shape[0], scheme.rows), count(shape[1], scheme.columns)
    shapes: list[Shape] = [(rows, groups)]
    if groups == 1:
        shapes.append((rows,))
    if rows == groups == 1:
        shapes.append(())
    return shapes


def _of_rows(found: Tensor, scheme: Scheme, rows: slice) -> Tensor:
    """Return the scales or zero points of some rows, [rows, groups], from those of a weight."""
    found = found.reshape(len(found) if found.dim() else 1, -1)
    at = torch.arange(rows.start, rows.stop)
    return found[at // scheme.rows if scheme.rows else torch.zeros_like(at)]
