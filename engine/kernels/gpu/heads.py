"""A Triton kernel for products of each head with a weight of its own, of multi-head latent attention.

A program computes a tile of one head's results over all columns, in steps of COLUMNS: so a row's sum has one order,
whatever the number of rows. Tiles have the same size for any number of rows, unless the launch chooses another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .prefetching import prefetch

LINE = tl.constexpr(64)  # numbers of 16 bits in a line of the cache
AHEAD = tl.constexpr(4)  # lines of each row of the weight that are read before


@triton.jit(do_not_specialize=["tokens"])
def multiply(
    x_ptr, weight_ptr, out_ptr, tokens, x_token, x_head, out_token, out_head,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write weight[h] @ x[t, h] to out[t, h], rounded once. The grid is (tiles of rows, heads, tiles of tokens).

    x: [tokens, heads, WIDTH] and out: [tokens, heads, SIZE], whose tokens and heads may have any strides. weight:
    [heads, SIZE, WIDTH], contiguous. WIDEN: multiply in float32, as the interpreter must. DEPENDENT as in
    skinny.multiply.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if WIDEN else DTYPE
    EVEN: tl.constexpr = WIDTH % COLUMNS == 0
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, COLUMNS)
    is_row, is_token = n < SIZE, m < tokens
    weight_at = weight_ptr + head * (SIZE * WIDTH) + n[None, :] * WIDTH + k[:, None]
    if DEPENDENT:
        # The weight is not a result of an earlier kernel: its first columns are prefetched while this kernel waits.
        ahead = weight_ptr + head * (SIZE * WIDTH) + tl.minimum(n, SIZE - 1) * WIDTH
        prefetch(ahead[:, None] + tl.minimum(LINE * tl.arange(0, AHEAD), WIDTH - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_token + head * x_head + k[None, :]
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for column in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + column, mask=is_token[:, None], other=0.0).to(WIDE)
            weight = tl.load(weight_at + column, mask=is_row[None, :], other=0.0).to(WIDE)
        else:
            left = k < WIDTH - column
            x = tl.load(x_at + column, mask=is_token[:, None] & left[None, :], other=0.0).to(WIDE)
            weight = tl.load(weight_at + column, mask=is_row[None, :] & left[:, None], other=0.0).to(WIDE)
        total = tl.dot(x, weight, total, input_precision="ieee")
    out_at = out_ptr + m.to(tl.int64)[:, None] * out_token + head * out_head + n[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])
