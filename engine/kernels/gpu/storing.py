"""Triton kernels that write keys and values to a paged cache: `store`, or `rotate_store` after norms and rotation.

attention.py documents the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a small float32, ties to even


@triton.jit
def _scales(top, nans, DTYPE: tl.constexpr):
    """Return what to multiply a vector by before it is rounded to a cache's DTYPE, and its scale.

    `top` is its largest magnitude except NaN, and `nans` the number of NaN. The results are those of
    engine.attention.reference.quantize.
    """
    LARGEST: tl.constexpr = 127.0 if DTYPE == tl.int8 else 448.0
    small = top < LARGEST * 1.1754943508222875e-38
    finite = (top < float("inf")) & (nans == 0)
    inverse = tl.where(small | (finite == 0), 0.0, tl.div_rn(LARGEST, top))
    scale = tl.where(small, 0.0, tl.div_rn(top, LARGEST))
    return inverse, tl.where(finite, scale, float("nan"))


@triton.jit
def _rounded(x, inverse, DTYPE: tl.constexpr):
    """Return a vector as numbers of a cache's DTYPE."""
    x = x * inverse
    x = tl.where(x == x, x, 0.0)
    if DTYPE == tl.int8:
        x = x + ROUND - ROUND
    return x.to(DTYPE)


@triton.jit
def _quantized(x, DTYPE: tl.constexpr):
    """Return a vector as numbers of a cache's DTYPE, and their scale."""
    inverse, scale = _scales(tl.max(tl.abs(x), 0), tl.sum((x != x).to(tl.int32), 0), DTYPE)
    return _rounded(x, inverse, DTYPE), scale


@triton.jit
def store(
    k_ptr, v_ptr, slots_ptr, cache_ptr, scales_ptr,
    k_token, k_head, v_token, v_head, cache_block, cache_head, scales_block, scales_head,
    DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_P: tl.constexpr, V_DIM_P: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store one KV head's key and value of one token. Tokens with a negative slot are padding.

    k, v: [tokens, kv_heads, dim]. slots: [tokens] int64. cache: [blocks, kv_heads, BLOCK * (DIM + V_DIM)]. V_DIM: 0 if
    values are in the keys, so that they are not stored. DEPENDENT as in skinny.multiply.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if slot >= 0:
        block = slot // BLOCK
        offset = slot % BLOCK
        share = cache_ptr + block * cache_block + head * cache_head
        scales = scales_ptr + block * scales_block + head * scales_head + (BLOCK * (DIM + V_DIM) + 3) // 4 + offset
        d = tl.arange(0, DIM_P)
        k = tl.load(k_ptr + token * k_token + head * k_head + d, mask=d < DIM, other=0.0)
        if SCALED:
            k, k_scale = _quantized(k.to(tl.float32), cache_ptr.dtype.element_ty)
            tl.store(scales, k_scale)
        tl.store(share + offset * DIM + d, k, mask=d < DIM)
        if V_DIM:
            e = tl.arange(0, V_DIM_P)
            v = tl.load(v_ptr + token * v_token + head * v_head + e, mask=e < V_DIM, other=0.0)
            if SCALED:
                v, v_scale = _quantized(v.to(tl.float32), cache_ptr.dtype.element_ty)
                tl.store(scales + BLOCK, v_scale)
            tl.store(share + BLOCK * DIM + offset * V_DIM + e, v, mask=e < V_DIM)


@triton.jit
def _inverse_root(a, b, eps, DIM: tl.constexpr):
    """Return 1 / the root mean square of heads [heads, DIM] in halves: [heads, 1]."""
    return 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]


@triton.jit
def _normalized(a, b, a_weight_at, b_weight_at, live, eps, DTYPE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Return the RMSNorm of heads [heads, DIM] in halves, rounded before and after the weight as in torch; with WIDE
    only after."""
    factor = _inverse_root(a, b, eps, DIM)
    first = tl.load(a_weight_at, mask=live, other=0.0).to(tl.float32)[None, :]
    second = tl.load(b_weight_at, mask=live, other=0.0).to(tl.float32)[None, :]
    a *= factor
    b *= factor
    if not WIDE:
        a = a.to(DTYPE).to(tl.float32)
        b = b.to(DTYPE).to(tl.float32)
    return (a * first).to(DTYPE).to(tl.float32), (b * second).to(DTYPE).to(tl.float32)


@triton.jit
def _rotated(a, b, cos, sin, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Return the rotation of heads in halves; each product is rounded, as in torch, with WIDE only their sum."""
    if WIDE:
        return (a * cos - b * sin).to(DTYPE), (b * cos + a * sin).to(DTYPE)
    first = (a * cos).to(DTYPE).to(tl.float32) - (b * sin).to(DTYPE).to(tl.float32)
    second = (b * cos).to(DTYPE).to(tl.float32) + (a * sin).to(DTYPE).to(tl.float32)
    return first.to(DTYPE), second.to(DTYPE)


@triton.jit
def _store_halves(a, b, a_at, b_at, scale_at, mask, SCALED: tl.constexpr):
    """Store one head [1, DIM] in halves."""
    if SCALED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        nans = tl.sum((a != a).to(tl.int32), 1) + tl.sum((b != b).to(tl.int32), 1)
        DTYPE: tl.constexpr = a_at.dtype.element_ty
        inverse, scale = _scales(tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)), nans, DTYPE)
        tl.store(scale_at + tl.arange(0, 1), scale)
        a = _rounded(a, inverse[:, None], DTYPE)
        b = _rounded(b, inverse[:, None], DTYPE)
    tl.store(a_at, a, mask=mask)
    tl.store(b_at, b, mask=mask)


@triton.jit
def rotate_store(
    qkv_ptr, q_weight_ptr, k_weight_ptr, positions_ptr, angles_ptr, q_scales_ptr, slots_ptr, cache_ptr, scales_ptr, eps,
    qkv_token, cache_block, cache_head, scales_block, scales_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP_P: tl.constexpr, HALF_P: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr, OWN: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr,
    TURN_FIRST: tl.constexpr, NORM_VALUES: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDE_TURN: tl.constexpr, PERIOD: tl.constexpr, SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate one token's heads of one KV head: queries in place, key and value to the cache.

    qkv: [tokens, (HEADS + OWN * KV_HEADS) * DIM]; if GATED each query is followed by a gate of the same size, which
    stays as it is. OWN: 2: keys and values; 1: keys, which are the values as well before they are normalized and
    rotated; 0: none, so that nothing is stored. q_weight, k_weight: [DIM], used with NORM; WIDE as in `_normalized`.
    With TURN_FIRST heads are rotated before they are normalized. With NORM_VALUES a value is divided by its root mean
    square. The first TURNED numbers of a head are rotated, 0: none: number i with i + TURNED / 2, if INTERLEAVED 2 * i
    with 2 * i + 1; WIDE_TURN as WIDE of `_rotated`. positions: [tokens] int64. angles: [positions, 2, TURNED / 2]
    float32, cosines and sines. With PERIOD queries are then multiplied by q_scales[position // PERIOD]. slots, cache
    and scales as in `store`. GROUP_P >= HEADS / KV_HEADS and HALF_P >= DIM / 2 are powers of two. DEPENDENT as in
    skinny.multiply.

    The numbers of a head keep their order, also in the cache. decoder_layer.py separates alternating ones, which gives
    the same scores; no cache has keys of both.
    """
    tl.static_assert(not (TURN_FIRST and PERIOD), "queries are scaled before they are normalized")
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    PAIRS: tl.constexpr = TURNED // 2
    QUERY: tl.constexpr = 2 * DIM if GATED else DIM
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    i = tl.arange(0, HALF_P)
    live = i < HALF
    # The step's inputs were there before its first kernel began, and the angles before that.
    if TURNED:
        position = tl.load(positions_ptr + token)
        angle = angles_ptr + position * TURNED + i
        cos = tl.load(angle, mask=i < PAIRS, other=1.0)[None, :]
        sin = tl.load(angle + PAIRS, mask=i < PAIRS, other=0.0)[None, :]
        if PERIOD:
            q_scale = tl.load(q_scales_ptr + position // PERIOD).to(tl.float32)
    slot = tl.load(slots_ptr + token)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    # The places in a head of the two numbers of pair i; pairs that are not rotated follow those that are.
    if INTERLEAVED:
        a_place = 2 * i
        b_place = a_place + 1
    elif TURNED == 0 or TURNED == DIM:
        a_place = i
        b_place = i + HALF
    else:
        a_place = i + tl.where(i < PAIRS, 0, PAIRS)
        b_place = i + tl.where(i < PAIRS, PAIRS, HALF)
    line = qkv_ptr + token * qkv_token

    if NORM or TURNED:
        group = tl.arange(0, GROUP_P)[:, None]
        mask = (group < GROUP) & live[None, :]
        q_at = line + (kv_head * GROUP + group) * QUERY
        a = tl.load(q_at + a_place[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(q_at + b_place[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM and not TURN_FIRST:
            a, b = _normalized(a, b, q_weight_ptr + a_place, q_weight_ptr + b_place, live, eps, DTYPE, DIM, WIDE)
        if TURNED:
            a, b = _rotated(a, b, cos, sin, DTYPE, WIDE_TURN)
            if PERIOD:
                a = a.to(tl.float32) * q_scale
                b = b.to(tl.float32) * q_scale
        if NORM and TURN_FIRST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
            a, b = _normalized(a, b, q_weight_ptr + a_place, q_weight_ptr + b_place, live, eps, DTYPE, DIM, WIDE)
        tl.store(q_at + a_place[None, :], a.to(DTYPE), mask=mask)
        tl.store(q_at + b_place[None, :], b.to(DTYPE), mask=mask)

    if (OWN > 0) & (slot >= 0):
        block = slot // BLOCK
        offset = slot % BLOCK
        one = live[None, :]
        k_at = line + HEADS * QUERY + kv_head * DIM
        c = tl.load(k_at + a_place[None, :], mask=one, other=0.0).to(tl.float32)
        d = tl.load(k_at + b_place[None, :], mask=one, other=0.0).to(tl.float32)
        if NORM and not TURN_FIRST:
            c, d = _normalized(c, d, k_weight_ptr + a_place, k_weight_ptr + b_place, live, eps, DTYPE, DIM, WIDE)
        if TURNED:
            c, d = _rotated(c, d, cos, sin, DTYPE, WIDE_TURN)
        if NORM and TURN_FIRST:
            c = c.to(tl.float32)
            d = d.to(tl.float32)
            c, d = _normalized(c, d, k_weight_ptr + a_place, k_weight_ptr + b_place, live, eps, DTYPE, DIM, WIDE)
        v_at = k_at + (OWN - 1) * KV_HEADS * DIM + i[None, :]
        e = tl.load(v_at, mask=one, other=0.0)
        f = tl.load(v_at + HALF, mask=one, other=0.0)
        if NORM_VALUES:
            e = e.to(tl.float32)
            f = f.to(tl.float32)
            factor = _inverse_root(e, f, eps, DIM)
            e = (e * factor).to(DTYPE)
            f = (f * factor).to(DTYPE)
        share = cache_ptr + block * cache_block + kv_head * cache_head + offset * DIM
        scales = scales_ptr + block * scales_block + kv_head * scales_head + (BLOCK * 2 * DIM + 3) // 4 + offset
        _store_halves(
            c.to(DTYPE), d.to(DTYPE), share + a_place[None, :], share + b_place[None, :], scales, one, SCALED
        )  # fmt: skip
        share += BLOCK * DIM + i[None, :]
        _store_halves(e, f, share, share + HALF, scales + BLOCK, one, SCALED)
