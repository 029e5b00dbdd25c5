"""Gated DeltaNet on a GPU: launches of kernels/gpu/delta.py.

mixers/delta.py computes the same in torch. It is used where these kernels cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention.gpu_cache import power_of_two, warps
from ...attention.paged_gpu import dependence
from ...kernels.launching import META, Job, gpu_kernels, launch
from ..mixers import delta
from ..mixers.delta import L2_EPS, DeltaLayer, DeltaWeights
from ..mixers.states import LayerStates, LinearShape, Segments
from . import states as gpu_states
from .states import CONVOLVED_TOKENS, MAX_DIM, SEARCHED_ROWS, TRIAL_EPS, TRIAL_STATES

PAIRS = 8  # of a token and a head that a program normalizes


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
    value_p = power_of_two(shape.value_dim)
    dim_p = max(power_of_two(shape.key_dim), value_p)
    heads = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads}
    return (
        {
            **heads, "KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim, "DIM_P": dim_p, "TAPS": shape.taps,
            "TOKENS": CONVOLVED_TOKENS, "ROWS": SEARCHED_ROWS, "num_warps": warps(CONVOLVED_TOKENS * dim_p),
        },
        {**heads, "IS_TILED": shape.is_tiled, **gpu_states.recurrence(shape.key_dim, shape.value_dim)},
        {
            "VALUE_HEADS": shape.value_heads, "VALUE_DIM": shape.value_dim, "VALUE_P": value_p, "PAIRS": PAIRS,
            **gpu_states.windows(shape), "num_warps": warps(PAIRS * value_p),
        },
    )  # fmt: skip


def job(shape: LinearShape, dtype: torch.dtype) -> Job:
    """Return what compiles the kernels of layers of this shape on META."""
    segments = Segments.of([[(1, -1, 0)]], META)
    return partial(gated_delta, *_tensors(shape, dtype, META, 1, is_random=False), segments)


def objection(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot compute layers of this shape, or None; they are tried."""
    return gpu_states.objection(limitation(shape, dtype), device, partial(_trial, shape, dtype, device))


def limitation(shape: LinearShape, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute layers of this shape on any device, or None."""
    if max(shape.key_dim, shape.value_dim) > MAX_DIM:
        return f"the Triton kernels serve linear attention with heads of up to {MAX_DIM} numbers"
    return gpu_states.dtype_limitation(dtype)


def _trial(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> str | None:
    tensors = partial(_tensors, shape, dtype, device, is_random=True)
    return gpu_states.compare("linear attention", dtype, device, (gated_delta, delta.gated_delta), tensors)


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
        gpu_states.fill((qkvz, gates, *weights, *states), device)
    return DeltaLayer(shape, TRIAL_EPS, weights), qkvz, gates, states
