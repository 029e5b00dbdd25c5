"""Mamba2 on a GPU: launches of kernels/gpu/mamba2.py.

mixers/mamba2.py computes the same in torch. It is used where these kernels cannot be, and it is the tests' oracle.
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
from ..mixers import mamba2 as by_torch
from ..mixers.mamba2 import Mamba2Layer, Mamba2Weights
from ..mixers.states import LayerStates, Mamba2Shape, Segments
from . import states as gpu_states
from .states import CONVOLVED_CHANNELS, CONVOLVED_TOKENS, MAX_DIM, SEARCHED_ROWS, TRIAL_EPS, TRIAL_STATES

MAX_GROUP = 1 << 14  # values that a program normalizes, which it holds in registers


def mamba2(layer: Mamba2Layer, projected: Tensor, states: LayerStates, segments: Segments) -> Tensor:
    """Return what a layer reads for each token, as mamba2.mamba2 does, without the segments' lists.

    There may be rows without segments, and tokens after those of all segments: their results are undefined.
    """
    shape, eps, weights = layer
    taps, bias = weights.taps, weights.conv_bias
    assert all(each is None or each.is_contiguous() for each in (projected, *weights, *states))
    assert projected.dtype == states.windows.dtype == taps.dtype == weights.norm.dtype
    kernels, options = gpu_kernels("mamba2"), dependence(projected.device)
    tokens, rows = len(projected), len(segments.row_start) - 1
    row_start, begin, source, target = segments.row_start, segments.begin, segments.source, segments.target
    of_convolve, of_scan, of_finish = _constants(shape)
    convolved = projected.new_empty(tokens, shape.channels)
    numbers = projected.new_empty(tokens, 2 * shape.value_heads, dtype=torch.float32)
    read = projected.new_empty(tokens, shape.values)
    if tokens:
        parts = of_convolve["PARTS"] + -(-shape.value_heads // CONVOLVED_CHANNELS)
        launch(kernels.convolve_steps, (parts, -(-tokens // CONVOLVED_TOKENS)),
            projected, taps, taps if bias is None else bias, weights.a_log, weights.dt_bias, states.windows,
            row_start, begin, source, convolved, numbers, tokens, rows, *shape.limits,
            constants=of_convolve, **options,
        )  # fmt: skip
    if rows:
        launch(kernels.scan, (shape.value_heads * of_scan["PARTS"], rows),
            convolved, numbers, weights.skip, states.matrices, row_start, begin, source, target, read,
            constants=of_scan, **options,
        )  # fmt: skip
        tiles = tokens * shape.key_heads
        launch(kernels.finish_groups, (tiles + rows * of_finish["PARTS"],),
            read, projected, weights.norm, states.windows, row_start, begin, source, target, tiles, eps,
            constants=of_finish, **options,
        )  # fmt: skip
    return read


@functools.cache
def _constants(shape: Mamba2Shape) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the constants of `convolve_steps`, `scan` and `finish_groups`."""
    group = shape.values // shape.key_heads
    group_p = power_of_two(group)
    return (
        {
            "VALUES": shape.values, "CHANNELS": shape.channels, "VALUE_HEADS": shape.value_heads, "TAPS": shape.taps,
            "BIAS": shape.has_conv_bias, "TOKENS": CONVOLVED_TOKENS, "ROWS": SEARCHED_ROWS, "TILE": CONVOLVED_CHANNELS,
            "PARTS": -(-shape.channels // CONVOLVED_CHANNELS),
            "num_warps": warps(CONVOLVED_TOKENS * CONVOLVED_CHANNELS),
        },
        {
            "KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads,
            **gpu_states.recurrence(shape.key_dim, shape.value_dim),
        },
        {
            "VALUE_HEADS": shape.value_heads, "GROUPS": shape.key_heads, "GROUP": group, "GROUP_P": group_p,
            **gpu_states.windows(shape), "num_warps": warps(group_p),
        },
    )  # fmt: skip


def job(shape: Mamba2Shape, dtype: torch.dtype) -> Job:
    """Return what compiles the kernels of layers of this shape on META."""
    segments = Segments.of([[(1, -1, 0)]], META)
    return partial(mamba2, *_tensors(shape, dtype, META, 1, is_random=False), segments)


def objection(shape: Mamba2Shape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot compute layers of this shape, or None; they are tried."""
    return gpu_states.objection(limitation(shape, dtype), device, partial(_trial, shape, dtype, device))


def limitation(shape: Mamba2Shape, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute layers of this shape on any device, or None."""
    if max(shape.key_dim, shape.value_dim) > MAX_DIM:
        return f"the Triton kernels serve Mamba2 with heads of up to {MAX_DIM} numbers"
    if shape.values // shape.key_heads > MAX_GROUP:
        return f"the Triton kernels serve Mamba2 with norms over up to {MAX_GROUP} numbers"
    return gpu_states.dtype_limitation(dtype)


def _trial(shape: Mamba2Shape, dtype: torch.dtype, device: torch.device) -> str | None:
    tensors = partial(_tensors, shape, dtype, device, is_random=True)
    return gpu_states.compare("Mamba2", dtype, device, (mamba2, by_torch.mamba2), tensors)


def _tensors(
    shape: Mamba2Shape, dtype: torch.dtype, device: torch.device, tokens: int, *, is_random: bool
) -> tuple[Mamba2Layer, Tensor, LayerStates]:
    """Return a layer, its input and states; random ones are always the same."""
    states = LayerStates.allocate(shape, TRIAL_STATES, dtype, device)

    def numbers(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device)

    projected, heads = numbers(tokens, shape.rows[0]), shape.value_heads
    weights = Mamba2Weights(
        taps=numbers(shape.channels, 1, shape.taps),
        conv_bias=numbers(shape.channels) if shape.has_conv_bias else None,
        a_log=numbers(heads, dtype=torch.float32),
        dt_bias=numbers(heads, dtype=torch.float32),
        skip=numbers(heads, dtype=torch.float32),
        norm=numbers(shape.values),
    )
    if is_random:
        gpu_states.fill((projected, *weights, *states), device)
    return Mamba2Layer(shape, TRIAL_EPS, weights), projected, states
