"""Triton kernels of Gated DeltaNet: the convolution, the recurrence over a row's tokens, and the gated norm.

Three launches compute a layer's linear attention. The recurrence is the only one whose time grows with the tokens of a
row, so what a token needs of itself alone is computed before it and after it. models/mixers/delta.py computes the same
in torch. See segments.py for rows, windows and padding.

Every sum is over the numbers of one head or over the taps, in an order that depends on the model's sizes alone. So a
row has the same bits beside any other rows, and however its tokens are divided into steps and segments. DEPENDENT as in
skinny.multiply.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activations import activated
from .prefetching import prefetch
from .segments import SEGMENTS, convolve_tile, find_rows, softplus, write_windows

LINE = tl.constexpr(32)  # float32 numbers in a line of the cache


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=SEGMENTS)
def convolve(
    qkvz_ptr, gates_ptr, taps_ptr, decay_ptr, bias_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr,
    convolved_ptr, numbers_ptr, tokens, rows, l2_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM_P: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Convolve TOKENS tokens of one head of queries, keys or values, and write what else the recurrence needs of them.

    qkvz, gates, windows: see models/mixers/delta.py. taps: [channels, TAPS]. convolved: [tokens, channels]. numbers:
    [tokens, 2 * KEY_HEADS + 2 * VALUE_HEADS] float32: what multiplies each head of queries and of keys, then beta of
    each value head, then the decays. DIM_P: a power of two, not below KEY_DIM and VALUE_DIM. A token's row is searched
    for among ROWS at a time.
    """
    DTYPE: tl.constexpr = convolved_ptr.dtype.element_ty
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUES
    NUMBERS: tl.constexpr = 2 * KEY_HEADS + 2 * VALUE_HEADS
    head = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)

    start, source = find_rows(row_start_ptr, begin_ptr, source_ptr, token, rows, TOKENS, ROWS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    live_token = token < tokens

    is_key = head < 2 * KEY_HEADS
    i = tl.arange(0, DIM_P)
    live_number = i < tl.where(is_key, KEY_DIM, VALUE_DIM)
    channel = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM) + i
    total = convolve_tile(
        qkvz_ptr, windows_ptr, taps_ptr, token, start, source, channel, live_token, live_number,
        CHANNELS + VALUES, CHANNELS, TAPS, 0, TOKENS, DIM_P,
    )  # fmt: skip
    result = activated(total.to(DTYPE).to(tl.float32), "silu").to(DTYPE)
    at = token.to(tl.int64) * CHANNELS
    tl.store(convolved_ptr + at[:, None] + channel[None, :], result, mask=live_token[:, None] & live_number[None, :])

    numbers = numbers_ptr + token.to(tl.int64) * NUMBERS + head
    if is_key:
        wide = result.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) + l2_eps)
        if head < KEY_HEADS:  # queries are scaled, too
            factor *= KEY_DIM**-0.5
        tl.store(numbers, factor, mask=live_token)
    else:
        value_head = head - 2 * KEY_HEADS
        gates = gates_ptr + token.to(tl.int64) * (2 * VALUE_HEADS) + value_head
        beta = tl.load(gates, mask=live_token, other=0.0).to(tl.float32)
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(DTYPE).to(tl.float32)
        tl.store(numbers, beta, mask=live_token)
        rate = tl.exp(tl.load(decay_ptr + value_head))
        step = tl.load(gates + VALUE_HEADS, mask=live_token, other=0.0).to(tl.float32)
        step = softplus(step + tl.load(bias_ptr + value_head))
        tl.store(numbers + VALUE_HEADS, tl.exp(-rate * step), mask=live_token)


@triton.jit
def _token(
    convolved_ptr, numbers_ptr, token, is_live, key_head, value_head, keys, columns,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return a token's query, key, and part of its value, as they are stored, and its four numbers."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    NUMBERS: tl.constexpr = 2 * KEY_HEADS + 2 * VALUE_HEADS
    at = tl.cast(token, tl.int64)  # in the interpreter it is an int
    query = convolved_ptr + at * CHANNELS + key_head * KEY_DIM
    value = convolved_ptr + at * CHANNELS + 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM
    live = keys < tl.where(is_live, KEY_DIM, 0)
    q = tl.load(query + keys, mask=live, other=0.0)
    k = tl.load(query + KEY_HEADS * KEY_DIM + keys, mask=live, other=0.0)
    v = tl.load(value + columns, mask=columns < tl.where(is_live, VALUE_DIM, 0), other=0.0)
    numbers = numbers_ptr + at * NUMBERS
    of_query = tl.load(numbers + key_head, mask=is_live, other=0.0)
    of_key = tl.load(numbers + KEY_HEADS + key_head, mask=is_live, other=0.0)
    beta = tl.load(numbers + 2 * KEY_HEADS + value_head, mask=is_live, other=0.0)
    decay = tl.load(numbers + 2 * KEY_HEADS + VALUE_HEADS + value_head, mask=is_live, other=0.0)
    return q, k, v, of_query, of_key, beta, decay


@triton.jit(do_not_specialize_on_alignment=SEGMENTS)
def recur(
    convolved_ptr, numbers_ptr, matrices_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr, read_ptr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr, KEY_P: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write what the tokens of a row read, and the matrices of the row's targets, for COLUMNS columns of one head.

    convolved, numbers: as `convolve` writes them. matrices: see models/mixers/states.py. read: [tokens, VALUE_HEADS *
    VALUE_DIM]. IS_TILED: see models/mixers/states.py. KEY_P: a power of two, not below KEY_DIM. PARTS: of a head's
    columns.
    """
    value_head = tl.program_id(0) // PARTS
    key_head = value_head % KEY_HEADS if IS_TILED else value_head // (VALUE_HEADS // KEY_HEADS)
    row = tl.program_id(1)
    keys = tl.arange(0, KEY_P)
    columns = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    live_column = columns < VALUE_DIM
    live = (keys < KEY_DIM)[:, None] & live_column[None, :]
    place = value_head * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + columns[None, :]
    STATE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM

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
    q, k, v, of_query, of_key, beta, decay = _token(
        convolved_ptr, numbers_ptr, begin, begin < end, key_head, value_head, keys, columns,
        KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
    )  # fmt: skip
    for segment in range(first, last):
        # Triton 3.6 would lose the value of a variable that an iteration sets for the range of the next one.
        for token in range(tl.load(begin_ptr + segment), tl.load(begin_ptr + segment + 1)):
            next_q, next_k, next_v, next_of_query, next_of_key, next_beta, next_decay = _token(
                convolved_ptr, numbers_ptr, token + 1, token + 1 < end, key_head, value_head, keys, columns,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            key = (k.to(tl.float32) * of_key)[:, None]
            matrix *= decay
            change = (v.to(tl.float32) - tl.sum(matrix * key, 0)) * beta
            matrix += key * change[None, :]
            query = (q.to(tl.float32) * of_query)[:, None]
            read = tl.sum(matrix * query, 0)
            at = (tl.cast(token, tl.int64) * VALUE_HEADS + value_head) * VALUE_DIM + columns
            tl.store(read_ptr + at, read.to(read_ptr.dtype.element_ty), mask=live_column)
            q, k, v = next_q, next_k, next_v
            of_query, of_key, beta, decay = next_of_query, next_of_key, next_beta, next_decay
        target = tl.load(target_ptr + segment)
        tl.store(matrices_ptr + target.to(tl.int64) * STATE + place, matrix, mask=live)


@triton.jit
def _normalize(
    read_ptr, qkvz_ptr, weight_ptr, program, pairs, eps,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_P: tl.constexpr, PAIRS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Replace what PAIRS pairs of a token and a head have read by its gated norm."""
    DTYPE: tl.constexpr = read_ptr.dtype.element_ty
    ROW: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM
    pair = program * PAIRS + tl.arange(0, PAIRS)
    i = tl.arange(0, VALUE_P)
    live = (pair < pairs)[:, None] & (i < VALUE_DIM)[None, :]
    at = (pair.to(tl.int64) * VALUE_DIM)[:, None] + i[None, :]
    x = tl.load(read_ptr + at, mask=live, other=0.0).to(tl.float32)
    at_gate = (pair // VALUE_HEADS).to(tl.int64) * ROW + CHANNELS + pair % VALUE_HEADS * VALUE_DIM
    gate = tl.load(qkvz_ptr + at_gate[:, None] + i[None, :], mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=i < VALUE_DIM, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + eps)[:, None]).to(DTYPE).to(tl.float32)
    x = (weight[None, :] * x).to(DTYPE).to(tl.float32)
    tl.store(read_ptr + at, (x * activated(gate, "silu")).to(DTYPE), mask=live)


@triton.jit(do_not_specialize=["pairs", "tiles"], do_not_specialize_on_alignment=SEGMENTS)
def finish(
    read_ptr, qkvz_ptr, weight_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr, pairs, tiles, eps,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_P: tl.constexpr, PAIRS: tl.constexpr,
    CHANNELS: tl.constexpr, BEFORE: tl.constexpr, BEFORE_P: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Replace what has been read by its gated norm, and write the windows of all targets.

    The first `tiles` programs compute the norms of PAIRS pairs of a token and a head each. A program of the others
    writes TILE channels of a row's windows; PARTS: of the channels. read: [tokens, VALUE_HEADS * VALUE_DIM]. weight:
    [VALUE_DIM]. BEFORE: the tokens of a window. VALUE_P, BEFORE_P: powers of two, not below VALUE_DIM and BEFORE.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < tiles:
        _normalize(
            read_ptr, qkvz_ptr, weight_ptr, program, pairs, eps, VALUE_HEADS, VALUE_DIM, VALUE_P, PAIRS, CHANNELS
        )  # fmt: skip
    else:
        write_windows(
            qkvz_ptr, windows_ptr, row_start_ptr, begin_ptr, source_ptr, target_ptr,
            (program - tiles) // PARTS, (program - tiles) % PARTS,
            CHANNELS + VALUE_HEADS * VALUE_DIM, CHANNELS, 0, BEFORE, BEFORE_P, TILE,
        )  # fmt: skip
