"""Triton kernels for weights in fp8 (E4M3) with x in fp8, too: x in fp8, and x @ weight.T.

Each GROUP columns of a row of x share a scale, as in DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3: the
largest number of them becomes the largest of E4M3. Matrix units multiply the numbers of a group as they are stored, and
its sum is multiplied by both scales in float32. Nothing is converted, and weights are read at half the size of 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .prefetching import prefetch

GROUP = tl.constexpr(128)  # columns
LARGEST = tl.constexpr(448.0)  # of E4M3
LINE = tl.constexpr(128)  # bytes of a line of the cache
AHEAD = tl.constexpr(4)  # lines of a row of the weight that are read before the kernel before has ended


@triton.jit(do_not_specialize=["tokens", "padded"])
def quantize(
    x_ptr, numbers_ptr, scales_ptr, tokens, padded, columns, x_token, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Write x [tokens, columns] in fp8 to numbers [padded, columns], and its scales to scales [groups, padded].

    The grid is (tiles of TOKENS tokens, groups). Rows past the last token are zeros. columns is a multiple of GROUP.
    """
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    is_token = (m < tokens)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + m.to(tl.int64)[:, None] * x_token + column[None, :], mask=is_token, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    found = (x / scale[:, None]).to(numbers_ptr.dtype.element_ty)
    is_row = (m < padded)[:, None] & (column < columns)[None, :]
    tl.store(numbers_ptr + m.to(tl.int64)[:, None] * columns + column[None, :], found, mask=is_row)
    tl.store(scales_ptr + group * padded + m, scale, mask=m < padded)


@triton.jit(do_not_specialize=["tokens", "padded"])
def multiply(
    x_ptr, x_scales_ptr, numbers_ptr, scales_ptr, bias_ptr, out_ptr, sums_ptr, arrived_ptr,
    tokens, padded, rows, columns, out_token,
    BLOCKED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write x @ weight.T + bias to out [tokens, rows], rounded once; a program computes a tile, or a part of its sum.

    The grid is (tiles of ROWS rows, parts, tiles of TOKENS tokens). x and x_scales: of `quantize`. numbers: [rows,
    columns]. scales: BLOCKED [groups, rows], of which those of GROUP rows are the same; else [rows]. Parts are
    consecutive groups, and the last one to arrive adds up all in their order. sums: [parts, tokens, rows] float32.
    arrived: an int32 per tile, zero before and after. WIDEN: multiply in float32, as the interpreter must.

    The transpose of the result is computed: the rows of the weight are the larger side of a tile.
    """
    tile = tl.program_id(0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    n = tile * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, GROUP)
    # Rows and tokens that there are not are computed as the last ones, and not stored.
    row, token = tl.minimum(n, rows - 1), tl.minimum(m, tokens - 1)
    groups = columns // GROUP
    share = tl.cdiv(groups, parts)
    first, last = part * share, tl.minimum(part * share + share, groups)
    weight_at = numbers_ptr + row.to(tl.int64)[:, None] * columns + first * GROUP + k[None, :]
    if DEPENDENT:
        byte = tl.minimum(first * GROUP + LINE * tl.arange(0, AHEAD), columns - 1)
        prefetch(numbers_ptr + row.to(tl.int64)[:, None] * columns + byte[None, :])
        gdc_wait()
        gdc_launch_dependents()
    x_at = x_ptr + token.to(tl.int64)[None, :] * columns + first * GROUP + k[:, None]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for group in tl.range(first, last, num_stages=STAGES):
        weight = tl.load(weight_at)
        x = tl.load(x_at)
        scale = tl.load(x_scales_ptr + group * padded + token)
        if BLOCKED:
            scale *= tl.load(scales_ptr + group * rows + tile * ROWS)
        weight_at += GROUP
        x_at += GROUP
        if WIDEN:
            product = tl.dot(weight.to(tl.float32), x.to(tl.float32), input_precision="ieee")
        else:
            product = tl.dot(weight, x)
        total += product * scale[None, :]
    if not BLOCKED:
        total *= tl.load(scales_ptr + row)[:, None]
    is_in = (n < rows)[:, None] & (m < tokens)[None, :]
    missing = part - part  # parts that have not been stored yet
    if parts > 1:
        sum_at = sums_ptr + m.to(tl.int64)[None, :] * rows + n[:, None]
        tl.store(sum_at + part.to(tl.int64) * tokens * rows, total, mask=is_in)
        tl.debug_barrier()  # all threads have stored before one of them counts the part
        counter = arrived_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        missing = parts - 1 - tl.atomic_add(counter, 1, sem="acq_rel")
        if missing == 0:
            tl.store(counter, 0)
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for _ in range(0, parts):
                # Past the first-level cache, which other programs' stores do not reach.
                total += tl.load(sum_at, mask=is_in, other=0.0, cache_modifier=".cg")
                sum_at += tokens * rows
    if missing == 0:
        total += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        out_at = out_ptr + m.to(tl.int64)[None, :] * out_token + n[:, None]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_in)
