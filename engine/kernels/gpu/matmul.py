"""Triton kernels for quantized weights: x @ weight.T, and rows of the weight as plain numbers.

Integers are stored in slices of SLICE columns, [slices, rows, bytes of a slice's row], so that a tile of rows is
contiguous and is read in loads of 16 bytes; floats row by row, [rows, slices * SLICE], as torch's products read them
too. The last slice is padded. With 4 bits byte b of a slice holds column b in
its low half and column SLICE / 2 + b in its high half. Scales and zero points are [groups, rows]; GROUP columns of a
row share one, and with GROUP 0 all do.

Stored numbers less their zero points are exact in x's dtype. They are multiplied as they are, and each group's sum is
multiplied by its scale in float32, so that no weight is rounded. With FOLD each number is multiplied by its scale and
rounded to x's dtype, as `dequantize` does, and all groups have one sum: less work per weight if x has many rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .prefetching import prefetch

LINE = tl.constexpr(128)  # bytes of a line of the cache
AHEAD = tl.constexpr(8)  # slices that are read before the kernel before has ended


@triton.jit
def of_half(half, zero, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Return 4-bit numbers, uint8, less their zero points, in WIDE: DTYPE, or float32 in the interpreter.

    The bits of a power of two and of a number below its precision, joined, are their sum: converting takes longer.
    """
    if DTYPE == tl.bfloat16:
        return (half.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True).to(WIDE) - (zero + 128.0).to(WIDE)
    elif DTYPE == tl.float16:
        return (half.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True).to(WIDE) - (zero + 1024.0).to(WIDE)
    else:
        return half.to(tl.float32) - zero


@triton.jit
def of_float8(stored, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Return E4M3 numbers, given as int8, in WIDE. There is no NaN among them.

    Their bits are moved to where a wider float has sign, exponent and mantissa; the exponents' biases differ by a
    factor. So it works on GPUs without instructions for fp8.
    """
    if DTYPE == tl.float16:
        moved = ((stored.to(tl.int16) << 7) & -16512).to(tl.float16, bitcast=True)  # 0xBF80
        return moved.to(WIDE) * tl.full([], 256.0, WIDE)  # 2^(15 - 7)
    else:
        moved = ((stored.to(tl.int32) << 20) & -2014314496).to(tl.float32, bitcast=True)  # 0x87F00000
        return (moved * 1.329227995784916e36).to(WIDE)  # 2^(127 - 7)


@triton.jit
def of_byte(stored, zero, FLOAT: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Return numbers of 8 bits, int8, less their zero points, in WIDE."""
    if FLOAT:
        return of_float8(stored, DTYPE, WIDE)
    elif ZEROS:
        return stored.to(WIDE) - zero.to(WIDE)
    else:
        return stored.to(WIDE)


@triton.jit(do_not_specialize=["tokens"])
def multiply(
    x_ptr, numbers_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, sums_ptr, arrived_ptr,
    pairs_ptr, owners_ptr, places_ptr,
    tokens, rows, columns, slices, x_token, out_token,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZEROS: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr, FAN: tl.constexpr,
    TOGETHER: tl.constexpr, TURNED: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write x @ weight.T + bias to out [tokens, rows], rounded once; a program computes a tile, or a part of its sum.

    The grid is (tiles of rows, parts, tiles of tokens). A part sums up consecutive slices. If there are several, there
    is one tile of tokens; the last part to arrive adds up all in their order, so results do not depend on the order of
    arrival. sums: [parts, tokens, rows] float32. arrived: an int32 per tile of rows, zero before and after.

    TURNED: the transpose of the result is computed, weight @ x.T. Matrix units of a Hopper take their first operand
    from registers, where a weight's numbers are converted, and the second one from shared memory alone.

    With FAN the product is that of routed pairs, as in skinny.multiply, in one part. places: [owners, 4] int64, of
    numbers, scales, zero points and bias.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if WIDEN else DTYPE  # the interpreter does not compute in bfloat16
    HALVES: tl.constexpr = 8 // BITS  # columns of a byte
    STEP: tl.constexpr = SLICE // HALVES  # columns that are multiplied at once
    # Products of STEP columns whose columns share a scale: those of all slices that are taken together, of one, or one.
    ALIKE: tl.constexpr = HALVES * (TOGETHER if GROUP % (SLICE * TOGETHER) == 0 else 1) if GROUP % SLICE == 0 else 1
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, parts = tl.program_id(1), tl.num_programs(1)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, STEP)
    is_row, is_token = n < rows, m < tokens
    # EVEN: no step goes past the last column, so that loads need no masks. Rows and tokens that there are not are
    # computed as the last ones, and not stored.
    row, source = tl.minimum(n, rows - 1), tl.minimum(m, tokens - 1)
    # A part takes TOGETHER slices at a time.
    share = tl.cdiv(tl.cdiv(slices, parts), TOGETHER) * TOGETHER
    if DEPENDENT:
        if not FAN and FLOAT:
            byte = part * share * SLICE + LINE * tl.arange(0, AHEAD * SLICE // LINE)
            line = tl.minimum(n, rows - 1).to(tl.int64)[:, None] * (slices * SLICE)
            prefetch(numbers_ptr + line + tl.minimum(byte, slices * SLICE - 1)[None, :])
        elif not FAN:
            ahead = tl.minimum(part * share + tl.arange(0, AHEAD), slices - 1).to(tl.int64)
            byte = tl.program_id(0) * (ROWS * STEP) + LINE * tl.arange(0, ROWS * STEP // LINE)
            prefetch(numbers_ptr + ahead[:, None] * rows * STEP + tl.minimum(byte, rows * STEP - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    if FAN:
        owner = tl.load(owners_ptr + tl.program_id(2))
        if owner < 0:
            return
        m = tl.load(pairs_ptr + m)
        is_token, source = m >= 0, tl.maximum(m, 0) // FAN
        places_at = places_ptr + 4 * owner
        numbers_ptr += 16 * tl.load(places_at)
        scales_ptr += 16 * tl.load(places_at + 1)
        zeros_ptr += 16 * tl.load(places_at + 2)
        bias_ptr += 16 * tl.load(places_at + 3)
    # Tiles are [TOKENS, STEP] and [STEP, ROWS], or if TURNED [ROWS, STEP] and [STEP, TOKENS].
    IN: tl.constexpr = 1 if TURNED else 0
    OUT: tl.constexpr = 1 - IN
    n_at, is_row_at = tl.expand_dims(n, IN), tl.expand_dims(is_row, IN)
    row_at = tl.expand_dims(row, IN)
    m_at, is_token_at = tl.expand_dims(m, OUT).to(tl.int64), tl.expand_dims(is_token, OUT)
    x_at = x_ptr + tl.expand_dims(source, OUT).to(tl.int64) * x_token + tl.expand_dims(k, IN)
    if FLOAT:
        line_at = numbers_ptr + row_at.to(tl.int64) * (slices * SLICE)
        stored_at = line_at + part * share * SLICE + tl.expand_dims(k, OUT)
    else:
        stored_at = numbers_ptr + (part * share).to(tl.int64) * rows * STEP + row_at * STEP + tl.expand_dims(k, OUT)
    total = tl.zeros([ROWS, TOKENS] if TURNED else [TOKENS, ROWS], tl.float32)
    for first in tl.range(part * share, tl.minimum(part * share + share, slices), TOGETHER, num_stages=STAGES):
        for each in tl.static_range(TOGETHER):
            index = first + each
            is_there = is_row
            if EVEN:
                stored = tl.load(stored_at)
            else:
                is_there = is_row & (index + 0 * n < slices)  # the interpreter needs a tensor
                stored = tl.load(stored_at, mask=tl.expand_dims(is_there, IN), other=0)
            stored_at += SLICE if FLOAT else rows * STEP
            for half in tl.static_range(HALVES):
                column = index * SLICE + half * STEP
                if EVEN:
                    x = tl.load(x_at + column).to(WIDE)
                else:
                    is_number = is_token_at & tl.expand_dims(column + k < columns, IN)
                    x = tl.load(x_at + column, mask=is_number, other=0.0).to(WIDE)
                if (each * HALVES + half) % ALIKE == 0:
                    group_at = n
                    scale = tl.full([ROWS], 1.0, tl.float32)
                    if GROUP:
                        group_at = (column // GROUP) * rows + n
                        scale = tl.load(scales_ptr + group_at, mask=is_there, other=0.0).to(tl.float32)
                    zero = tl.full([ROWS], 8.0, tl.float32)  # the middle of 4 bits
                    if ZEROS:
                        zero = tl.load(zeros_ptr + group_at, mask=is_there, other=0).to(tl.float32)
                if BITS == 4:
                    weight = of_half((stored >> (4 * half)) & 15, tl.expand_dims(zero, IN), DTYPE, WIDE)
                else:
                    weight = of_byte(stored, tl.expand_dims(zero, IN), FLOAT, ZEROS, DTYPE, WIDE)
                if FOLD:
                    weight = (weight.to(tl.float32) * tl.expand_dims(scale, IN)).to(DTYPE).to(WIDE)
                a, b = (weight, x) if TURNED else (x, weight)
                if FOLD or not GROUP:
                    total = tl.dot(a, b, total, input_precision="ieee")
                else:
                    if (each * HALVES + half) % ALIKE == 0:
                        of_group = tl.zeros_like(total)
                    of_group = tl.dot(a, b, of_group, input_precision="ieee")
                    if (each * HALVES + half) % ALIKE == ALIKE - 1:
                        total += of_group * tl.expand_dims(scale, IN)
    if not GROUP:
        total *= tl.expand_dims(tl.load(scales_ptr + n, mask=is_row, other=0.0).to(tl.float32), IN)
    is_in = is_token_at & is_row_at
    missing = part - part  # parts that have not been stored yet
    if parts > 1:
        sum_at = sums_ptr + m_at * rows + n_at
        tl.store(sum_at + part.to(tl.int64) * tokens * rows, total, mask=is_in)
        tl.debug_barrier()  # all threads have stored before one of them counts the part
        counter = arrived_ptr + tl.program_id(0)
        missing = parts - 1 - tl.atomic_add(counter, 1, sem="acq_rel")
        if missing == 0:
            tl.store(counter, 0)
            total = tl.zeros([ROWS, TOKENS] if TURNED else [TOKENS, ROWS], tl.float32)
            for _ in range(0, parts):
                # Past the first-level cache, which other programs' stores do not reach.
                total += tl.load(sum_at, mask=is_in, other=0.0, cache_modifier=".cg")
                sum_at += tokens * rows
    if missing == 0:
        total += tl.expand_dims(tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32), IN)
        out_at = out_ptr + m_at * out_token + n_at
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["first", "count"])
def dequantize(
    numbers_ptr, scales_ptr, zeros_ptr, ids_ptr, out_ptr, first, count, rows, columns,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZEROS: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, LOOK_UP: tl.constexpr,
):  # fmt: skip
    """Write rows of the weight to out [count, columns], rounded once: from `first` on, or with LOOK_UP those of `ids`.

    The grid is (tiles of ROWS rows, slices).
    """
    HALVES: tl.constexpr = 8 // BITS
    STEP: tl.constexpr = SLICE // HALVES
    i, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    is_in = i < count
    row = first + i.to(tl.int64)
    if LOOK_UP:
        row = tl.load(ids_ptr + i, mask=is_in, other=0)
    index = tl.program_id(1).to(tl.int64)
    stored_at = row * tl.num_programs(1) + index if FLOAT else index * rows + row
    stored = tl.load(numbers_ptr + stored_at[:, None] * STEP + k[None, :], mask=is_in[:, None], other=0)
    for half in tl.static_range(HALVES):
        column = index * SLICE + half * STEP
        group_at = row
        if GROUP:
            group_at = (column // GROUP) * rows + row
        zero = tl.full([ROWS], 8.0, tl.float32)
        if ZEROS:
            zero = tl.load(zeros_ptr + group_at, mask=is_in, other=0).to(tl.float32)
        if BITS == 4:
            weight = of_half((stored >> (4 * half)) & 15, zero[:, None], tl.float32, tl.float32)
        else:
            weight = of_byte(stored, zero[:, None], FLOAT, ZEROS, tl.float32, tl.float32)
        scale = tl.load(scales_ptr + group_at, mask=is_in, other=0.0).to(tl.float32)
        out_at = out_ptr + i.to(tl.int64)[:, None] * columns + column + k[None, :]
        is_number = is_in[:, None] & (column + k < columns)[None, :]
        tl.store(out_at, (weight * scale[:, None]).to(out_ptr.dtype.element_ty), mask=is_number)
