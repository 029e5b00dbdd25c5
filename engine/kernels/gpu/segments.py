"""What the Triton kernels of layers that keep states have in common: convolutions over a row's tokens, and windows.

models/mixers/states.py has the rows, segments and windows. A convolution reads the window of a row's first source, so
the windows are written by a later launch: a source may be a target as well.

In a launch's grid are the numbers of rows and tokens, which may be larger than those of the segments: a row without
segments and tokens of no row are padding. Nothing else depends on a step but the contents of the segments' tensors, so
launches can be replayed by a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

# They are parts of a step's inputs, which need not be aligned. The kernels are not compiled once more for those that
# are, perhaps while a graph is captured.
SEGMENTS = ["row_start_ptr", "begin_ptr", "source_ptr", "target_ptr"]


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) with a small relative error for any x."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) is 2 * atanh(y), here by its series, as 0 <= y <= 1/3: a GPU's logarithm is inexact near 1.
    y = e / (2.0 + e)
    square = y * y
    series = 1.0 / 13.0
    for term in tl.static_range(1, 7):
        series = series * square + 1.0 / (13.0 - 2.0 * term)
    return tl.where(x > 0.0, x, 0.0) + 2.0 * y * series


@triton.jit
def _inputs(x_ptr, at, live, FACTOR: tl.constexpr):
    """Return what is convolved, as it is stored in windows: the numbers at `at`, or their products with those FACTOR
    numbers after them."""
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    if FACTOR:
        factor = tl.load(x_ptr + at + FACTOR, mask=live, other=0.0)
        x = (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def find_rows(row_start_ptr, begin_ptr, source_ptr, token, rows, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Return the first token of each token's row, and the source of that row's first segment; 0 for a token of no row.

    The row is searched for among ROWS at a time.
    """
    start = tl.zeros([TOKENS], tl.int32)
    source = tl.zeros([TOKENS], tl.int32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < rows
        segment = tl.load(row_start_ptr + row, mask=is_row, other=0)
        after = tl.load(row_start_ptr + row + 1, mask=is_row, other=0)
        begin = tl.load(begin_ptr + segment, mask=is_row, other=0)
        end = tl.load(begin_ptr + after, mask=is_row, other=0)
        own_source = tl.load(source_ptr + segment, mask=begin < end, other=0)
        is_own = (begin[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
        start += tl.sum(tl.where(is_own, begin[None, :], 0), 1)
        source += tl.sum(tl.where(is_own, own_source[None, :], 0), 1)
    return start, source


@triton.jit
def convolve_tile(
    x_ptr, windows_ptr, taps_ptr, token, start, source, channel, live_token, live_channel,
    ROW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, FACTOR: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the convolution of these channels for TOKENS tokens, in float32: [TOKENS, TILE].

    x: [tokens, ROW], from the first channel on; FACTOR: see _inputs. windows: [states, TAPS - 1, CHANNELS]. taps:
    [CHANNELS, TAPS]. start, source: as find_rows returns them.
    """
    BEFORE: tl.constexpr = TAPS - 1  # tokens
    live = live_token[:, None] & live_channel[None, :]
    total = tl.zeros([TOKENS, TILE], tl.float32)
    for tap in tl.static_range(0, TAPS):
        place = token - start + tap  # in the row's line: the window, then its tokens
        is_before = place < BEFORE
        at = (token - BEFORE + tap).to(tl.int64) * ROW
        is_here = live & (place >= BEFORE)[:, None]
        x = _inputs(x_ptr, at[:, None] + channel[None, :], is_here, FACTOR).to(tl.float32)
        at = (source.to(tl.int64) * BEFORE + place) * CHANNELS
        is_kept = is_before & (source >= 0)
        kept = tl.load(windows_ptr + at[:, None] + channel[None, :], mask=live & is_kept[:, None], other=0.0)
        weight = tl.load(taps_ptr + channel * TAPS + tap, mask=live_channel, other=0.0).to(tl.float32)
        total += tl.where(is_before[:, None], kept.to(tl.float32), x) * weight[None, :]
    return total


@triton.jit
def write_windows(
    x_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr, row, part,
    ROW: tl.constexpr, CHANNELS: tl.constexpr, FACTOR: tl.constexpr,
    BEFORE: tl.constexpr, BEFORE_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write TILE channels of the windows of a row's targets.

    x, windows, FACTOR: as in convolve_tile. BEFORE: the tokens of a window. BEFORE_P: a power of two, not below it.
    """
    channel = part * TILE + tl.arange(0, TILE)
    j = tl.arange(0, BEFORE_P)
    live = (j < BEFORE)[:, None] & (channel < CHANNELS)[None, :]
    for segment in range(tl.load(row_start_ptr + row), tl.load(row_start_ptr + row + 1)):
        begin = tl.load(begin_ptr + segment)
        tokens = tl.load(begin_ptr + segment + 1) - begin
        source = tl.load(source_ptr + segment)
        target = tl.load(target_ptr + segment)
        place = tokens + j  # in the segment's line: the window, then its tokens
        is_here = live & (place >= BEFORE)[:, None]
        at = (begin + place - BEFORE).to(tl.int64) * ROW
        x = _inputs(x_ptr, at[:, None] + channel[None, :], is_here, FACTOR)
        is_kept = live & (place < tl.where(source >= 0, BEFORE, 0))[:, None]
        at = (source.to(tl.int64) * BEFORE + place) * CHANNELS
        kept = tl.load(windows_ptr + at[:, None] + channel[None, :], mask=is_kept, other=0.0)
        tl.debug_barrier()  # all threads have loaded before one of them overwrites the source
        at = (target.to(tl.int64) * BEFORE + j) * CHANNELS
        tl.store(windows_ptr + at[:, None] + channel[None, :], tl.where(is_here, x, kept), mask=live)
        tl.debug_barrier()  # and all have stored before the next segment reads it
