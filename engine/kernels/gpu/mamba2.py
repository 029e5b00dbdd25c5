"""Triton kernels of Mamba2: the convolution, the recurrence over a row's tokens, and the gated norm.

Three launches compute a layer, as those of delta.py do. models/mixers/mamba2.py computes the same in torch. See
segments.py for rows and padding. Queries, keys and values are C, B and x, in the order of x, B, C.

Every sum is over the numbers of one head or one group, or over the taps, in an order that depends on the model's sizes
alone. So a row has the same bits beside any other rows, and however its tokens are divided into steps and segments.
DEPENDENT as in skinny.multiply.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activations import activated
from .prefetching import prefetch
from .segments import SEGMENTS, convolve_tile, find_rows, softplus, write_windows

LINE = tl.constexpr(32)  # float32 numbers in a line of the cache


@triton.jit
def _write_steps(
    steps_ptr, decay_ptr, dt_bias_ptr, numbers_ptr, token, head, live_token, least, most,
    ROW: tl.constexpr, VALUE_HEADS: tl.constexpr,
):  # fmt: skip
    """Write the time steps of tokens, and their decays, for these heads."""
    live_head = head < VALUE_HEADS
    live = live_token[:, None] & live_head[None, :]
    bias = tl.load(dt_bias_ptr + head, mask=live_head, other=0.0)
    rate = tl.exp(tl.load(decay_ptr + head, mask=live_head, other=0.0))
    at = token.to(tl.int64)[:, None] * ROW + head[None, :]
    step = softplus(tl.load(steps_ptr + at, mask=live, other=0.0).to(tl.float32) + bias[None, :])
    step = tl.where(step < least, least, step)  # NaN stays
    step = tl.where(step > most, most, step)
    numbers = numbers_ptr + token.to(tl.int64)[:, None] * (2 * VALUE_HEADS) + head[None, :]
    tl.store(numbers, step, mask=live)
    tl.store(numbers + VALUE_HEADS, tl.exp(-rate[None, :] * step), mask=live)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=SEGMENTS)
def convolve_steps(
    projected_ptr, taps_ptr, bias_ptr, decay_ptr, dt_bias_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr,
    convolved_ptr, numbers_ptr, tokens, rows, least, most,
    VALUES: tl.constexpr, CHANNELS: tl.constexpr, VALUE_HEADS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Convolve TILE channels of TOKENS tokens, or write the time steps of TILE heads and what they do to the matrices.

    projected, windows: see models/mixers/mamba2.py. taps: [CHANNELS, TAPS]. bias: [CHANNELS]. convolved: [tokens,
    CHANNELS]. numbers: [tokens, 2 * VALUE_HEADS] float32: the step of each head, then the decays. PARTS: of the
    channels; the programs after them have the heads.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    DTYPE: tl.constexpr = convolved_ptr.dtype.element_ty
    ROW: tl.constexpr = VALUES + CHANNELS + VALUE_HEADS
    part = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live_token = token < tokens
    if part < PARTS:
        channel = part * TILE + tl.arange(0, TILE)
        live_channel = channel < CHANNELS
        start, source = find_rows(row_start_ptr, begin_ptr, source_ptr, token, rows, TOKENS, ROWS)
        total = convolve_tile(
            projected_ptr + VALUES, windows_ptr, taps_ptr, token, start, source, channel, live_token, live_channel,
            ROW, CHANNELS, TAPS, 0, TOKENS, TILE,
        )  # fmt: skip
        if BIAS:
            total += tl.load(bias_ptr + channel, mask=live_channel, other=0.0).to(tl.float32)[None, :]
        result = activated(total.to(DTYPE).to(tl.float32), "silu").to(DTYPE)
        at = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(convolved_ptr + at, result, mask=live_token[:, None] & live_channel[None, :])
    else:
        _write_steps(
            projected_ptr + VALUES + CHANNELS, decay_ptr, dt_bias_ptr, numbers_ptr,
            token, (part - PARTS) * TILE + tl.arange(0, TILE), live_token, least, most, ROW, VALUE_HEADS,
        )  # fmt: skip


@triton.jit
def _token(
    convolved_ptr, numbers_ptr, token, is_live, key_head, value_head, keys, columns,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return a token's query, key, and part of its value, as they are stored, its step and its decay."""
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUES
    at = tl.cast(token, tl.int64)  # in the interpreter it is an int
    value = convolved_ptr + at * CHANNELS + value_head * VALUE_DIM
    key = convolved_ptr + at * CHANNELS + VALUES + key_head * KEY_DIM
    live = keys < tl.where(is_live, KEY_DIM, 0)
    q = tl.load(key + KEY_HEADS * KEY_DIM + keys, mask=live, other=0.0)
    k = tl.load(key + keys, mask=live, other=0.0)
    v = tl.load(value + columns, mask=columns < tl.where(is_live, VALUE_DIM, 0), other=0.0)
    numbers = numbers_ptr + at * (2 * VALUE_HEADS) + value_head
    step = tl.load(numbers, mask=is_live, other=0.0)
    decay = tl.load(numbers + VALUE_HEADS, mask=is_live, other=0.0)
    return q, k, v, step, decay


@triton.jit(do_not_specialize_on_alignment=SEGMENTS)
def scan(
    convolved_ptr, numbers_ptr, skip_ptr, matrices_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr, read_ptr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_P: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write what the tokens of a row read, and the matrices of the row's targets, for COLUMNS columns of one head.

    convolved, numbers: as `convolve_steps` writes them. skip: [VALUE_HEADS] float32. matrices: see
    models/mixers/states.py. read: [tokens, VALUE_HEADS * VALUE_DIM]. KEY_P: a power of two, not below KEY_DIM. PARTS:
    of a head's columns.
    """
    value_head = tl.program_id(0) // PARTS
    key_head = value_head // (VALUE_HEADS // KEY_HEADS)
    row = tl.program_id(1)
    keys = tl.arange(0, KEY_P)
    columns = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    live_column = columns < VALUE_DIM
    live = (keys < KEY_DIM)[:, None] & live_column[None, :]
    place = value_head * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + columns[None, :]
    STATE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    skip = tl.load(skip_ptr + value_head)

    first = tl.load(row_start_ptr + row)
    last = tl.load(row_start_ptr + row + 1)
    # A row without segments has no source either, and may be after the last one.
    source = tl.load(source_ptr + first, mask=first < last, other=-1)
    is_kept = (keys < tl.where(source >= 0, KEY_DIM, 0))[:, None] & live_column[None, :]
    begin = tl.load(begin_ptr + first)
    end = tl.load(begin_ptr + last)
    matrix_at = matrices_ptr + tl.maximum(source, 0).to(tl.int64) * STATE
    if DEPENDENT:
        LINES: tl.constexpr = COLUMNS // LINE if COLUMNS > LINE else 1
        number = tl.program_id(0) % PARTS * COLUMNS + LINE * tl.arange(0, LINES)
        number = tl.minimum(keys, KEY_DIM - 1)[:, None] * VALUE_DIM + tl.minimum(number, VALUE_DIM - 1)[None, :]
        prefetch(matrix_at + value_head * (KEY_DIM * VALUE_DIM) + number)
        gdc_wait()
        gdc_launch_dependents()
    if first == last:  # as of most rows of a captured step with a prompt
        return
    matrix = tl.load(matrix_at + place, mask=is_kept, other=0.0)
    # A token is loaded while the one before it is computed.
    q, k, v, step, decay = _token(
        convolved_ptr, numbers_ptr, begin, begin < end, key_head, value_head, keys, columns,
        KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
    )  # fmt: skip
    for segment in range(first, last):
        # Triton 3.6 would lose the value of a variable that an iteration sets for the range of the next one.
        for token in range(tl.load(begin_ptr + segment), tl.load(begin_ptr + segment + 1)):
            next_q, next_k, next_v, next_step, next_decay = _token(
                convolved_ptr, numbers_ptr, token + 1, token + 1 < end, key_head, value_head, keys, columns,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            value = v.to(tl.float32)
            matrix = matrix * decay + k.to(tl.float32)[:, None] * (value * step)[None, :]
            read = tl.sum(matrix * q.to(tl.float32)[:, None], 0) + value * skip
            at = (tl.cast(token, tl.int64) * VALUE_HEADS + value_head) * VALUE_DIM + columns
            tl.store(read_ptr + at, read.to(read_ptr.dtype.element_ty), mask=live_column)
            q, k, v, step, decay = next_q, next_k, next_v, next_step, next_decay
        target = tl.load(target_ptr + segment)
        tl.store(matrices_ptr + target.to(tl.int64) * STATE + place, matrix, mask=live)


@triton.jit
def _normalize(
    read_ptr, projected_ptr, weight_ptr, token, group, eps,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Replace what a token has read, in one group, by its gated norm."""
    DTYPE: tl.constexpr = read_ptr.dtype.element_ty
    i = tl.arange(0, GROUP_P)
    live = i < GROUP
    place = group * GROUP + i
    x = tl.load(read_ptr + token.to(tl.int64) * (GROUPS * GROUP) + place, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(projected_ptr + token.to(tl.int64) * ROW + place, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + place, mask=live, other=0.0).to(tl.float32)
    x *= activated(gate, "silu")
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / GROUP + eps)).to(DTYPE).to(tl.float32)
    tl.store(read_ptr + token.to(tl.int64) * (GROUPS * GROUP) + place, (weight * x).to(DTYPE), mask=live)


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=SEGMENTS)
def finish_groups(
    read_ptr, projected_ptr, weight_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr, tiles, eps,
    VALUE_HEADS: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_P: tl.constexpr, BEFORE: tl.constexpr, BEFORE_P: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Replace what has been read by its gated norm, and write the windows of all targets.

    Each of the first `tiles` programs computes the norm of one token over the GROUP values of one group. A program of
    the others writes TILE channels of a row's windows; PARTS: of the channels. read: [tokens, GROUPS * GROUP]. weight:
    [GROUPS * GROUP]. BEFORE: the tokens of a window. GROUP_P, BEFORE_P: powers of two, not below GROUP and BEFORE.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    ROW: tl.constexpr = GROUPS * GROUP + CHANNELS + VALUE_HEADS
    program = tl.program_id(0)
    if program < tiles:
        _normalize(
            read_ptr, projected_ptr, weight_ptr, program // GROUPS, program % GROUPS, eps, GROUPS, GROUP, GROUP_P, ROW
        )
    else:
        write_windows(
            projected_ptr + GROUPS * GROUP, windows_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr,
            (program - tiles) // PARTS, (program - tiles) % PARTS, ROW, CHANNELS, 0, BEFORE, BEFORE_P, TILE,
        )  # fmt: skip
