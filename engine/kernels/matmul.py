"""Matmuls with weights packed for the CPU kernels, plain or quantized, with bias, residual and SiLU in the epilogue."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .library import Kernels, address
from .structures import Gate, Matrix, Multiplied, PlainWeight, Progress, WeightPart
from .structures import Joined as JoinedParts

SLAB = 64 << 20  # bytes
LINE = 64  # bytes of a cache line
GROUP = 32  # columns of a weight in 4 or 5 bits, or in 8 bits and grouped, that share a scale
FORMATS_OF_ROWS = {4: 257, 5: 258, 8: 259}  # by bits: I4, I5 and I8 of blocks.h


class Stored(NamedTuple):
    """Contiguous rows of a weight in an open file."""

    file: int  # descriptor
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class BlockRows(NamedTuple):
    """Rows of a weight in the blocks of a GGUF file."""

    data: Tensor  # uint8 [rows, bytes of a row], contiguous
    shape: tuple[int, ...]
    format: int  # a key of blocks.FORMATS
    dtype: torch.dtype  # of the activations
    interleaved: int = 0  # rows of a head, if the halves of each are interleaved and are to be separated
    mapped: bool = True  # from a file; otherwise in memory
    order: Tensor | None = None  # [columns] int32: the column of the weight that is stored in each position


class Converted(NamedTuple):
    """Rows of a weight that are converted to blocks when they are packed, so that few are in memory at a time."""

    convert: Callable[[], BlockRows]
    num_bytes: int  # in files


Parts = Sequence[Tensor | Stored | BlockRows]  # rows of a weight, one part after another
Sources = Sequence[Tensor | Stored | BlockRows | Converted]  # parts, of which some are still to be converted


class Packing:
    """Weights that are packed together, in one call that does not need Python meanwhile."""

    def __init__(self, kernels: Kernels, slab: int = SLAB) -> None:
        """`slab`: the minimum size, in bytes, of the allocations that panels share."""
        self._kernels, self._slab_bytes = kernels, slab
        # By the kernel that packs them; each with the file and offset of its first part.
        self._weights: dict[str, list[tuple[tuple[int, int], PlainWeight]]] = defaultdict(list)
        self._kept: list[Any] = []
        self._slab = torch.empty(0, dtype=torch.int32)
        self._progress = Progress()

    @property
    def num_bytes(self) -> int:
        """Bytes of plain weights packed so far."""
        return int(self._progress.num_bytes)

    def allocate(self, *shape: int) -> Tensor:
        """Return int32 memory for panels, from a slab: small allocations would not get huge pages."""
        size = -(-math.prod(shape) * 4 // LINE) * LINE // 4
        if size > len(self._slab):
            self._slab = torch.empty(max(size, self._slab_bytes // 4), dtype=torch.int32)
        taken, self._slab = self._slab[: math.prod(shape)], self._slab[size:]
        return taken.view(shape)

    def add(self, packed: Packed, parts: Parts, gated: bool) -> None:
        """Add a weight, the concatenation of `parts`, to be packed for `packed`."""
        assert len({type(part) for part in parts}) == 1, "parts in memory and in files"
        sources = (WeightPart * len(parts))()
        for source, part in zip(sources, parts, strict=True):
            if part.dtype != packed.dtype or part.shape[1:] != (packed.columns,):
                raise ValueError(f"a part of {tuple(part.shape)} in {part.dtype} of a weight in {packed.dtype}")
            source.rows = part.shape[0]
            if isinstance(part, Stored):
                source.file, source.offset = part.file, part.offset
            elif isinstance(part, BlockRows):
                source.weight, source.interleaved = part.data.data_ptr(), part.interleaved
            else:
                assert part.is_contiguous()
                source.weight = part.data_ptr()
        weight = PlainWeight(
            ctypes.addressof(sources),
            packed.panels.data_ptr(),
            None if packed.scales is None else packed.scales.data_ptr(),
            None if packed.importance is None else packed.importance.data_ptr(),
            len(parts),
            sum(part.shape[0] for part in parts),
            packed.columns,
            packed.row_bytes(),
            packed.dtype.itemsize,
            len(packed.panels),
            packed.bits or 0,
            gated,
            packed.format,
        )
        self._weights[packed.packer].append(((sources[0].file, sources[0].offset), weight))
        self._kept.append((sources, parts, packed))

    def run(self) -> None:
        """Pack all weights, reading files sequentially. Those that could not be compressed are then packed as they are.

        Raises MemoryError, or OSError if a file cannot be read, with the descriptor as its `filename`.
        """
        progress, threads = ctypes.addressof(self._progress), torch.get_num_threads()
        for packer in sorted(self._weights):
            weights = sorted(self._weights.pop(packer), key=lambda entry: entry[0])
            batch = (PlainWeight * len(weights))(*(weight for _, weight in weights))
            failed = self._kernels.packers[packer](ctypes.addressof(batch), len(batch), progress, threads)
            if failed == 1:
                raise MemoryError("no memory to pack weights")
            if failed:
                error = self._progress.error
                raise OSError(error, os.strerror(error) if error else "it ends early", self._progress.wrong)
        kept, self._kept = self._kept, []
        for _, parts, packed in kept:
            if packed.store_again(self, parts):
                self._progress.num_bytes -= sum(part.shape[0] for part in parts) * packed.row_bytes()
        if self._weights:
            self.run()


class Packed:
    """Computes x @ weight.T (+ bias) (+ residual), in float32 sums of one fixed order, rounded once.

    A gated weight is gate rows followed by as many up rows, and the result is silu(x @ gate.T) * (x @ up.T), or
    with another activation, see `finish_with`. The packed
    weight is a copy, so the plain one may be freed. Several threads may call at once.
    """

    bits: int | None = None  # that the weight is quantized to; None: not quantized
    format = 0  # of a weight in blocks
    planes = 1  # with such a weight: bytes of an activation
    importance: Tensor | None = None  # of the columns of a weight in 4 or 5 bits: float32, padded to whole groups
    packer = "pack"  # the kernel that packs the weight
    order: Tensor | None = None  # [columns] int32: the column of x that each column of the packed weight belongs to

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor | Parts,  # [rows, columns] float32 or bfloat16, or parts of it
        bias: Tensor | None = None,  # [rows]
        *,
        gated: bool = False,
        wide: bool = False,  # results in float32 even if weights and activations are bfloat16
        stride: int | None = None,  # numbers between two rows of the result; None: they are contiguous
        packing: Packing | None = None,  # packs the weight when it runs; None: pack it now
    ) -> None:
        parts: Parts = [weight.contiguous()] if isinstance(weight, Tensor) else weight
        rows, self.columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.dtype, self.outputs = parts[0].dtype, rows // 2 if gated else rows
        self.result = torch.float32 if wide else self.dtype
        self._kernels, self._gated = kernels, gated
        per_panel = kernels.width // 2 if gated else kernels.width
        num_panels = -(-self.outputs // per_panel)
        self._bias = None if bias is None else self._panelled(bias.float(), num_panels, gated)
        self._matrix = Matrix(
            None,  # see _store
            None,
            None if self._bias is None else self._bias.data_ptr(),
            None if self.order is None else self.order.data_ptr(),
            self.outputs,
            stride or self.outputs,
            self.columns,
            num_panels,
            gated,
            wide,
            self.format,
            self.planes,
        )
        self._address = ctypes.addressof(self._matrix)
        work = packing or Packing(kernels, slab=0)
        self._store(work, parts)
        if packing is None:
            work.run()

    def _store(self, packing: Packing, parts: Parts) -> None:
        """Allocate memory for the weight, and let `packing` fill it."""
        num_panels = self._matrix.num_panels
        self.panels = packing.allocate(num_panels, *self._panel_shape())
        self.scales = self._allocate_scales(num_panels)
        self._matrix.panels = self.panels.data_ptr()
        self._matrix.scales = None if self.scales is None else self.scales.data_ptr()
        self._multiply = self._function(self._kernels)
        packing.add(self, parts, self._gated)

    def store_again(self, packing: Packing, parts: Parts) -> bool:
        """Called after packing. Return whether the weight did not fit and is to be packed in another form."""
        return False

    @property
    def num_bytes(self) -> int:
        """The memory it occupies."""
        return sum(part.nbytes for part in (self.panels, self.scales, self._bias) if part is not None)

    @property
    def saved_bytes(self) -> int:
        """How much memory compression saves."""
        return 0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] for x: [rows, columns]. `residual` has the result's shape and x's dtype, and is
        added."""
        rows = self._check(x, self.columns)
        if residual is not None:
            residual = residual.contiguous()
            if self._check(residual, self.outputs) != rows:
                raise ValueError(f"a residual of {residual.shape[0]} rows for {rows}")
        x = x.contiguous()
        y = torch.empty(rows, self.outputs, dtype=self.result)
        failed = self._multiply(
            self._address,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            rows,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for a product's activations")
        return y

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows of the weight: [n, columns] for ids: [n] int64. Raises IndexError for an id without a row."""
        out = torch.empty(len(ids), self.columns, dtype=self.dtype)
        ids = ids.contiguous()
        if wrong := self._look_up(ids, out):
            raise IndexError(f"there is no row {int(ids[wrong - 1])} among {self.outputs}")
        return out

    def finish_with(self, *, scale: float = 1.0, gate: Gate | None = None) -> None:
        """Let matmuls multiply their results by `scale` before the residual is added; `gate`: of a gated weight."""
        self._matrix.scale = 0.0 if scale == 1 else scale
        if gate is not None:
            self._matrix.gate = gate

    def row_bytes(self) -> int:
        """Return the size of a row of the plain weight."""
        return self.columns * self.dtype.itemsize

    def _function(self, kernels: Kernels) -> Any:
        """Return the kernel that multiplies."""
        return kernels.multiply[self.dtype]

    def _panel_shape(self) -> tuple[int, ...]:
        """Return the shape of a panel, in numbers of four bytes."""
        return (-(-self.columns * self.dtype.itemsize // 4), self._kernels.width)

    def _allocate_scales(self, num_panels: int) -> Tensor | None:
        return None

    def _look_up(self, ids: Tensor, out: Tensor) -> int:
        """Write rows to `out`; return 0, or 1 + the index of the first invalid id."""
        arguments = ids.data_ptr(), len(ids), out.data_ptr()
        return int(self._kernels.lookup(self._address, self.dtype.itemsize, *arguments))

    def multiplied(self) -> Multiplied:
        """Return the matmul for kernels that call it, valid while this object exists."""
        return Multiplied(address(self._multiply), self._address)

    def _check(self, x: Tensor, columns: int) -> int:
        """Return the number of rows; raises ValueError unless the kernels can read the tensor."""
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != columns or x.device.type != "cpu":
            raise ValueError(f"not [rows, {columns}] of {self.dtype} on the CPU: {tuple(x.shape)} of {x.dtype}")
        return x.shape[0]

    def _panelled(self, bias: Tensor, num_panels: int, gated: bool) -> Tensor:
        """Return the bias in the order of the panels' rows, padded with zeros."""
        panels = torch.zeros(num_panels * self._kernels.width)
        if not gated:
            panels[: len(bias)] = bias
            return panels
        halves = panels.view(num_panels, 2, -1)
        for half, part in enumerate(bias.chunk(2)):
            padded = torch.zeros(num_panels * self._kernels.width // 2)
            padded[: len(part)] = part
            halves[:, half] = padded.view(num_panels, -1)
        return panels


class Quantized(Packed):
    """Like Packed, with the weight quantized to 8, 5 or 4 bits while it is packed.

    In 8 bits a row has one scale, see quantized.cpp; or each group of a row has, if `grouped`, see rounding.cpp. With
    fewer bits each group has the scale and the minimum, of several, with the smallest sum of squared errors times the
    importance of their columns. Activations are quantized to 8 bits: each group of a row separately, or 128 numbers
    where a row of the weight has one scale. `lookup` returns dequantized rows.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor | Parts,  # [rows, columns] float32 or bfloat16, or parts of it
        bias: Tensor | None = None,  # [rows]
        *,
        bits: int,
        grouped: bool = False,  # fewer than 8 bits always are
        importance: Tensor | None = None,  # [columns], not negative; None: all columns matter alike. Not with 8 bits
        gated: bool = False,
        wide: bool = False,
        stride: int | None = None,
        packing: Packing | None = None,
    ) -> None:
        self.bits, self._grouped = bits, grouped or bits < 8
        self.packer = "round_rows" if self._grouped else "quantize"
        if self._grouped:
            self.format = FORMATS_OF_ROWS[bits]
        if bits < 8:
            columns = (weight if isinstance(weight, Tensor) else weight[0]).shape[1]
            self.importance = torch.zeros(-(-columns // GROUP) * GROUP)
            self.importance[:columns] = 1.0 if importance is None else importance.float()
        super().__init__(kernels, weight, bias, gated=gated, wide=wide, stride=stride, packing=packing)

    def _function(self, kernels: Kernels) -> Any:
        assert self.bits is not None
        return kernels.multiply_blocks[self.bits, self.dtype] if self._grouped else kernels.multiply_int8[self.dtype]

    def _panel_shape(self) -> tuple[int, ...]:
        assert self.bits is not None
        return (units_of(self.columns, self.bits, grouped=self._grouped), self._kernels.width)

    def _allocate_scales(self, num_panels: int) -> Tensor | None:
        if not self._grouped:
            return torch.empty(num_panels, self._kernels.width)
        return torch.empty(num_panels, self._kernels.scales_bytes(self.format, self.columns), dtype=torch.uint8)

    def _look_up(self, ids: Tensor, out: Tensor) -> int:
        look_up = self._kernels.dequantized_blocks if self._grouped else self._kernels.dequantized
        return int(look_up(self._address, self.dtype.itemsize, ids.data_ptr(), len(ids), out.data_ptr()))


class Lossless(Packed):
    """Like Packed, with the same results, for a weight in bfloat16 that is compressed to about 12 bits per number; see
    lossless.cpp.

    A weight whose exponents vary too much is packed as it is; `saved_bytes` is then 0.
    """

    packer = "compress"

    @property
    def saved_bytes(self) -> int:
        if self.packer == "pack":
            return 0
        plain = self._matrix.num_panels * math.prod(super()._panel_shape()) * 4
        return plain - sum(part.nbytes for part in (self.panels, self.scales) if part is not None)

    def store_again(self, packing: Packing, parts: Parts) -> bool:
        if self.packer == "pack" or not self._kernels.lossless_failures(self._address):
            return False
        self.packer = "pack"
        self._store(packing, parts)
        return True

    def _function(self, kernels: Kernels) -> Any:
        return super()._function(kernels) if self.packer == "pack" else kernels.multiply_lossless

    def _panel_shape(self) -> tuple[int, ...]:
        if self.packer == "pack":
            return super()._panel_shape()
        return (self._kernels.lossless_panel_bytes(self.columns) // 4,)

    def _allocate_scales(self, num_panels: int) -> Tensor | None:
        if self.packer == "pack":
            return None
        return torch.empty(num_panels, self._kernels.lossless_codes_bytes(self.columns), dtype=torch.uint8)

    def _look_up(self, ids: Tensor, out: Tensor) -> int:
        if self.packer == "pack":
            return super()._look_up(ids, out)
        return int(self._kernels.lossless_lookup(self._address, ids.data_ptr(), len(ids), out.data_ptr()))


def unquantized(
    kernels: Kernels,
    weight: Tensor | Parts,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    wide: bool = False,
    packing: Packing | None = None,
) -> Packed:
    """Pack a weight in its own dtype, compressed if the kernels compress such weights."""
    dtype = weight.dtype if isinstance(weight, Tensor) else weight[0].dtype
    kind = Lossless if kernels.lossless and dtype == torch.bfloat16 else Packed
    return kind(kernels, weight, bias, gated=gated, wide=wide, packing=packing)


class Joined(Packed):
    """Like Packed, for a weight whose parts are packed in different ways, as queries and values are."""

    def __init__(self, kernels: Kernels, parts: Sequence[Packed]) -> None:
        """`parts` have the same input and, as their `stride`, the number of all outputs."""
        self._parts = parts
        self.dtype, self.columns, self.result = parts[0].dtype, parts[0].columns, parts[0].result
        self.outputs = sum(part.outputs for part in parts)
        before = itertools.accumulate((part.outputs for part in parts[:-1]), initial=0)
        offsets = [outputs * self.dtype.itemsize for outputs in before]
        self._kept = (
            (Multiplied * len(parts))(*(part.multiplied() for part in parts)),
            (ctypes.c_int64 * len(parts))(*offsets),
        )
        self._joined = JoinedParts(*(ctypes.addressof(each) for each in self._kept), len(parts))
        self._multiply, self._address = kernels.multiply_joined, ctypes.addressof(self._joined)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def finish_with(self, *, scale: float = 1.0, gate: Gate | None = None) -> None:
        for part in self._parts:
            part.finish_with(scale=scale, gate=gate)

    def lookup(self, ids: Tensor) -> Tensor:
        raise AssertionError("an embedding is one tensor, of one format")


def units_of(columns: int, bits: int, *, grouped: bool) -> int:
    """Return the number of four-byte units of a row, see Quantized."""
    return -(-columns // GROUP) * bits if grouped else -(-columns // 4)


def quantized_bytes(rows: int, columns: int, bits: int, *, grouped: bool = False) -> int:
    """Return the size of a quantized weight with its scales, without the padding of its last panel; see Quantized."""
    grouped = grouped or bits < 8
    kinds = 2 if bits < 8 else 1  # a scale and a minimum, or a scale
    scales = kinds * (2 + -(-columns // GROUP)) if grouped else 4
    return rows * (units_of(columns, bits, grouped=grouped) * 4 + scales)
