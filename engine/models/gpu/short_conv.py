"""Gated short convolutions on a GPU: launches of kernels/gpu/short_conv.py.

mixers/short_conv.py computes the same in torch. It is used where these kernels cannot be, and it is the tests' oracle.
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
from ..mixers import short_conv
from ..mixers.short_conv import ConvLayer
from ..mixers.states import ConvShape, LayerStates, Segments
from . import states as gpu_states
from .states import CONVOLVED_CHANNELS, CONVOLVED_TOKENS, SEARCHED_ROWS, TRIAL_STATES


def gated_conv(layer: ConvLayer, projected: Tensor, states: LayerStates, segments: Segments) -> Tensor:
    """Return what a layer computes for each token, as short_conv.gated_conv does, without the segments' lists.

    There may be rows without segments, and tokens after those of all segments: their results are undefined.
    """
    shape, taps, bias = layer
    weights = (taps,) if bias is None else (taps, bias)
    assert all(each.is_contiguous() and each.dtype == taps.dtype for each in (projected, *weights, states.windows))
    kernels, options = gpu_kernels("short_conv"), dependence(projected.device)
    tokens, rows = len(projected), len(segments.row_start) - 1
    row_start, begin, source, target = segments.row_start, segments.begin, segments.source, segments.target
    of_convolve, of_windows = _constants(shape)
    out = projected.new_empty(tokens, shape.channels)
    if tokens:
        grid: tuple[int, ...] = (-(-shape.channels // of_convolve["TILE"]), -(-tokens // CONVOLVED_TOKENS))
        launch(kernels.convolve_gated, grid,
            projected, taps, taps if bias is None else bias, states.windows, row_start, begin, source, out,
            tokens, rows,
            constants=of_convolve, **options,
        )  # fmt: skip
    if rows:
        launch(kernels.keep_windows, (rows * of_windows["PARTS"],),
            projected, states.windows, row_start, begin, source, target,
            constants=of_windows, **options,
        )  # fmt: skip
    return out


@functools.cache
def _constants(shape: ConvShape) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of `convolve_gated` and `keep_windows`."""
    tile = min(CONVOLVED_CHANNELS, power_of_two(shape.channels))
    of_windows = gpu_states.windows(shape)
    return (
        {
            "CHANNELS": shape.channels, "TAPS": shape.taps, "BIAS": shape.has_bias, "TOKENS": CONVOLVED_TOKENS,
            "ROWS": SEARCHED_ROWS, "TILE": tile, "num_warps": warps(CONVOLVED_TOKENS * tile),
        },
        {**of_windows, "num_warps": warps(of_windows["BEFORE_P"] * of_windows["TILE"])},
    )  # fmt: skip


def job(shape: ConvShape, dtype: torch.dtype) -> Job:
    """Return what compiles the kernels of layers of this shape on META."""
    segments = Segments.of([[(1, -1, 0)]], META)
    return partial(gated_conv, *_tensors(shape, dtype, META, 1, is_random=False), segments)


def objection(shape: ConvShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot compute layers of this shape, or None; they are tried."""
    return gpu_states.objection(limitation(shape, dtype), device, partial(_trial, shape, dtype, device))


def limitation(shape: ConvShape, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute layers of this shape on any device, or None: of the dtype alone."""
    return gpu_states.dtype_limitation(dtype)


def _trial(shape: ConvShape, dtype: torch.dtype, device: torch.device) -> str | None:
    tensors = partial(_tensors, shape, dtype, device, is_random=True)
    return gpu_states.compare("short convolutions", dtype, device, (gated_conv, short_conv.gated_conv), tensors)


def _tensors(
    shape: ConvShape, dtype: torch.dtype, device: torch.device, tokens: int, *, is_random: bool
) -> tuple[ConvLayer, Tensor, LayerStates]:
    """Return a layer, its input and states; random ones are always the same."""
    states = LayerStates.allocate(shape, TRIAL_STATES, dtype, device)

    def numbers(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device)

    projected, taps = numbers(tokens, shape.rows[0]), numbers(shape.channels, 1, shape.taps)
    bias = numbers(shape.channels) if shape.has_bias else None
    if is_random:
        gpu_states.fill((projected, taps, bias, states.windows), device)
    return ConvLayer(shape, taps, bias), projected, states
