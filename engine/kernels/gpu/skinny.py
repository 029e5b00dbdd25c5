"""A Triton kernel for products with plain weights: x @ weight.T, for few rows with what comes after it.

With few rows a product takes the time in which its weight is read. The gate and the residual cost nothing beside that,
and save launches. The RMSNorm before it has a kernel of its own: a product whose programs computed it, too, took twice
as long on an H200, because x then goes through registers on its way to the matrix units.

A program computes a tile of the result over all columns, or over a part of them, in steps of COLUMNS. So a row's sum
has one order, whatever the number of rows. With other tiles and as many parts it has the same one, as far as the GPU's
matrix instructions add up columns alike for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import activations
from .prefetching import prefetch

LINE = tl.constexpr(64)  # numbers of 16 bits in a line of the cache
# A part of a sum has a multiple of this many columns, or of COLUMNS if that is more, so that tiles of 64 and of 128
# columns divide sums alike.
PART = tl.constexpr(128)


@triton.jit
def _summed(
    total, up_total, x_at, weight_at, up_at, begin, end, columns, is_token, is_row, GATED: tl.constexpr,
    EVEN: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile, and if it is GATED those of its other half, with the columns from begin to end."""
    k = tl.arange(0, COLUMNS)
    for column in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + column, mask=is_token[:, None], other=0.0).to(WIDE)
            weight = tl.load(weight_at + column, mask=is_row[None, :], other=0.0).to(WIDE)
        else:
            left = k < columns - column
            x = tl.load(x_at + column, mask=is_token[:, None] & left[None, :], other=0.0).to(WIDE)
            weight = tl.load(weight_at + column, mask=is_row[None, :] & left[:, None], other=0.0).to(WIDE)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if GATED:
            if EVEN:
                up = tl.load(up_at + column, mask=is_row[None, :], other=0.0).to(WIDE)
            else:
                up = tl.load(up_at + column, mask=is_row[None, :] & left[:, None], other=0.0).to(WIDE)
            up_total = tl.dot(x, up, up_total, input_precision="ieee")
    return total, up_total


@triton.jit(do_not_specialize=["tokens"])
def multiply(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, pairs_ptr, owners_ptr, places_ptr, sums_ptr, arrived_ptr,
    tokens, rows, columns, x_token, out_token, scale,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    EVEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT: tl.constexpr, SHARED: tl.constexpr, FAN: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr, SERIAL: tl.constexpr,
):  # fmt: skip
    """Write x @ weight.T to out [tokens, rows], rounded once. The grid is (tiles of rows, tiles of tokens, PARTS), with
    SERIAL (tiles of rows, tiles of tokens).

    x: [tokens, columns]. weight: [rows, columns], contiguous. BIAS adds bias [rows]; ADD multiplies by `scale` and adds
    residual, which has the shape and strides of out and may be out. With an ACTIVATION the weight has 2 * rows rows,
    the gate's first, and the result is activation(gate) * up; without a gate, as with "relu2", it has rows alone. EVEN:
    COLUMNS divides the columns. DEPENDENT: the kernel was launched before the one before it has ended. AHEAD: the lines
    of each row of the weight that are then read before. SHARED: the number of tiles of tokens that are computed side by
    side for each tile of rows, so that many of both stay in the cache.

    With PARTS above 1 a program sums up as many consecutive columns, and the last one of a tile to arrive adds up all
    parts in their order; there is no gate. sums: [PARTS, tokens, rows] float32. arrived: an int32 per tile, zero
    before and after. With SERIAL each program computes all parts of its tile, one after the other, with the same bits.

    With FAN the product is that of routed pairs: result `pair` is row pair // FAN of x times the weight of the tile's
    owner. pairs and owners: see experts.arrange. places: [owners, 2] int64, where an owner's weight and bias are,
    counted in 16 numbers from weight and bias.
    """
    GATED: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    tl.static_assert(PARTS == 1 or not GATED)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if WIDEN else DTYPE  # the interpreter does not compute in bfloat16
    row_tile = tl.program_id(0)
    token_tile = tl.program_id(1)
    if SHARED > 1:
        token_tile, row_tile = tl.swizzle2d(token_tile, row_tile, tl.num_programs(1), tl.num_programs(0), SHARED)
    n = row_tile * ROWS + tl.arange(0, ROWS)
    m = token_tile * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, COLUMNS)
    is_row, is_token = n < rows, m < tokens
    begin = 0
    end = columns
    share = columns
    if PARTS > 1:
        UNIT: tl.constexpr = PART if COLUMNS < PART else COLUMNS
        share = tl.cdiv(tl.cdiv(columns, PARTS), UNIT) * UNIT
        if not SERIAL:
            begin = tl.program_id(2) * share
            end = tl.minimum(begin + share, columns)
    if DEPENDENT:
        # The weight is not a result of an earlier kernel: its first columns are prefetched while this kernel waits.
        if not FAN:  # then it is not known yet which weight it is
            ahead = weight_ptr + tl.minimum(n, rows - 1).to(tl.int64) * columns + begin
            prefetch(ahead[:, None] + tl.minimum(LINE * tl.arange(0, AHEAD), columns - 1 - begin)[None, :])
        gdc_wait()
        # The next kernel may be launched now; it waits until this one has ended, before it reads any result. Before
        # the wait, it would let the one after it be launched, and so on: they would take this one's place.
        gdc_launch_dependents()
    source = m
    if FAN:
        owner = tl.load(owners_ptr + token_tile)
        if owner < 0:
            return
        m = tl.load(pairs_ptr + m)
        is_token, source = m >= 0, m // FAN
        weight_ptr += 16 * tl.load(places_ptr + 2 * owner)
        bias_ptr += 16 * tl.load(places_ptr + 2 * owner + 1)
    x_at = x_ptr + source.to(tl.int64)[:, None] * x_token + k[None, :]
    weight_at = weight_ptr + n.to(tl.int64)[None, :] * columns + k[:, None]
    up_at = weight_at + tl.cast(rows, tl.int64) * columns
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    up_total = tl.zeros([TOKENS, ROWS], tl.float32)
    if SERIAL:
        for since in range(0, columns, share):
            piece, up_total = _summed(
                tl.zeros([TOKENS, ROWS], tl.float32), up_total, x_at, weight_at, up_at, since,
                tl.minimum(since + share, columns), columns, is_token, is_row, GATED, EVEN, COLUMNS, STAGES, WIDE,
            )  # fmt: skip
            total += piece
    else:
        total, up_total = _summed(
            total, up_total, x_at, weight_at, up_at, begin, end, columns, is_token, is_row, GATED, EVEN, COLUMNS,
            STAGES, WIDE,
        )  # fmt: skip
    is_in = is_token[:, None] & is_row[None, :]
    if PARTS > 1 and not SERIAL:
        sum_at = sums_ptr + m.to(tl.int64)[:, None] * rows + n[None, :]
        tl.store(sum_at + tl.program_id(2).to(tl.int64) * tokens * rows, total, mask=is_in)
        tl.debug_barrier()  # all threads have stored before one of them counts the part
        counter = arrived_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < PARTS - 1:
            return
        tl.store(counter, 0)
        total = tl.zeros([TOKENS, ROWS], tl.float32)
        for _ in range(0, PARTS):
            # Past the first-level cache, which other programs' stores do not reach.
            total += tl.load(sum_at, mask=is_in, other=0.0, cache_modifier=".cg")
            sum_at += tokens.to(tl.int64) * rows
    if BIAS:
        total += tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_total += tl.load(bias_ptr + rows + n, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        total = activations.gated(total, up_total, ACTIVATION, LIMIT, ALPHA)
    at = m.to(tl.int64)[:, None] * out_token + n[None, :]
    if ADD:
        total = total * scale + tl.load(residual_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_in)
