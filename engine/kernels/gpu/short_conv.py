"""Triton kernels of gated short convolutions, in two launches: the results, and then the windows.

models/mixers/short_conv.py computes the same in torch. See segments.py for rows and padding. A sum is over the taps, so
a row has the same bits beside any other rows, and however its tokens are divided into steps and segments. DEPENDENT as
in skinny.multiply.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .segments import SEGMENTS, convolve_tile, find_rows, write_windows


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=SEGMENTS)
def convolve_gated(
    projected_ptr, taps_ptr, bias_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr, out_ptr, tokens, rows,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the results of TOKENS tokens and TILE channels.

    projected: [tokens, 3 * CHANNELS], see models/mixers/short_conv.py. taps: [CHANNELS, TAPS]. bias: [CHANNELS]. out:
    [tokens, CHANNELS].
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live_channel, live_token = channel < CHANNELS, token < tokens
    start, source = find_rows(row_start_ptr, begin_ptr, source_ptr, token, rows, TOKENS, ROWS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    total = convolve_tile(
        projected_ptr, windows_ptr, taps_ptr, token, start, source, channel, live_token, live_channel,
        3 * CHANNELS, CHANNELS, TAPS, 2 * CHANNELS, TOKENS, TILE,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=live_channel, other=0.0).to(tl.float32)[None, :]
    live = live_token[:, None] & live_channel[None, :]
    at = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    at_gate = token.to(tl.int64)[:, None] * (3 * CHANNELS) + CHANNELS + channel[None, :]
    gate = tl.load(projected_ptr + at_gate, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (gate * total.to(DTYPE).to(tl.float32)).to(DTYPE), mask=live)


@triton.jit(do_not_specialize_on_alignment=SEGMENTS)
def keep_windows(
    projected_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr,
    CHANNELS: tl.constexpr, BEFORE: tl.constexpr, BEFORE_P: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write TILE channels of the windows of a row's targets; PARTS: of the channels. See segments.write_windows."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    write_windows(
        projected_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr,
        tl.program_id(0) // PARTS, tl.program_id(0) % PARTS,
        3 * CHANNELS, CHANNELS, 2 * CHANNELS, BEFORE, BEFORE_P, TILE,
    )  # fmt: skip
