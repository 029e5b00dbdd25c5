"""Triton kernels for products of a single row: x @ weight.T, with the norm before it and what comes after it.

Matrix units would multiply fifteen rows of zeros as well, and their operands go through shared memory. Here a thread
multiplies what it has loaded itself. A program begins to load weights before the kernel that computes x has ended: all
plain ones, or of quantized ones the first tile. Every program computes the norm of x, which takes less time than a
launch.

The order of a sum depends on the weight's size and on the constants, and is not that of other kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import activations
from .prefetching import prefetch

LINE = tl.constexpr(64)  # numbers of 16 bits in a line of the cache
EACH = tl.constexpr(8)  # consecutive numbers of 16 bits that a thread loads at once


@triton.jit
def _factor(x_ptr, eps, COLUMNS: tl.constexpr, COLUMNS_P: tl.constexpr):
    """Return 1 / rms(x)."""
    i = tl.arange(0, COLUMNS_P)
    x = tl.load(x_ptr + i, mask=i < COLUMNS, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 0) / COLUMNS + eps)


@triton.jit
def _normed(x, gain, factor, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Return a number of the norm of x, rounded as in layers._normalized."""
    x *= factor
    if not WIDE:
        x = x.to(DTYPE).to(tl.float32)
    return (x * gain).to(DTYPE).to(tl.float32)


@triton.jit
def _input(x_ptr, gain_ptr, column, live, factor, NORM: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Return columns of x in float32, with NORM those of its norm."""
    x = tl.load(x_ptr + column, mask=live, other=0.0).to(tl.float32)
    if NORM:
        gain = tl.load(gain_ptr + column, mask=live, other=0.0).to(tl.float32)
        x = _normed(x, gain, factor, WIDE, DTYPE)
    return x


@triton.jit
def _finish(
    total, up_total, bias_ptr, residual, out_ptr, n, is_row, rows, scale,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """Store the sums of rows n after the bias, the gate and the residual."""
    if BIAS:
        total += tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32)
        if ACTIVATION != "" and ACTIVATION != "relu2":
            up_total += tl.load(bias_ptr + rows + n, mask=is_row, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        total = activations.gated(total, up_total, ACTIVATION, LIMIT, ALPHA)
    if ADD:
        total = total * scale + residual.to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def multiply(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, gain_ptr, out_ptr, rows, eps, scale,
    COLUMNS: tl.constexpr, COLUMNS_P: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write x @ weight.T to out [rows], rounded once. The grid is (tiles of ROWS rows).

    x: [COLUMNS]; with NORM its RMSNorm is multiplied, with the gain [COLUMNS] and WIDE as in layers.add_norm.
    COLUMNS_P: a power of two >= COLUMNS. A program computes STEP columns at once. The other arguments are those of
    skinny.multiply.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEPS: tl.constexpr = (COLUMNS + STEP - 1) // STEP
    GATED: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    is_row = n < rows
    row_at = weight_ptr + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * COLUMNS
    up_at = row_at + tl.cast(rows, tl.int64) * COLUMNS
    # The weight is no result of a kernel before: the first columns are loaded while this kernel waits, the others come
    # to the cache.
    weight = tl.load(row_at + k[None, :], mask=(k < COLUMNS)[None, :], other=0.0)
    up = weight
    if GATED:
        up = tl.load(up_at + k[None, :], mask=(k < COLUMNS)[None, :], other=0.0)
    if DEPENDENT:
        for step in tl.static_range(1, STEPS):
            line = tl.minimum(step * STEP + LINE * tl.arange(0, STEP // LINE), COLUMNS - 1)[None, :]
            prefetch(row_at + line)
            if GATED:
                prefetch(up_at + line)
        gdc_wait()
        gdc_launch_dependents()
    residual = n
    if ADD:
        residual = tl.load(residual_ptr + n, mask=is_row, other=0.0)
    factor = 1.0
    if NORM:
        factor = _factor(x_ptr, eps, COLUMNS, COLUMNS_P)
    # Sums of what a thread has loaded. Threads add up theirs at the end alone, as they must wait for each other.
    totals = tl.zeros([ROWS, STEP // EACH], tl.float32)
    up_totals = tl.zeros([ROWS, STEP // EACH], tl.float32)
    for step in tl.static_range(STEPS):
        column = step * STEP + k
        live = column < COLUMNS
        if step > 0:
            weight = tl.load(row_at + column[None, :], mask=live[None, :], other=0.0)
            if GATED:
                up = tl.load(up_at + column[None, :], mask=live[None, :], other=0.0)
        x = _input(x_ptr, gain_ptr, column, live, factor, NORM, WIDE, DTYPE)[None, :]
        totals += tl.sum(tl.reshape(weight.to(tl.float32) * x, [ROWS, STEP // EACH, EACH]), 2)
        if GATED:
            up_totals += tl.sum(tl.reshape(up.to(tl.float32) * x, [ROWS, STEP // EACH, EACH]), 2)
    _finish(
        tl.sum(totals, 1), tl.sum(up_totals, 1), bias_ptr, residual, out_ptr, n, is_row, rows, scale,
        BIAS, ADD, ACTIVATION, LIMIT, ALPHA,
    )  # fmt: skip


@triton.jit
def _of_float8(words):
    """Return the four E4M3 numbers of words in float32, by the instruction of newer GPUs for two at a time."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 first, last;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 last, high;
        mov.b32 {a, b}, first;
        mov.b32 {c, d}, last;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
        }""",
        "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _of_bytes(words, middle):
    """Return the four unsigned bytes of words in float32, less a number: each takes the place of the last byte of 2^23,
    which takes less time than converting. middle: 2^23 and the number."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, 0x4B000000, 0x7440;
        prmt.b32 b, $4, 0x4B000000, 0x7441;
        prmt.b32 c, $4, 0x4B000000, 0x7442;
        prmt.b32 d, $4, 0x4B000000, 0x7443;
        sub.f32 $0, a, $5;
        sub.f32 $1, b, $5;
        sub.f32 $2, c, $5;
        sub.f32 $3, d, $5;
        }""",
        "=f,=f,=f,=f,r,f", [words, middle], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _byte(words, place: tl.constexpr, FLOAT: tl.constexpr):
    """Return a signed byte of words in float32; FLOAT: it is E4M3."""
    high = words << (24 - 8 * place)
    if FLOAT:  # the bits go to where a float32 has them, and its exponent has another bias
        return ((high >> 4) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 0x87F00000, 2^120
    else:
        return (high >> 24).to(tl.float32)


@triton.jit
def _numbers(words, half: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, PACKED: tl.constexpr):
    """Return four numbers of words in float32: of 8 bits, or the low or the high halves of bytes, less 8.

    PACKED: by instructions that the interpreter does not have; old GPUs do not have those for floats.
    """
    if BITS == 4:
        halves = (words >> (4 * half)) & 0x0F0F0F0F
        if PACKED:
            return _of_bytes(halves, 8388616.0)
        else:
            a = _byte(halves, 0, False) - 8.0
            b = _byte(halves, 1, False) - 8.0
            c = _byte(halves, 2, False) - 8.0
            d = _byte(halves, 3, False) - 8.0
            return a, b, c, d
    elif PACKED and FLOAT:
        return _of_float8(words)
    elif PACKED:
        return _of_bytes(words ^ -2139062144, 8388736.0)  # 0x80808080
    else:
        return _byte(words, 0, FLOAT), _byte(words, 1, FLOAT), _byte(words, 2, FLOAT), _byte(words, 3, FLOAT)


@triton.jit
def _wide(words, DTYPE: tl.constexpr):
    """Return the two numbers of 16 bits that int32 words hold, in float32."""
    if DTYPE == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        first = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return first, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _four(quads_ptr, at, live, DTYPE: tl.constexpr):
    """Return numbers of 16 bits in float32, which lie four to an int64."""
    quads = tl.load(quads_ptr + at, mask=live, other=0)
    a, b = _wide(quads.to(tl.int32), DTYPE)
    c, d = _wide((quads >> 32).to(tl.int32), DTYPE)
    return a, b, c, d


@triton.jit
def _loaded(
    n, is_row, slices, rows, words_ptr,
    BITS: tl.constexpr, SLICE: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the words of rows n: [ROWS, WORDS] for each chunk."""
    STEP: tl.constexpr = SLICE * BITS // 32  # words of a slice's row
    words = ()
    for chunk in tl.static_range(CHUNKS):
        word = chunk * WORDS + tl.arange(0, WORDS)
        is_there = is_row[:, None] & (word // STEP < slices)[None, :]
        at = (word // STEP).to(tl.int64) * rows * STEP + word % STEP
        words += (tl.load(words_ptr + n[:, None] * STEP + at[None, :], mask=is_there, other=0),)  # type: ignore[assignment]
    return words


@triton.jit
def _summed(
    words, x, n, is_row, slices, rows, scales_ptr, zeros_ptr,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZEROS: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return the products of rows n with x, [ROWS]. words: of `_loaded`. x: for each half of each chunk four times
    [1, WORDS], the columns for the bytes of words."""
    STEP: tl.constexpr = SLICE * BITS // 32
    HALVES: tl.constexpr = 8 // BITS
    PARTS: tl.constexpr = WORDS // 4
    # Sums of what a thread has loaded. Threads add up theirs at the end alone, as they must wait for each other.
    totals = tl.zeros([ROWS, PARTS], tl.float32)
    scale = n
    if not GROUP:
        scale = tl.load(scales_ptr + n, mask=is_row, other=0.0)
    for chunk in tl.static_range(CHUNKS):
        for half in tl.static_range(HALVES):
            own = x[chunk * HALVES + half]
            a, b, c, d = _numbers(words[chunk], half, BITS, FLOAT, PACKED)
            product = a * own[0] + b * own[1] + c * own[2] + d * own[3]
            part = tl.sum(tl.reshape(product, [ROWS, PARTS, 4]), 2)
            if GROUP:
                word = chunk * WORDS + 4 * tl.arange(0, PARTS)
                column = word // STEP * SLICE + half * 4 * STEP + word % STEP * 4
                at = n[:, None] + (column // GROUP)[None, :] * rows
                is_part = is_row[:, None] & (word // STEP < slices)[None, :]
                if ZEROS:
                    zero = tl.load(zeros_ptr + at, mask=is_part, other=0).to(tl.float32)
                    if BITS == 4:
                        zero -= 8.0
                    part -= zero * tl.sum(tl.reshape(own[0] + own[1] + own[2] + own[3], [1, PARTS, 4]), 2)
                part *= tl.load(scales_ptr + at, mask=is_part, other=0.0).to(tl.float32)
            totals += part
    total = tl.sum(totals, 1)
    return total if GROUP else total * scale.to(tl.float32)


@triton.jit
def multiply_quantized(
    x_ptr, quads_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, gains_ptr, out_ptr,
    rows, slices, eps,
    COLUMNS: tl.constexpr, COLUMNS_P: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, ZEROS: tl.constexpr,
    SLICE: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Do as `multiply`, with a weight that is stored as matmul.multiply describes it, in CHUNKS times WORDS words.

    A program keeps x, and computes tiles of ROWS rows one after the other. words: the weight's numbers, as int32.
    quads, gains: x and the gain, whose dtype is that of x, as int64. COLUMNS is a multiple of 4. rows: of the weight;
    with a gate half as many are written. PACKED as in `_numbers`.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = SLICE * BITS // 32
    GATED: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    tile = tl.program_id(0)
    number = tl.arange(0, ROWS)
    # A tile has the gate's and the up projection's row for the same number of the result side by side.
    n = tile * ROWS + number
    is_row = n < rows
    if GATED:
        n = n // 2 + n % 2 * (rows // 2)
    # The weight is no result of a kernel before.
    words = _loaded(n, is_row, slices, rows, words_ptr, BITS, SLICE, WORDS, CHUNKS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    factor = 1.0
    if NORM:
        factor = _factor(x_ptr, eps, COLUMNS, COLUMNS_P)
    x = ()
    for chunk in tl.static_range(CHUNKS):
        for half in tl.static_range(8 // BITS):
            word = chunk * WORDS + tl.arange(0, WORDS)
            column = word // STEP * SLICE + half * 4 * STEP + word % STEP * 4
            live = column < COLUMNS
            a, b, c, d = _four(quads_ptr, column // 4, live, DTYPE)
            if NORM:
                e, f, g, h = _four(gains_ptr, column // 4, live, DTYPE)
                a, b = _normed(a, e, factor, WIDE, DTYPE), _normed(b, f, factor, WIDE, DTYPE)
                c, d = _normed(c, g, factor, WIDE, DTYPE), _normed(d, h, factor, WIDE, DTYPE)
            x += ((a[None, :], b[None, :], c[None, :], d[None, :]),)  # type: ignore[assignment]
    while tile * ROWS < rows:
        bias, residual = n, n
        if BIAS:
            bias = tl.load(bias_ptr + n, mask=is_row, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + n, mask=is_row, other=0.0)
        total = _summed(
            words, x, n, is_row, slices, rows, scales_ptr, zeros_ptr, BITS, FLOAT, ZEROS, SLICE, GROUP, WORDS, CHUNKS,
            ROWS, PACKED,
        )  # fmt: skip
        if BIAS:
            total += bias.to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.reshape(total, [ROWS // 2, 2]))
            at = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
            result = activations.gated(gate, up, ACTIVATION, LIMIT, ALPHA)
            tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=at < rows // 2)
        else:
            if ACTIVATION != "":
                total = activations.gated(total, total, ACTIVATION, LIMIT, ALPHA)
            if ADD:
                total += residual.to(tl.float32)
            tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=is_row)
        tile += tl.num_programs(0)
        n = tile * ROWS + number
        is_row = n < rows
        if GATED:
            n = n // 2 + n % 2 * (rows // 2)
        words = _loaded(n, is_row, slices, rows, words_ptr, BITS, SLICE, WORDS, CHUNKS)
