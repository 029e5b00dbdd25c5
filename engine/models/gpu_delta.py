"""Gated DeltaNet on a GPU: launches of kernels/gpu/delta.py.

delta.py computes the same in torch. It is used where these kernels cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention.gpu_cache import power_of_two, warps
from ..attention.paged_gpu import MAX_ERROR, dependence, is_interpreted, lack
from ..kernels.launching import META, Job, gpu_kernels, launch
from . import delta
from .delta import L2_EPS, DeltaLayer, DeltaWeights
from .gpu_weights import relative
from .states import LayerStates, LinearShape, Segments

MAX_DIM = 256  # of a head: with more a program would not hold its part of the matrix in registers
STEP = 16  # of the sizes of heads, so that rows of tensors are aligned
# A program of the recurrence is one warp, so that its sums need no shared memory, and has as much of the matrix. With
# twice as much it computes a token in nearly twice the time, and there are too few programs for one row.
MATRIX = 2048
MIN_COLUMNS, MAX_COLUMNS = 8, 32  # 8: a sector of memory
CONVOLVED_TOKENS, SEARCHED_ROWS = 16, 64  # by a program, at once
PAIRS = 8  # of a token and a head that a program normalizes
WINDOW_TILE = 256
# Tokens, source and target of the segments of a trial's rows: a row without segments; new rows; rows that continue,
# also from a state that is overwritten; copies; snapshots within the reach of the convolution, and beyond.
TRIAL_STATES, EPS = 8, 1e-6
TRIAL_ROWS = (
    (),
    ((7, -1, 0),),
    ((1, 1, 1),),
    ((2, 2, 3), (0, 3, 4), (1, 4, 2)),
    ((0, 5, 6),),
    ((1, -1, 7), (20, 7, 7)),
)


def gated_delta(layer: DeltaLayer, qkvz: Tensor, gates: Tensor, states: LayerStates, segments: Segments) -> Tensor:
    """Return what a layer reads for each token, as delta.gated_delta does, without its lists of segments.

    There may be rows without segments, and tokens after those of all segments: their results are undefined.
    """
    shape, eps, weights = layer
    assert all(each.is_contiguous() for each in (qkvz, gates, *weights, *states))
    assert qkvz.dtype == gates.dtype == states.windows.dtype == weights.taps.dtype == weights.norm.dtype
    kernels, options = gpu_kernels("delta"), dependence(qkvz.device)
    tokens, rows = len(qkvz), len(segments.row_start) - 1
    row_start, begin, source, target = segments.row_start, segments.begin, segments.source, segments.target
    of_convolve, of_recur, of_finish = _constants(shape)
    convolved = qkvz.new_empty(tokens, shape.channels)
    numbers = qkvz.new_empty(tokens, 2 * shape.key_heads + 2 * shape.value_heads, dtype=torch.float32)
    read = qkvz.new_empty(tokens, shape.values)
    if tokens:
        grid: tuple[int, ...] = (2 * shape.key_heads + shape.value_heads, -(-tokens // CONVOLVED_TOKENS))
        launch(kernels.convolve, grid,
            qkvz, gates, weights.taps, weights.a_log, weights.dt_bias, states.windows, row_start, begin, source,
            convolved, numbers, tokens, rows, L2_EPS,
            constants=of_convolve, **options,
        )  # fmt: skip
    if rows:
        launch(kernels.recur, (shape.value_heads * of_recur["PARTS"], rows),
            convolved, numbers, states.matrices, row_start, begin, source, target, read,
            constants=of_recur, **options,
        )  # fmt: skip
        pairs = tokens * shape.value_heads
        tiles = -(-pairs // PAIRS)
        launch(kernels.finish, (tiles + rows * of_finish["PARTS"],),
            read, qkvz, weights.norm, states.windows, row_start, begin, source, target, pairs, tiles, eps,
            constants=of_finish, **options,
        )  # fmt: skip
    return read


@functools.cache
def _constants(shape: LinearShape) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the constants of `convolve`, `recur` and `finish`."""
    key_p, value_p = power_of_two(shape.key_dim), power_of_two(shape.value_dim)
    heads = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads}
    dims = {"KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim}
    dim_p, columns = max(key_p, value_p), min(max(MATRIX // key_p, MIN_COLUMNS), MAX_COLUMNS, value_p)
    before_p = power_of_two(max(shape.taps - 1, 1))
    return (
        {
            **heads, **dims, "DIM_P": dim_p, "TAPS": shape.taps, "TOKENS": CONVOLVED_TOKENS, "ROWS": SEARCHED_ROWS,
            "num_warps": warps(CONVOLVED_TOKENS * dim_p),
        },
        {
            **heads, **dims, "IS_TILED": shape.is_tiled, "KEY_P": key_p, "COLUMNS": columns,
            "PARTS": -(-shape.value_dim // columns),
            "num_warps": 1, "maxnreg": 255,  # with a limit of its own the assembler would rather spill some
        },
        {
            "VALUE_HEADS": shape.value_heads, "VALUE_DIM": shape.value_dim, "VALUE_P": value_p, "PAIRS": PAIRS,
            "CHANNELS": shape.channels, "BEFORE": shape.taps - 1, "BEFORE_P": before_p, "TILE": WINDOW_TILE,
            "PARTS": -(-shape.channels // WINDOW_TILE), "num_warps": warps(PAIRS * value_p),
        },
    )  # fmt: skip


def jobs(shape: LinearShape, dtype: torch.dtype) -> Iterator[Job]:
    """Yield what compiles the kernels of layers of this shape on META."""
    if limitation(shape, dtype) is not None:
        return
    segments = Segments.of([[(1, -1, 0)]], META)
    yield partial(gated_delta, *_tensors(shape, dtype, META, 1, is_random=False), segments)


def objection(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot compute layers of this shape, or None; they are tried."""
    if device.type != "cuda" and not is_interpreted():
        return "the Triton kernels need a CUDA device"
    return limitation(shape, dtype) or lack() or trial(shape, dtype, device)


def limitation(shape: LinearShape, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute layers of this shape on any device, or None."""
    if dtype not in MAX_ERROR:
        return f"the Triton kernels do not compute in {str(dtype).removeprefix('torch.')}"
    if any(dim % STEP or dim > MAX_DIM for dim in (shape.key_dim, shape.value_dim)):
        return f"the Triton kernels serve linear attention with heads of up to {MAX_DIM} numbers, in steps of {STEP}"
    return None


@torch.inference_mode()
def trial(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compute a step by the kernels and by torch; return why the kernels cannot be used, or None.

    The compiled kernels are kept, so this costs a start no more than their first use would.
    """
    segments = Segments.of(TRIAL_ROWS, device)
    results = []
    try:
        for compute in (gated_delta, delta.gated_delta):
            layer, qkvz, gates, states = _tensors(shape, dtype, device, segments.begin_list[-1], is_random=True)
            results.append((compute(layer, qkvz, gates, states, segments), *states))
        error = max(relative(ours, want) for ours, want in zip(*results, strict=True))
    except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
        lines = (str(problem).strip().splitlines() or [""])[0]
        return f"the Triton kernels do not run on this device: {type(problem).__name__}: {lines[:200]}"
    if not error < MAX_ERROR[dtype]:  # nor if it is no number
        return (
            f"the Triton kernels compute wrong results of linear attention on this device (relative error {error:.2g})"
        )
    return None


def _tensors(
    shape: LinearShape, dtype: torch.dtype, device: torch.device, tokens: int, *, is_random: bool
) -> tuple[DeltaLayer, Tensor, Tensor, LayerStates]:
    """Return a layer, its inputs and states; random ones are always the same."""
    states = LayerStates.allocate(shape, TRIAL_STATES, dtype, device)

    def numbers(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device)

    qkvz, gates = numbers(tokens, shape.channels + shape.values), numbers(tokens, 2 * shape.value_heads)
    heads = shape.value_heads
    weights = DeltaWeights(
        taps=numbers(shape.channels, 1, shape.taps),
        a_log=numbers(heads, dtype=torch.float32),
        dt_bias=numbers(heads, dtype=torch.float32),
        norm=numbers(shape.value_dim),
    )
    if is_random:
        draw = torch.Generator(device).manual_seed(0)
        for each in (qkvz, gates, *weights, *states):
            each.normal_(generator=draw)
    return DeltaLayer(shape, EPS, weights), qkvz, gates, states
