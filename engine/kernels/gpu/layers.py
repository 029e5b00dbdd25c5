"""Triton kernels of a decoder layer beside its products and attention: RMSNorm with the residual add, and the gate.

A program computes one row, or a part of one, in float32. The order of a row's sum depends only on its size, so a row
has the same bits in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import activations


@triton.jit
def add_norm(
    x_ptr, added_ptr, weight_ptr, normed_ptr, eps,
    SIZE: tl.constexpr, SIZE_P: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the RMSNorm of a row of x to `normed`. With ADD, first add a row of `added` to x in place.

    x, added, normed: [rows, SIZE], contiguous, of one dtype. weight: [SIZE]. The sum is rounded once to the dtype; the
    norm is rounded before and after it is multiplied by its weight, as in torch. SIZE_P: a power of two >= SIZE.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    i = tl.arange(0, SIZE_P)
    live = i < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(added_ptr + at, mask=live, other=0.0).to(tl.float32)).to(DTYPE)
        tl.store(x_ptr + at, total, mask=live)
        x = total.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + i, mask=live, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, ((x * factor).to(DTYPE).to(tl.float32) * weight).to(DTYPE), mask=live)


@triton.jit
def gate(gate_up_ptr, out_ptr, INNER: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Write activation(gate) * up, rounded once, for TILE numbers of a row.

    gate_up: [rows, 2 * INNER], the gate first. out: [rows, INNER]. Both are contiguous. ACTIVATION as in config.json.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = i < INNER
    gate_at = gate_up_ptr + row * (2 * INNER) + i
    x = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_at + INNER, mask=live, other=0.0).to(tl.float32)
    x = activations.activated(x, ACTIVATION)
    tl.store(out_ptr + row * INNER + i, (x * up).to(out_ptr.dtype.element_ty), mask=live)
