"""How the programs of `attend` compute: the sizes of their tiles, by a layer's heads, the dtype and the GPU."""

from __future__ import annotations

import bisect
import functools

import torch

from .gpu_cache import BRANCH, LOOP, WIDEST, Shape, padded, tile_rows
from .gpu_plan import FEW_ROWS
from .layer import AttentionLayer

# The largest heads of each breadth, in numbers: the larger, the fewer queries and keys fit into registers at a time.
# Keys of the last breadth may have a rest, see tile_widths.
WIDTHS = 128, 256, WIDEST
# By breadth, queries times the heads that share a KV head, in an item of a longer row: of GPUs with large memory and of
# others, see `has_large_memory`; in float32, whose products run without matrix units; and where rows of one query have
# them, too, so that two sets of sums are held.
TILE_ROWS, SMALL_TILE_ROWS = (128, 128, 64), (128, 64, 32)
FLOAT32_TILE_ROWS = 32, 32, 16
UNIFORM_TILE_ROWS = 64, 32, 16
# The same of a program, several of which may share a KV head of the last breadth: of keys with a rest, of more query
# heads than MANY_HEADS, of rows of one query, and where registers would spill.
SHARED_TILE_ROWS, FEWEST_TILE_ROWS = 32, 16
MANY_HEADS = 16  # per KV head
MAX_GROUP = 128  # query heads per KV head
SHORT_ROWS, HOPPER = 16, 9  # see `is_short`; the major number of the capability

# Of rows of one query, which take the time in which their keys and values are read. With few rows a program reads much
# at once; with many, programs of one warp need not wait for other warps.
FEW, MANY = Shape(128, 4, 3, is_early=True), Shape(32, 1, 4)
CHUNK = Shape(128, 8, 3, skips=LOOP)  # of longer rows


def breadth(layer: AttentionLayer) -> int:
    """Return the place in WIDTHS of a layer's heads."""
    return bisect.bisect_left(WIDTHS[:-1], widest(layer))


def queries_of(layer: AttentionLayer, dtype: torch.dtype, *, uniform: bool = False, is_large: bool) -> int:
    """Return the number of queries in a work item of a longer row. `uniform`: see PagedGPU.invariant. `is_large`: see
    `has_large_memory`."""
    rows = _most_rows(layer, dtype, uniform=uniform, is_large=is_large)
    queries = max(1, rows * layer.num_kv_heads // layer.num_heads)
    # With the fewest rows each of the programs that share a KV head has at least one of its query heads.
    return min(queries, FEWEST_TILE_ROWS) if layer.head_dim > WIDEST else queries


def _most_rows(layer: AttentionLayer, dtype: torch.dtype, *, uniform: bool, is_large: bool) -> int:
    """Return the largest height of a tile of a longer row; a single query may have more heads, see `_sharing`."""
    kind = breadth(layer)
    # With a cache that has scales, float16 takes a second set of sums, see _tile in kernels/gpu/attention.py.
    is_large = is_large and not (dtype == torch.float16 and kind)
    rows = (FLOAT32_TILE_ROWS if dtype == torch.float32 else TILE_ROWS if is_large else SMALL_TILE_ROWS)[kind]
    return min(rows, UNIFORM_TILE_ROWS[kind]) if uniform else rows


def _sharing(
    layer: AttentionLayer, dtype: torch.dtype, queries: int, *, uniform: bool, is_scaled: bool, is_large: bool
) -> int:
    """Return the number of programs that share a KV head, see Shape; query heads of other breadths all fit into one."""
    if breadth(layer) < 2:
        return 1
    rows, group = _most_rows(layer, dtype, uniform=uniform, is_large=is_large), layer.num_heads // layer.num_kv_heads
    if queries == 1 or layer.head_dim > WIDEST or group > MANY_HEADS:
        rows = min(rows, SHARED_TILE_ROWS)
    if is_scaled and (queries == 1 or (layer.head_dim > WIDEST and dtype == torch.float16)):
        rows = FEWEST_TILE_ROWS
    return -(-group // (rows // queries))


@functools.cache
def is_short(layer: AttentionLayer, dtype: torch.dtype, device: torch.device, *, is_scaled: bool) -> bool:
    """Return whether rows of one query have tiles of 16 rows, if results must not depend on the batch.

    On an H200 they give the same bits as those of a chunk, by other matrix instructions; invariance.py proves it for
    each model.
    """
    if not _fits_short(layer, dtype, is_scaled=is_scaled):
        return False
    if device.type not in ("cuda", "meta"):  # in the interpreter
        return True
    # Without memory x is compiled for the current GPU, see launching.py.
    return torch.cuda.get_device_capability(None if device.type == "meta" else device)[0] == HOPPER


def _fits_short(layer: AttentionLayer, dtype: torch.dtype, *, is_scaled: bool) -> bool:
    """Return whether such tiles have given the same bits on a GPU: with a cache in int8 or fp8 they have not."""
    return not is_scaled and dtype != torch.float32 and tile_rows(layer, 1) <= SHORT_ROWS


@functools.cache
def attend_shape(
    layer: AttentionLayer,
    dtype: torch.dtype,
    queries: int,
    tokens: int,
    *,
    uniform: bool,
    is_scaled: bool,
    is_large: bool,
    is_chunk: bool = False,
) -> Shape:
    """Return how programs compute whose items have this many queries, in a step of `tokens` tokens. `is_chunk`: items
    are of longer rows, also if they have one query each.

    Without measurements these are the most keys, the fewest warps and the most stages whose registers do not spill.
    """
    sharing = _sharing(layer, dtype, queries, uniform=uniform, is_scaled=is_scaled, is_large=is_large)
    kind, rows = breadth(layer), tile_rows(layer, queries, sharing)
    if is_large and not (uniform or kind or dtype == torch.float32):
        if queries == 1 and rows <= 16 and (not is_scaled or layer.head_dim == layer.v_head_dim == WIDTHS[0]):
            return FEW if tokens <= FEW_ROWS else MANY
        if queries > 1 and not (is_scaled or layer.window):
            return CHUNK
    # Uniform tiles of a cache with scales take more registers.
    keys = 32 if kind or (uniform and is_scaled) else 64
    if dtype == torch.float32 or kind > 1:
        keys = 16 if kind else 32
    has_rest = layer.head_dim > WIDEST
    if has_rest and is_large and not (uniform or dtype == torch.float32):
        # The warps of a program divide the keys among themselves, eight at least for each: with 16 keys most of the
        # eight warps would compute what others do.
        keys = 32 if is_scaled else 64
    if uniform and queries == 1 and _fits_short(layer, dtype, is_scaled=is_scaled):  # see is_short
        return Shape(keys, 8 if kind > 1 else 4 if kind or tokens <= FEW_ROWS else 2, 3, sharing=sharing)
    warps = 8 if queries > 1 or rows > 64 or kind > 1 else 4
    if uniform and is_large and not (kind or is_scaled) and dtype != torch.float32:
        warps = 4  # the matrix units of a Hopper multiply 64 rows by four warps, and eight would do it twice
    # With three stages keys are loaded when they are needed, and not before.
    is_deep = queries == 1 or (dtype != torch.float32 and not is_scaled)
    # A loop of its own is faster, and takes registers: for uniform tiles, in float32, for the largest heads, and for
    # windows with large heads or a cache with scales more than there are.
    has_room = not uniform and kind < 2 and dtype != torch.float32 and not (layer.window and (is_scaled or kind))
    skips = (LOOP if has_room else BRANCH) if is_large and queries > 1 else 0
    # Of keys with a rest few programs fit into a multiprocessor, so that each must load its next keys ahead: of 64 keys
    # three stages are as many as fit.
    is_ahead = kind < 2 or (has_rest and not uniform and keys < 64)
    stages = 5 if is_large and is_deep and is_ahead else 3
    if is_chunk and is_scaled and kind > 1 and not uniform:  # registers would spill
        has_many = layer.num_heads > MANY_HEADS * layer.num_kv_heads
        stages = 2 if has_many and not (has_rest or is_large) else 3
    if has_rest and dtype == torch.float32:
        stages = 1  # two tiles of keys do not fit into the shared memory of all GPUs
    return Shape(keys, warps, stages, skips=skips, sharing=sharing)


def widest(layer: AttentionLayer) -> int:
    """Return the width of the larger tile of a head's numbers."""
    return padded(max(layer.head_dim, layer.v_head_dim))
