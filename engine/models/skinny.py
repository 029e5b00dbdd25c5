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

from ..attention.paged_gpu import dependence, is_interpreted, shared_memory
from ..kernels.launching import gpu_kernels, launch
from . import single
from .gpu_gates import Clamp, gate_constants
from .norms import RMSNorm
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


Way = AnyTile | AsStored


class Tiles(NamedTuple):
    """How a layer's products are computed. None: by torch, or as its weight does without what is around it."""

    qkv: Way | None = None
    output: Way | None = None
    gate_up: Way | None = None
    down: Way | None = None


# With which all products are computed, by the largest number of rows of x, ascending. The last one takes any number.
Uniform = Mapping[int, Tile]
ANY = sys.maxsize
# Those of a model whose rows must have the same bits in any batch, the fastest first. The last ones are one tile for
# all numbers of rows, so that every row is computed by the same instructions.
UNIFORM: list[Uniform] = [
    {64: Tile(64, 32, 4, 3), ANY: Tile(128, 128, 8, 3, columns=64, shared=8)},
    {ANY: Tile(64, 64, 4, 3, shared=8)},
]
UNIFORM_FLOAT32: list[Uniform] = [{ANY: Tile(32, 32, 4, 2, columns=32, shared=8)}]
Choices = Mapping[int, Tiles]  # by the largest number of rows, ascending; more rows than the last are for torch
TORCH = Tiles()
AS_STORED: Choices = {1: Tiles(*[AsStored()] * len(Tiles._fields))}


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
) -> Tensor:
    """Return x @ weight.T + bias, [tokens, rows], for x: [tokens, columns], of which only rows must be contiguous.

    `residual`: contiguous; the result is added to it in place. `activation`: the weight's first half is the gate, see
    Gated; `clamp`: in place of the activation. `dtype`: of the result; None: that of x. `routed`: the result has a row
    for each pair; weight and bias are those of the first expert. `norm`: of x, before the product, see single.takes;
    only with a Single.
    """
    tokens, columns = x.shape
    rows = weight.shape[0] // 2 if activation else weight.shape[0]
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
            x, weight, tile, out, bias=bias, residual=residual, activation=activation, clamp=clamp, norm=norm
        )
        return out
    assert norm is None
    tiles = -(-tokens // tile.tokens) if routed is None else routed.tiles
    sums = arrived = x
    if tile.parts > 1:
        assert not activation and routed is None
        sums = torch.empty(tile.parts, tokens, rows, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
        assert -(-rows // tile.rows) * tiles <= MOST_TILES
    pairs, owners, places, fan = (x, x, x, 0) if routed is None else routed.arguments
    if not tokens:
        return out
    traits = bias is not None, residual is not None, columns % tile.columns == 0
    launch(gpu_kernels("skinny").multiply, (-(-rows // tile.rows), tiles, tile.parts),
        x, weight, x if bias is None else bias, out, out, pairs, owners, places, sums, arrived,
        tokens, rows, columns, x.stride()[0], out.stride()[0],
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
