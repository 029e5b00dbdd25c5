"""Triton kernels of a decoder layer beside its products and attention: norms with the residual add, and gates.

A program computes one row, or a part of one, in float32. The order of a row's sum depends only on its size, so a row
has the same bits in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import activations, segments


@triton.jit
def _normalized(
    x, weight_ptr, i, live, eps,
    SIZE: tl.constexpr, WIDE: tl.constexpr, CENTERED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the RMSNorm of a row of float32 numbers, rounded as norms.RMSNorm does: to DTYPE before and after it is
    multiplied by its weight, with WIDE only after. With CENTERED it is a LayerNorm."""
    if CENTERED:
        x = tl.where(live, x - tl.sum(x, 0) / SIZE, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + i, mask=live, other=0.0).to(tl.float32)
    x *= factor
    if not WIDE:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight).to(DTYPE)


@triton.jit
def add_norm(
    x_ptr, added_ptr, after_ptr, scale_ptr, weight_ptr, normed_ptr, eps,
    SIZE: tl.constexpr, SIZE_P: tl.constexpr, ROW: tl.constexpr, ADD: tl.constexpr, AFTER: tl.constexpr,
    SCALE: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, CENTERED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """With ADD add a row of `added` to x in place, with AFTER its norm, and with SCALE multiply the sum by the number
    `scale`; with NORM write the norm of x to `normed`.

    x, added, normed: [rows, SIZE] of one dtype, each row ROW numbers after the one before. normed may be x. after,
    weight: [SIZE], of the norms, which are as in `_normalized`. The sum is rounded once to the dtype, and so is its
    multiple. SIZE_P: a power of two >= SIZE. DEPENDENT as in skinny.multiply.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    i = tl.arange(0, SIZE_P)
    live = i < SIZE
    at = tl.program_id(0).to(tl.int64) * ROW + i
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(added_ptr + at, mask=live, other=0.0).to(tl.float32)
        if AFTER:
            added = _normalized(added, after_ptr, i, live, eps, SIZE, WIDE, CENTERED, DTYPE).to(tl.float32)
        total = (x + added).to(DTYPE)
        if SCALE:
            total = (total.to(tl.float32) * tl.load(scale_ptr).to(tl.float32)).to(DTYPE)
        tl.store(x_ptr + at, total, mask=live)
        x = total.to(tl.float32)
    if NORM:
        normed = _normalized(x, weight_ptr, i, live, eps, SIZE, WIDE, CENTERED, DTYPE)
        tl.store(normed_ptr + at, normed, mask=live)


@triton.jit
def gate(
    gate_up_ptr, out_ptr,
    INNER: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write activation(gate) * up, rounded once, for TILE numbers of a row.

    gate_up: [rows, 2 * INNER], the gate first. out: [rows, INNER]. Both are contiguous. ACTIVATION as in config.json,
    or "clamped", see activations.gated; with "relu2" there is no gate, and gate_up is [rows, INNER]. DEPENDENT as in
    skinny.multiply.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = i < INNER
    GATED: tl.constexpr = ACTIVATION != "relu2"
    gate_at = gate_up_ptr + row * (2 * INNER if GATED else INNER) + i
    x = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    up = x
    if GATED:
        up = tl.load(gate_at + INNER, mask=live, other=0.0).to(tl.float32)
    result = activations.gated(x, up, ACTIVATION, LIMIT, ALPHA)
    tl.store(out_ptr + row * INNER + i, result.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def gate_heads(
    seen_ptr, gates_ptr, gates_token, gates_head,
    NUMBERS: tl.constexpr, DIM: tl.constexpr, PER_HEAD: tl.constexpr, SOFTPLUS: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply TILE numbers of what a token's heads have seen by the sigmoids of their gates, in place; SOFTPLUS: by
    the softplus.

    seen: [tokens, NUMBERS], contiguous; a head has DIM of them. gates: of each head DIM numbers, or PER_HEAD a single
    one; `gates_token` and `gates_head` are the strides of tokens and heads. The gate and the product are rounded, as in
    torch. DEPENDENT as in skinny.multiply.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    DTYPE: tl.constexpr = seen_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = i < NUMBERS
    gate_at = gates_ptr + token * gates_token + i // DIM * gates_head + (0 if PER_HEAD else i % DIM)
    x = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    factor = segments.softplus(x) if SOFTPLUS else 1.0 / (1.0 + tl.exp(-x))
    factor = factor.to(DTYPE).to(tl.float32)
    seen_at = seen_ptr + token * NUMBERS + i
    seen = tl.load(seen_at, mask=live, other=0.0).to(tl.float32)
    tl.store(seen_at, (seen * factor).to(DTYPE), mask=live)
