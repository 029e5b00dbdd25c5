"""Matmuls with quantized weights on a GPU: how they are stored, and launches of kernels/gpu/matmul.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention.paged_gpu import dependence, is_interpreted
from ...kernels.launching import gpu_kernels, launch
from ..norms import RMSNorm
from . import scaled
from .form import Form
from .gates import is_gated
from .routing import Routed
from .scaled import TILE_ROWS, TILE_TOKENS, ByTorch, Narrow
from .single import MOST_COLUMNS, QUAD, Row, multiply_quantized
from .tiles import LEAST_ROWS, MOST_ROWS, TILES, UNIFORM_TILE, AnyTile, Tile, Tiles, tile_of

# Numbers of a weight that are dequantized at once.
PIECE_NUMBERS = 1 << 26
# Programs of a product with one tile of rows of x: about two per multiprocessor of large GPUs. The number of parts of a
# sum follows from the weight's shape. A part has at least MIN_SLICES.
PROGRAMS, MIN_SLICES = 256, 8
PART_ROWS = 64  # of a weight, per program
LOOKED_UP = 16  # rows per program of `dequantize` that are looked up
DEQUANTIZED_ROWS, DEQUANTIZED_WARPS = 64, 4  # of a program for consecutive rows
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
        shape = (
            (rows, self._slices * form.slice) if form.is_float else (self._slices, rows, form.slice * form.bits // 8)
        )
        self._numbers = torch.zeros(shape, dtype=form.dtype, device=device)
        groups = form.groups(columns)
        self._scales = torch.zeros(groups, rows, dtype=form.scale, device=device)
        self._zeros = torch.zeros(groups, rows, dtype=form.dtype, device=device) if form.has_zeros else None
        self._parts = max(1, min(PROGRAMS // -(-rows // PART_ROWS), self._slices // MIN_SLICES))
        # One for each tile of a product in parts; scaled.CANDIDATES has those with the most tiles.
        counters = max(-(-rows // LEAST_ROWS), -(-rows // TILE_ROWS) * (MOST_ROWS // TILE_TOKENS))
        self._arrived = torch.zeros(counters, dtype=torch.int32, device=device)
        self._is_scaled = self._is_by_torch = self._is_uniform = False
        self._blocks: Tensor | None = None  # scales, [blocks of rows, blocks of columns]
        self.is_biased = True  # the bias of products is more than zeros
        self._tiles: Tiles = TILES

    @property
    def may_scale(self) -> bool:
        """Whether x can be in fp8, too, if the scales are those of blocks: see scaled.py."""
        form = self.form
        if not form.is_float or form.weights_only or self._scales.dtype != torch.float32 or self.order is not None:
            return False
        return form.group in (0, scaled.GROUP) and not (self.rows % scaled.MULTIPLE or self.columns % scaled.GROUP)

    @property
    def can_scale(self) -> bool:
        """Whether x can be in fp8, too. It waits for the device."""
        if not (self.may_scale and self.form.group):
            return self.may_scale
        blocks = self._scales[:, :: scaled.GROUP].repeat_interleave(scaled.GROUP, 1)[:, : self.rows]
        return torch.equal(blocks, self._scales)

    def scale(self, *, by_torch: bool) -> None:
        """Multiply several rows of x in fp8. `by_torch`: torch can, see scaled.objection_to_torch."""
        assert self.can_scale
        has_blocks = not self.form.group or self.columns % (scaled.BLOCKS * scaled.GROUP) == 0
        self._is_scaled, self._is_by_torch = True, by_torch and has_blocks
        self._blocks = self._scales[:, :: scaled.GROUP].t().contiguous() if self.form.group else None
        self._tiles = {**TILES, **{most: tiles[0] for most, tiles in scaled.CANDIDATES.items()}}

    @property
    def is_scaled(self) -> bool:
        """Whether several rows of x are multiplied in fp8."""
        return self._is_scaled

    @property
    def is_by_torch(self) -> bool:
        """Whether torch multiplies x in fp8 if there are more than MOST_ROWS rows."""
        return self._is_by_torch

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
        numbers = F.pad(numbers, (0, self._slices * self.form.slice - self.columns))
        if self.form.is_float:
            self._numbers[first:last] = numbers.view(self.form.dtype)
        else:
            slices = numbers.view(count, self._slices, -1)
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
        """Write x @ weight.T + bias to out [tokens, rows], of which only rows must be contiguous.

        If `is_by_torch`, the memory after a contiguous out is overwritten, up to scaled.padded rows.
        """
        if self.order is not None:
            x = x.index_select(1, self.order)
        if len(x):
            self.multiply_in(self._tile(x, out), x, bias, out)

    def _tile(self, x: Tensor, out: Tensor) -> AnyTile | None:
        """Return how x is multiplied, see `multiply_in`."""
        if self._is_uniform:
            return UNIFORM_TILE
        if len(x) > MOST_ROWS and out.dtype == x.dtype:
            return ByTorch() if self._is_by_torch and x.dtype == torch.bfloat16 else None
        rows = 2 if len(x) == 1 and self.row(x) is None else len(x)  # the smallest of the other tiles
        return tile_of(self._tiles, rows)

    def _dequantize(self, x: Tensor, bias: Tensor, out: Tensor) -> None:
        """Do as `multiply`, by torch with plain numbers."""
        step = max(1, PIECE_NUMBERS // self.columns)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            plain = self._numbers_of(None, first, last - first, x.dtype)
            out[:, first:last] = F.linear(x, plain, bias[first:last])

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight, [n, columns], for ids: [n] int64."""
        rows = self._numbers_of(ids.contiguous(), 0, len(ids), dtype)
        return rows if self.order is None else rows[:, self.order.argsort()]

    def multiply_routed(self, x: Tensor, bias: Tensor, out: Tensor, routed: Routed, tile: Tile) -> None:
        """Write a row for each pair to out; the weight is that of the first expert, and so is the bias."""
        if len(x):
            self._run(x, bias, out, tile, tiles=routed.tiles, parts=1, routed=routed)

    def use(self, tiles: Tiles) -> None:
        """Let the kernel multiply with these tiles, by the largest number of rows of x."""
        self._tiles = tiles

    @property
    def tiles(self) -> Tiles:
        """Those of `use`."""
        return self._tiles

    def row(self, x: Tensor) -> Row | None:
        """Return how the kernel for a single row multiplies x; None: it does not."""
        if len(x) != 1 or self._is_uniform or x.dtype not in DTYPES or self.columns > MOST_COLUMNS:
            return None
        if self.columns % QUAD or x.storage_offset() % QUAD:
            return None
        tile = self._tiles[1]
        return tile if isinstance(tile, Row) else None

    def multiply_row(
        self,
        x: Tensor,
        bias: Tensor | None,
        out: Tensor,
        row: Row,
        *,
        residual: Tensor | None = None,
        activation: str = "",
        norm: RMSNorm | None = None,
    ) -> None:
        """Do as single.multiply_quantized, for x in the weight's order of columns."""
        multiply_quantized(
            x, self.tensors, self.form, row, out, bias=bias, residual=residual, activation=activation, norm=norm
        )

    def multiply_in(self, tile: AnyTile | None, x: Tensor, bias: Tensor, out: Tensor) -> None:
        """Do as `multiply`, with this tile."""
        if isinstance(tile, Row):
            self.multiply_row(x, bias, out, tile)
            return
        if tile is None:
            self._dequantize(x, bias, out)
            return
        if isinstance(tile, Narrow):
            weight = scaled.Stored(self._float8, self._scales, self._arrived)
            scaled.multiply(scaled.quantize(x), weight, bias, out, tile)
            return
        if isinstance(tile, ByTorch):
            self._multiply_by_torch(x, bias, out)
            return
        tiles = -(-len(x) // tile.tokens)
        parts = self._parts if tiles == 1 and not self._is_uniform else 1  # several tiles are programs enough
        self._run(x, bias, out, tile, tiles=tiles, parts=parts)

    @property
    def _float8(self) -> Tensor:
        """The numbers of a weight that can be scaled, [rows, columns]."""
        return self._numbers.view(torch.float8_e4m3fn)

    def _multiply_by_torch(self, x: Tensor, bias: Tensor, out: Tensor) -> None:
        """Do as `multiply`, in fp8. With scales of blocks the product is rounded before the bias is added."""
        if self._blocks is None:
            numbers = scaled.quantize_rows(x)
            out.copy_(scaled.product_of_rows(numbers, self._float8, self._scales[0], bias))
            return
        scaled.multiply_by_torch(x, self._float8, self._blocks, bias if self.is_biased else None, out)

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
            FAN=fan, TOGETHER=tile.slices, TURNED=tile.turned, FOLD=tile.folded,
            EVEN=not (self.columns % self.form.slice or self._slices % tile.slices), num_warps=tile.warps,
            **dependence(x.device),
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


class GPUProduct:
    """Computes x @ weight.T (+ bias) (+ residual) on a GPU, with a weight whose rows are quantized.

    Sums are in float32, in an order that depends on the weight's shape and on the tile, which is chosen for a range of
    numbers of rows of x. So a row has the same bits among any others, as long as their number is in the same range and
    torch does not compute the product; after `unify` among any others.
    """

    def __init__(
        self, parts: Sequence[GPUWeight], bias: Tensor | None, dtype: torch.dtype, *, wide: bool = False
    ) -> None:
        """`parts`: the weight's rows, in their order. `wide`: results in float32, whatever the dtype of x."""
        self._weights, self._dtype = parts, dtype
        self._result = torch.float32 if wide else dtype
        self.outputs = sum(part.rows for part in parts)
        self._has_bias = bias is not None
        # Zeros instead of none: a kernel less that would have to be compiled, and tried.
        self._bias = torch.zeros(self.outputs, dtype=dtype, device=parts[0].device) if bias is None else bias
        for part in parts:
            part.is_biased = self._has_bias

    @property
    def num_bytes(self) -> int:
        """The memory of the weight."""
        return sum(weight.num_bytes for weight in self._weights)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] for x: [rows, columns]; `residual`, of the same shape, is added."""
        out = self._joined(x, GPUWeight.multiply)
        return out if residual is None else residual + out

    def fuses(self, x: Tensor, *, is_gated: bool) -> bool:
        """Return whether `fused` takes x."""
        is_one = len(self._weights) == 1 or not is_gated  # the rows of gate and up are in one weight
        return is_one and all(each.order is None and each.row(x) is not None for each in self._weights)

    def fused(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        activation: str = "",
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """Return the product of a single row, or with an `activation` the gate's output; `residual`: the result
        is added to it in place. `norm`: of x, before the product, see single.takes."""
        out = residual
        if out is None:
            out = torch.empty(1, self.outputs // (1 + is_gated(activation)), dtype=self._result, device=x.device)
        first = 0
        for weight in self._weights:
            last, row = first + weight.rows, weight.row(x)
            assert row is not None
            part, bias = out[:, first:last], self._bias[first:last] if self._has_bias else None
            before = None if residual is None else part
            weight.multiply_row(x, bias, part, row, residual=before, activation=activation, norm=norm)
            first = last
        return out

    def multiply_in(self, tile: AnyTile | None, x: Tensor) -> Tensor:
        """Return the product with this tile, see GPUWeight.multiply_in."""
        return self._joined(x, lambda weight, *args: weight.multiply_in(tile, *args))

    def _joined(self, x: Tensor, multiply: Callable[[GPUWeight, Tensor, Tensor, Tensor], None]) -> Tensor:
        """Return the products of all weights side by side, as `multiply` writes them: see GPUWeight.multiply."""
        rows = scaled.padded(len(x)) if self._weights[0].is_by_torch else len(x)  # see _multiply_by_torch
        out = torch.empty(rows, self.outputs, dtype=self._result, device=x.device)[: len(x)]
        first = 0
        for weight in self._weights:
            last = first + weight.rows
            multiply(weight, x, self._bias[first:last], out[:, first:last])
            first = last
        return out

    @property
    def is_wide(self) -> bool:
        """Whether results are in float32, whatever the dtype of x."""
        return self._result != self._dtype

    @property
    def can_scale(self) -> bool:
        """Whether `scale` changes anything."""
        return not self.is_wide and self._dtype in DTYPES and any(weight.can_scale for weight in self._weights)

    def scale(self, *, by_torch: Mapping[bool, bool]) -> None:
        """Multiply several rows in fp8, see scaled.py. `by_torch`: whether torch can, with a scale per row and (True)
        with one per block."""
        for weight in self._weights:
            if weight.can_scale:
                weight.scale(by_torch=by_torch[bool(weight.form.group)])

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
    def has_bias(self) -> bool:
        """Whether the layer has a bias."""
        return self._has_bias

    @property
    def kind(self) -> tuple[tuple[str, int, int, bool], ...]:
        """What products have in common that take the same time: forms, rows and columns, and whether they are in
        fp8."""
        return tuple((weight.form.name, weight.rows, weight.columns, weight.is_scaled) for weight in self._weights)

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


def random_weight(
    form: Form, rows: int, columns: int, draw: torch.Generator, *, in_blocks: bool = False
) -> tuple[GPUWeight, Tensor]:
    """Return a weight of random numbers, and the same in float32, to compare products with. It is on the device of
    `draw`. `in_blocks`: as many rows as columns share a scale, as in checkpoints in fp8."""
    device = draw.device

    def integers(size: int) -> Tensor:
        return torch.randint(1 << form.bits, (rows, size), generator=draw, dtype=torch.uint8, device=device)

    numbers = integers(columns)
    groups = -(-columns // form.group) if form.group else 1
    scales = ((torch.rand(rows, groups, generator=draw, device=device) + 0.5) / 128).to(form.scale)
    if in_blocks and form.group:
        scales = scales[:: form.group].repeat_interleave(form.group, 0)[:rows]
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
