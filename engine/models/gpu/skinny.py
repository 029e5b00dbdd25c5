"""Products with plain weights on a GPU: launches of kernels/gpu/skinny.py, and where they are used.

Which is faster for few rows, the kernel or torch's product with our kernels around it, depends on the GPU and on a
weight's shape. So it is measured when a model is loaded, on its own weights. If a row must have the same bits in any
batch, the kernel computes all products, see invariance.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.paged_gpu import dependence, has_large_memory, is_interpreted, shared_memory
from ...kernels.launching import gpu_kernels, launch
from ..norms import RMSNorm
from . import single
from .gates import Clamp, gate_constants, is_gated
from .routing import Routed
from .single import SINGLES, Single


class Tile(NamedTuple):
    """What a program of the kernel computes: rows of x and rows of the weight."""

    tokens: int
    rows: int
    warps: int
    stages: int
    columns: int = 128  # in a step of a sum
    shared: int = 1  # tiles of tokens that are computed side by side for each tile of rows
    parts: int = 1  # of each sum, which that many programs compute; only of products without a gate
    ahead: int = 8  # lines of each row of the weight that are read before the kernel before has ended
    is_serial: bool = False  # each program computes all parts, one after the other


AnyTile = Tile | Single  # a Single is for a single row alone
# By the largest number of rows of x, with which they are measured. On an H200 each of them is the fastest for some
# weight, or nearly so; what reads little of a weight at once never is.
FEW = Tile(16, 32, 4, 8, ahead=16), Tile(16, 32, 8, 5, columns=256, ahead=16), Tile(16, 16, 2, 5)
CANDIDATES: Mapping[int, tuple[AnyTile, ...]] = {
    1: SINGLES, 16: FEW, 32: (Tile(32, 32, 4, 6, ahead=16),), 64: (Tile(64, 64, 4, 4, ahead=16),)
}  # fmt: skip
# Further ones of products without a gate, whose weights often have too few rows for all multiprocessors.
FEW_IN_PARTS = Tile(16, 32, 4, 4, columns=256, parts=4), Tile(16, 16, 4, 3, columns=512, parts=4, ahead=16)
IN_PARTS = {16: FEW_IN_PARTS}
MOST_TILES = 1 << 14  # of a product whose sums are in parts
REPLAYS = 3  # of a measurement; the shortest was disturbed least
MEASURED_BYTES = 256 << 20  # of weights, so that none stays in the cache
GAIN = 1.02  # in speed, below which torch's product stays


class AsStored(NamedTuple):
    """A quantized weight computes the product of a single row with the norm before it and what comes after it, by its
    own tile."""


class Alike(NamedTuple):
    """The tiles of Linear.unify, for any number of rows."""


Way = AnyTile | AsStored | Alike


class Tiles(NamedTuple):
    """How a layer's products are computed. None: by torch, or as its weight does without what is around it."""

    qkv: Way | None = None
    output: Way | None = None
    gate_up: Way | None = None
    down: Way | None = None


# With which all products of a weight are computed, by the largest number of rows of x, ascending; that of the last is
# ANY.
Uniform = Mapping[int, Tile]
ANY = sys.maxsize


class Uniforms(NamedTuple):
    """Tiles with which all products of a model are computed, so that a row has the same bits in any batch."""

    whole: Uniform
    gated: Uniform  # of a weight with a gate: a program has two tiles of it
    # Of weights with few rows and many columns: too few tiles to occupy a GPU with few rows of x. A sum has as many
    # parts for any number of rows.
    halves: Uniform
    quarters: Uniform

    def of(self, rows: int, columns: int, *, is_gated: bool) -> Uniform:
        """Return the tiles for a weight."""
        if is_gated:
            return self.gated
        if rows <= QUARTERED[0] and columns >= QUARTERED[1]:
            return self.quarters
        return self.halves if rows <= HALVED[0] and columns >= HALVED[1] else self.whole

    @classmethod
    def undivided(cls, whole: Uniform, gated: Uniform) -> Uniforms:
        """Return tiles with which no sum is in parts."""
        return cls(whole, gated, whole, whole)


QUARTERED, HALVED = (2048, 2048), (4096, 4096)  # rows of a weight, at most, and columns, at least
WIDE_TILE = Tile(128, 128, 8, 3, columns=64, shared=8)
# The first ones are for GPUs with large memory, see has_large_memory. On an H100 each of them is the fastest, or nearly
# so, for 0.6B's or for 8B's weights; and all that divide a sum into as many parts give the same bits. The last ones are
# one tile for all numbers of rows, so that every row is computed by the same instructions.
UNIFORM = [
    Uniforms(
        whole={
            16: Tile(16, 32, 4, 8, ahead=16),
            64: Tile(64, 32, 4, 4),
            128: Tile(128, 64, 4, 4, columns=64, shared=8),
            256: Tile(128, 128, 8, 4, columns=64, shared=8),
            512: WIDE_TILE,
            ANY: Tile(256, 128, 8, 3, columns=64, shared=8),
        },
        gated={
            16: Tile(16, 32, 4, 8, ahead=16),
            64: Tile(64, 32, 4, 3),
            128: Tile(128, 32, 4, 4, columns=64, shared=8),
            512: Tile(128, 64, 8, 4, columns=64, shared=8),
            ANY: Tile(256, 64, 8, 3, columns=64, shared=8),
        },
        halves={
            64: Tile(64, 32, 4, 4, parts=2),
            128: Tile(64, 64, 4, 3, parts=2),
            256: Tile(128, 64, 4, 4, columns=64, parts=2),
            ANY: Tile(128, 128, 8, 4, columns=64, shared=8, parts=2, is_serial=True),
        },
        quarters={
            16: Tile(16, 32, 4, 4, parts=4),
            64: Tile(64, 32, 4, 4, parts=4),
            512: Tile(64, 64, 4, 4, parts=4),
            ANY: Tile(128, 128, 8, 4, columns=64, shared=8, parts=4, is_serial=True),
        },
    ),
    Uniforms.undivided(
        {64: Tile(64, 32, 4, 3), ANY: WIDE_TILE},
        {64: Tile(64, 32, 4, 3), ANY: Tile(128, 64, 8, 3, columns=64, shared=8)},
    ),
    Uniforms.undivided({ANY: Tile(64, 64, 4, 3, shared=8)}, {ANY: Tile(64, 32, 4, 3, shared=8)}),
]
FLOAT32_TILE = Tile(32, 32, 4, 2, columns=32, shared=8)
UNIFORM_FLOAT32 = [Uniforms.undivided({ANY: FLOAT32_TILE}, {ANY: FLOAT32_TILE})]
Choices = Mapping[int, Tiles]  # by the largest number of rows, ascending; more rows than the last are for torch
TORCH = Tiles()
ALIKE: Choices = {ANY: Tiles(*[Alike()] * len(Tiles._fields))}
AS_STORED: Choices = {1: Tiles(*[AsStored()] * len(Tiles._fields))}


def uniforms(dtype: torch.dtype, device: torch.device) -> list[Uniforms]:
    """Return the tiles from which those of a model are chosen whose rows must have the same bits in any batch, the
    fastest first."""
    if dtype == torch.float32:
        return UNIFORM_FLOAT32
    return UNIFORM if has_large_memory(device) else UNIFORM[1:]


def tiles_of(choices: Choices, rows: int) -> Tiles:
    """Return how the products of this many rows are computed."""
    return next((tiles for most, tiles in choices.items() if rows <= most), TORCH)


def tile_of(tiles: Mapping[int, AnyTile | None] | Uniform, rows: int) -> AnyTile | None:
    """Return the tile of a product of this many rows; None: torch computes it."""
    return next((tile for most, tile in tiles.items() if rows <= most), None)


def multiply(
    x: Tensor,
    weight: Tensor,
    tile: AnyTile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    clamp: Clamp | None = None,
    dtype: torch.dtype | None = None,
    routed: Routed | None = None,
    norm: RMSNorm | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return x @ weight.T + bias, [tokens, rows], for x: [tokens, columns], of which only rows must be contiguous.

    `residual`: contiguous; the result times `scale` is added to it in place. `activation`: the weight's first half is
    the gate, see Gated, if there is one; `clamp`: in place of the activation. `dtype`: of the result; None: that of x.
    `routed`: the result has a row for each pair; weight and bias are those of the first expert. `norm`: of x, before
    the product, see single.takes; only with a Single.
    """
    tokens, columns = x.shape
    rows = weight.shape[0] // 2 if is_gated(activation) else weight.shape[0]
    x = x if x.stride()[1] == 1 else x.contiguous()
    assert weight.is_contiguous() and (residual is None or residual.is_contiguous())
    out = residual
    if out is None:
        out = x.new_empty(tokens if routed is None else routed.order.num_pairs, rows, dtype=dtype)
    if isinstance(tile, Single):
        assert routed is None
        if not tokens:  # a tile for up to one row
            return out
        single.multiply(
            x, weight, tile, out,
            bias=bias, residual=residual, activation=activation, clamp=clamp, norm=norm, scale=scale,
        )  # fmt: skip
        return out
    assert norm is None and (residual is not None or scale == 1)
    tiles = -(-tokens // tile.tokens) if routed is None else routed.tiles
    sums = arrived = x
    is_divided = tile.parts > 1 and not tile.is_serial
    if tile.parts > 1:
        assert not is_gated(activation) and routed is None
    if is_divided:
        sums = torch.empty(tile.parts, tokens, rows, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
        assert -(-rows // tile.rows) * tiles <= MOST_TILES
    pairs, owners, places, fan = (x, x, x, 0) if routed is None else routed.arguments
    if not tokens:
        return out
    traits = bias is not None, residual is not None, columns % tile.columns == 0
    launch(gpu_kernels("skinny").multiply, (-(-rows // tile.rows), tiles, tile.parts if is_divided else 1),
        x, weight, x if bias is None else bias, out, out, pairs, owners, places, sums, arrived,
        tokens, rows, columns, x.stride()[0], out.stride()[0], scale,
        constants=_constants(tile, traits, fan, activation, clamp), **dependence(x.device),
    )  # fmt: skip
    return out


@functools.cache
def _constants(
    tile: Tile, traits: tuple[bool, bool, bool], fan: int, activation: str, clamp: Clamp | None
) -> dict[str, Any]:
    bias, add, even = traits
    return {
        "BIAS": bias, "ADD": add, **gate_constants(activation, clamp), "EVEN": even,
        "TOKENS": tile.tokens, "ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages,
        "WIDEN": is_interpreted(), "SHARED": tile.shared, "FAN": fan, "PARTS": tile.parts, "AHEAD": tile.ahead,
        "SERIAL": tile.is_serial,
        "num_warps": tile.warps,
    }  # fmt: skip


def is_measurable(weight: Tensor) -> bool:
    """Return whether our kernel's products with a weight can be timed: on a GPU, and not in float32, for whose numbers
    its tiles are too large."""
    return weight.is_cuda and not is_interpreted() and weight.itemsize == 2


Times = Mapping[Any, float]  # of a product in seconds, with each tile and by torch (None)


def fastest(times: Times) -> Any:
    """Return the tile that is faster than torch's product, or None."""
    best = min(times, key=lambda tile: times[tile])
    return best if times[best] * GAIN <= times[None] else None


def candidates(part: str, rows: int, device: torch.device) -> list[AnyTile]:
    """Return the tiles to be tried for a product of a layer, a field of Tiles, with this many rows: those that fit into
    the GPU's memory."""
    tiles = [*CANDIDATES[rows], *(IN_PARTS.get(rows, ()) if part in ("output", "down") else ())]
    weights = 2 if part == "gate_up" else 1
    return [tile for tile in tiles if _shared_bytes(tile, weights) <= shared_memory(device)]


def _shared_bytes(tile: AnyTile, weights: int) -> int:
    """Return the shared memory of a program that multiplies by this many weights of 16 bits."""
    if isinstance(tile, Single):
        return 0
    return (tile.tokens + weights * tile.rows) * tile.columns * 2 * (tile.stages - 1)


@functools.cache
def _arrived(device: torch.device) -> Tensor:
    """Return the counters of parts, which all products use one after the other."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all measurements: cuBLAS keeps a workspace for each, of 32 MiB on large GPUs."""
    return torch.cuda.Stream(device)


def seconds(works: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Return the time of some work on a GPU, replayed from a CUDA graph: launching it would take longer.

    The kernels are compiled before. Nothing is captured if any of them fails.
    """
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for work in works:
            work()
        graph = torch.cuda.CUDAGraph()
        # In the default mode a kernel that another thread compiles and loads meanwhile could make the capture fail.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for work in works:
                work()
        found = []
        for _ in range(REPLAYS + 1):  # the first one uploads the graph
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(stream)
            graph.replay()
            ended.record(stream)
            ended.synchronize()
            found.append(began.elapsed_time(ended) / 1000)
    torch.cuda.current_stream(device).wait_stream(stream)
    return min(found[1:])
