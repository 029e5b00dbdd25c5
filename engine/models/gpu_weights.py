"""Matmuls with quantized weights on a GPU: how they are stored, and launches of kernels/gpu/matmul.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.paged_gpu import MAX_ERROR, dependence, is_interpreted, lack
from ..kernels.launching import META, Compiling, Job, gpu_kernels, launch
from . import scaled
from .gpu_form import Form
from .gpu_tiles import CANDIDATES, LEAST_ROWS, MOST_ROWS, TILES, UNIFORM_TILE, Tile, tile_of
from .routing import Routed

# The largest number of rows of x that the kernel multiplies where torch multiplies more in fp8.
SCALED_ROWS = 64
# Numbers of a weight that are dequantized at once.
PIECE_NUMBERS = 1 << 26
# Programs of a product with one tile of rows of x: about two per multiprocessor of large GPUs. The number of parts of a
# sum follows from the weight's shape. A part has at least MIN_SLICES.
PROGRAMS, MIN_SLICES = 256, 8
PART_ROWS = 64  # of a weight, per program
LOOKED_UP = 16  # rows per program of `dequantize` that are looked up
DEQUANTIZED_ROWS, DEQUANTIZED_WARPS = 64, 4  # of a program for consecutive rows
TRIAL_ROWS = 1024  # of a large weight
FLOAT8_NAN = 0x7F  # without the sign
DTYPES = (torch.bfloat16, torch.float16)


class GPUWeight:
    """A quantized weight on a GPU, or consecutive rows of one."""

    def __init__(
        self,
        form: Form,
        rows: int,
        columns: int,
        device: torch.device,
        order: Tensor | None = None,  # [columns] int64: the column of x that each stored column belongs to
    ) -> None:
        self.form, self.rows, self.columns, self.order = form, rows, columns, order
        self._slices = form.slices(columns)
        # The padding of columns is multiplied by zeros, and may not be NaN.
        self._numbers = torch.zeros(self._slices, rows, form.slice * form.bits // 8, dtype=form.dtype, device=device)
        groups = form.groups(columns)
        self._scales = torch.zeros(groups, rows, dtype=form.scale, device=device)
        self._zeros = torch.zeros(groups, rows, dtype=form.dtype, device=device) if form.has_zeros else None
        self._parts = max(1, min(PROGRAMS // -(-rows // PART_ROWS), self._slices // MIN_SLICES))
        self._arrived = torch.zeros(-(-rows // LEAST_ROWS), dtype=torch.int32, device=device)
        self._is_scaled = self._is_uniform = False
        self._tiles: Mapping[int, Tile] = TILES

    @property
    def can_scale(self) -> bool:
        """Whether scaled.product takes the weight."""
        has_scale_per_row = self.form.is_float and not self.form.group and self._scales.dtype == torch.float32
        return has_scale_per_row and not (self.rows % scaled.MULTIPLE or self.columns % scaled.MULTIPLE)

    def scale(self) -> None:
        """Let torch multiply more than SCALED_ROWS rows in fp8, with a scale per row of x."""
        assert self.can_scale
        self._is_scaled = True

    def unify(self) -> None:
        """Let the kernel multiply any number of rows, with one tile and without parts of sums."""
        self._is_uniform = True

    @property
    def is_uniform(self) -> bool:
        return self._is_uniform

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers, scales and zero points, in place of which there may be the scales again: what a kernel reads."""
        return self._numbers, self._scales, self._scales if self._zeros is None else self._zeros

    @property
    def device(self) -> torch.device:
        return self._numbers.device

    @property
    def num_bytes(self) -> int:
        parts = (self._numbers, self._scales, self._zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def write(self, first: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Store rows from `first` on: numbers [n, columns] in bytes, of 4 bits in the lower half; scales and zero
        points [n, groups]. Numbers of 8 bits are unsigned, or the bits of floats."""
        count, last = len(numbers), first + len(numbers)
        numbers = numbers.to(self.device).view(torch.uint8)
        if self.form.bits == 8 and not self.form.is_float:
            numbers = numbers ^ 0x80
        padding = self._slices * self.form.slice - self.columns
        slices = F.pad(numbers, (0, padding)).view(count, self._slices, -1)
        if self.form.bits == 4:
            low, high = slices.chunk(2, dim=-1)
            slices = low | high << 4
        self._numbers[:, first:last] = slices.transpose(0, 1).view(self.form.dtype)
        self._scales[: scales.shape[1], first:last] = scales.T
        if self._zeros is not None:
            assert zeros is not None
            zeros = zeros.to(self.device).T
            self._zeros[: len(zeros), first:last] = (zeros if self.form.bits == 4 else zeros ^ 0x80).view(
                self.form.dtype
            )

    def multiply(self, x: Tensor, bias: Tensor, out: Tensor) -> None:
        """Write x @ weight.T + bias to out [tokens, rows], of which only rows must be contiguous."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self._is_uniform:
            if len(x):
                self._launch(x, bias, out)
        elif self._is_scaled and len(x) > SCALED_ROWS and out.dtype == x.dtype == torch.bfloat16:
            step = max(scaled.MULTIPLE, PIECE_NUMBERS // self.columns // scaled.MULTIPLE * scaled.MULTIPLE)
            numbers = scaled.quantize(x)
            for first in range(0, self.rows, step):
                last = min(first + step, self.rows)
                piece = self._numbers[:, first:last].transpose(0, 1).reshape(last - first, -1)[:, : self.columns]
                plain = piece.contiguous().view(torch.float8_e4m3fn)
                out[:, first:last] = scaled.product(numbers, plain, self._scales[0, first:last], bias[first:last])
        elif len(x) > MOST_ROWS and out.dtype == x.dtype:
            step = max(1, PIECE_NUMBERS // self.columns)
            for first in range(0, self.rows, step):
                last = min(first + step, self.rows)
                plain = self._numbers_of(None, first, last - first, x.dtype)
                out[:, first:last] = F.linear(x, plain, bias[first:last])
        elif len(x):
            self._launch(x, bias, out)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight, [n, columns], for ids: [n] int64."""
        rows = self._numbers_of(ids.contiguous(), 0, len(ids), dtype)
        return rows if self.order is None else rows[:, self.order.argsort()]

    def multiply_routed(self, x: Tensor, bias: Tensor, out: Tensor, routed: Routed, tile: Tile) -> None:
        """Write a row for each pair to out; the weight is that of the first expert, and so is the bias."""
        if len(x):
            self._run(x, bias, out, tile, tiles=routed.tiles, parts=1, routed=routed)

    def use(self, tiles: Mapping[int, Tile]) -> None:
        """Let the kernel multiply with these tiles, by the largest number of rows of x."""
        self._tiles = tiles

    @property
    def tiles(self) -> Mapping[int, Tile]:
        """Those of `use`."""
        return self._tiles

    def multiply_in(self, tile: Tile, x: Tensor, bias: Tensor, out: Tensor) -> None:
        """Do as `multiply`, with this tile."""
        tiles = -(-len(x) // tile.tokens)
        parts = self._parts if tiles == 1 and not self._is_uniform else 1  # several tiles are programs enough
        self._run(x, bias, out, tile, tiles=tiles, parts=parts)

    def _launch(self, x: Tensor, bias: Tensor, out: Tensor) -> None:
        self.multiply_in(UNIFORM_TILE if self._is_uniform else tile_of(self._tiles, len(x)), x, bias, out)

    def _run(
        self, x: Tensor, bias: Tensor, out: Tensor, tile: Tile, *, tiles: int, parts: int, routed: Routed | None = None
    ) -> None:
        tokens = len(x)
        pairs, owners, places, fan = (x, x, x, 0) if routed is None else routed.arguments
        x = x if x.stride(1) == 1 else x.contiguous()
        shape = (parts, tokens, self.rows) if parts > 1 else (0,)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        launch(gpu_kernels("matmul").multiply, (-(-self.rows // tile.rows), parts, tiles),
            x, *self.tensors, bias, out, sums, self._arrived, pairs, owners, places,
            tokens, self.rows, self.columns, self._slices, x.stride(0), out.stride(0),
            **self._constants(), TOKENS=tile.tokens, ROWS=tile.rows, STAGES=tile.stages, WIDEN=is_interpreted(),
            FAN=fan, TOGETHER=tile.slices, num_warps=tile.warps, **dependence(x.device),
        )  # fmt: skip

    def _numbers_of(self, ids: Tensor | None, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return rows as plain numbers in the order of the stored columns."""
        out = torch.empty(count, self.columns, dtype=dtype, device=self.device)
        if count:
            rows, warps = (DEQUANTIZED_ROWS, DEQUANTIZED_WARPS) if ids is None else (LOOKED_UP, 1)
            launch(gpu_kernels("matmul").dequantize, (-(-count // rows), self._slices),
                *self.tensors, self._arrived if ids is None else ids, out, first, count, self.rows, self.columns,
                **self._constants(), ROWS=rows, LOOK_UP=ids is not None,
                num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    def _constants(self) -> dict[str, Any]:
        form = self.form
        return {
            "BITS": form.bits, "FLOAT": form.is_float, "ZEROS": form.has_zeros, "SLICE": form.slice,
            "GROUP": form.group,
        }  # fmt: skip


class CodedPiece(NamedTuple):
    """Rows of a weight in a quantized checkpoint, see GPUWeight.write."""

    rows: slice
    numbers: Tensor
    zeros: Tensor | None
    scales: Tensor


class CodedRows(NamedTuple):
    """A weight in a quantized checkpoint, in a form that a GPU computes with."""

    form: Form
    shape: tuple[int, ...]
    read: Callable[[], tuple[Tensor | None, Iterator[CodedPiece]]]  # returns the order of columns, and the rows
    num_bytes: int  # in files


def load(parts: Sequence[CodedRows], device: torch.device) -> list[GPUWeight]:
    """Read the parts of a weight to a GPU. Parts of one form and order of columns become one."""
    found: list[GPUWeight] = []
    for form, group in itertools.groupby(parts, lambda part: part.form):
        same = [(part, *part.read()) for part in group]
        for _, run in itertools.groupby(same, lambda each: None if each[1] is None else each[1].tolist()):
            rows = list(run)
            order = None if rows[0][1] is None else rows[0][1].to(device)
            columns = rows[0][0].shape[1]
            weight, first = GPUWeight(form, sum(part.shape[0] for part, *_ in rows), columns, device, order), 0
            for part, _, pieces in rows:
                for piece in pieces:
                    weight.write(first + piece.rows.start, piece.numbers, piece.scales, piece.zeros)
                first += part.shape[0]
            found.append(weight)
    return found


class GPUProduct:
    """Computes x @ weight.T (+ bias) (+ residual) on a GPU, with a weight whose rows are quantized.

    Sums are in float32, in an order that depends on the weight's shape and on the tile, which is chosen for a range of
    numbers of rows of x. So a row has the same bits among any others, as long as their number is in the same range;
    after `unify` among any others.
    """

    def __init__(
        self, parts: Sequence[GPUWeight], bias: Tensor | None, dtype: torch.dtype, *, wide: bool = False
    ) -> None:
        """`parts`: the weight's rows, in their order. `wide`: results in float32, whatever the dtype of x."""
        self._weights, self._dtype = parts, dtype
        self._result = torch.float32 if wide else dtype
        self.outputs = sum(part.rows for part in parts)
        # Zeros instead of none: a kernel less that would have to be compiled, and tried.
        self._bias = torch.zeros(self.outputs, dtype=dtype, device=parts[0].device) if bias is None else bias

    @property
    def num_bytes(self) -> int:
        """The memory of the weight."""
        return sum(weight.num_bytes for weight in self._weights)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] for x: [rows, columns]; `residual`, of the same shape, is added."""
        out = self._joined(x, GPUWeight.multiply)
        return out if residual is None else residual + out

    def multiply_in(self, tile: Tile, x: Tensor) -> Tensor:
        """Return the product by the kernel, with this tile."""
        return self._joined(x, lambda weight, *args: weight.multiply_in(tile, *args))

    def _joined(self, x: Tensor, multiply: Callable[[GPUWeight, Tensor, Tensor, Tensor], None]) -> Tensor:
        """Return the products of all weights side by side, as `multiply` writes them: see GPUWeight.multiply."""
        out = torch.empty(len(x), self.outputs, dtype=self._result, device=x.device)
        first = 0
        for weight in self._weights:
            last = first + weight.rows
            multiply(weight, x, self._bias[first:last], out[:, first:last])
            first = last
        return out

    @property
    def can_scale(self) -> bool:
        """Whether `scale` changes anything."""
        return self._result == torch.bfloat16 and any(weight.can_scale for weight in self._weights)

    def scale(self) -> None:
        """Let torch multiply many rows in fp8, see scaled.py."""
        for weight in self._weights:
            if weight.can_scale:
                weight.scale()

    def unify(self) -> None:
        """Let the kernel multiply any number of rows, with one order of sums."""
        for weight in self._weights:
            weight.unify()

    @property
    def parts(self) -> Sequence[GPUWeight]:
        """The weight's rows, in their order."""
        return self._weights

    @property
    def bias(self) -> Tensor:
        """[outputs]: zeros if the layer has none."""
        return self._bias

    @property
    def kind(self) -> tuple[tuple[str, int, int], ...]:
        """What products have in common that take the same time: forms, rows and columns."""
        return tuple((weight.form.name, weight.rows, weight.columns) for weight in self._weights)

    @property
    def forms(self) -> tuple[Form, ...]:
        """How the weight's parts are stored."""
        return tuple(weight.form for weight in self._weights)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, [n, columns], for ids: [n] int64."""
        (weight,) = self._weights  # an embedding is one tensor, of one form
        return weight.lookup(ids, self._dtype)


def is_gpu(device: torch.device, isa: str) -> bool:
    """Return whether Triton kernels compute on a device. In their interpreter they do on a CPU without our own."""
    return device.type == "cuda" or (is_interpreted() and isa == "torch")


def objection(
    shapes: Iterable[tuple[Form, int, int]], dtype: torch.dtype, device: torch.device, head: int
) -> str | None:
    """Return why a GPU cannot compute with weights of these forms, rows and columns, or None. The kernels are tried.

    `head`: the number of rows of a weight whose results are wide. The compiled kernels are kept, so this costs a start
    no more than their first use would.
    """
    if dtype not in DTYPES and not (is_interpreted() and dtype == torch.float32):
        name = str(dtype).removeprefix("torch.")
        return f"the Triton kernels for them compute in bfloat16 (`dtype=bfloat16`) and float16, not in {name}"
    if reason := lack():
        return reason
    shapes = list(dict.fromkeys(shapes))
    if device.type == "cuda":
        compiling = Compiling({"weights": list(jobs(shapes, dtype, head))}, device)
        compiling.wait("weights")
    for form, rows, columns in shapes:
        try:
            error = _error(form, rows, columns, dtype, device, wide=rows == head)
        except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
            first = (str(problem).strip().splitlines() or [""])[0]
            return f"the Triton kernels do not run on this device: {type(problem).__name__}: {first[:200]}"
        if not error < MAX_ERROR[dtype]:
            return f"the Triton kernels compute wrong results with {form.name} (relative error {error:.2g})"
    return None


def jobs(shapes: Iterable[tuple[Form, int, int]], dtype: torch.dtype, head: int) -> Iterator[Job]:
    """Yield what compiles the kernels for weights of these forms, rows and columns, each kernel once."""
    kinds = {}
    for form, rows, columns in shapes:
        sizes = rows, columns, form.slices(columns)  # Triton compiles 1, multiples of 16 and others apart
        kinds[form, rows == head, tuple((size == 1, size % 16 == 0) for size in sizes)] = rows, columns
    for (form, wide, _), (rows, columns) in kinds.items():
        weight = GPUWeight(form, rows, columns, META)
        product = GPUProduct([weight], None, dtype, wide=wide)
        for tokens, tiles in CANDIDATES.items():
            x = torch.empty(tokens, columns, dtype=dtype, device=META)
            for tile in tiles:
                yield partial(product.multiply_in, tile, x)
        yield partial(product.lookup, torch.empty(LOOKED_UP, dtype=torch.int64, device=META))
        yield partial(product, torch.empty(MOST_ROWS + 1, columns, dtype=dtype, device=META))


@torch.inference_mode()
def _error(form: Form, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, wide: bool) -> float:
    """Return the largest relative difference from torch's product with the same numbers, over the kernels' variants.

    Of a large weight some rows are tried, with all columns.
    """
    rows = rows if rows < 2 * TRIAL_ROWS else TRIAL_ROWS + rows % TRIAL_ROWS
    draw = torch.Generator(device).manual_seed(0)
    weight, plain = random_weight(form, rows, columns, draw)
    product = GPUProduct([weight], None, dtype, wide=wide)
    ids = torch.arange(min(rows, LOOKED_UP + 1), device=device)
    errors = [relative(product.lookup(ids), plain[ids])]
    for tokens in (1, *(most + 1 for most in TILES)):
        x = torch.randn(tokens, columns, generator=draw, device=device).to(dtype)
        errors.append(relative(product(x), x.float() @ plain.T))
    return max(errors)


def random_weight(form: Form, rows: int, columns: int, draw: torch.Generator) -> tuple[GPUWeight, Tensor]:
    """Return a weight of random numbers, and the same in float32, to compare products with. It is on the device of
    `draw`."""
    device = draw.device

    def integers(size: int) -> Tensor:
        return torch.randint(1 << form.bits, (rows, size), generator=draw, dtype=torch.uint8, device=device)

    numbers = integers(columns)
    groups = -(-columns // form.group) if form.group else 1
    scales = ((torch.rand(rows, groups, generator=draw, device=device) + 0.5) / 128).to(form.scale)
    zeros = integers(groups) if form.has_zeros else None
    group = torch.arange(columns, device=device) // (form.group or columns)
    if form.is_float:
        numbers[(numbers & FLOAT8_NAN) == FLOAT8_NAN] = 0
        plain = numbers.view(torch.float8_e4m3fn).float()
    else:
        plain = numbers.float() - ((1 << form.bits - 1) if zeros is None else zeros.float()[:, group])
    weight = GPUWeight(form, rows, columns, device)
    weight.write(0, numbers, scales, zeros)
    return weight, plain.mul_(scales.float()[:, group])


def relative(found: Tensor, want: Tensor) -> float:
    """Return the relative error of a result."""
    return float((found.double() - want.double()).norm() / want.double().norm())
