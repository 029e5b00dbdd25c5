"""Triton kernels of paged attention: `store` or `rotate_store` write keys and values to the cache, `attend` reads them.

A block of the cache holds for each KV head its keys, then its values, and in int8 and fp8 then the scales of both.
Strides count numbers of the tensor that they belong to. Sums are in float32.

`attend` computes the softmax online as in Dao 2023, "FlashAttention-2". Its programs take work items from a list that
the host makes, because it knows the length of every row. A row of one query is split over its context into parts of a
fixed size; the program that finishes the last part adds all of them up in their order, so that the result does not
depend on how many rows a step has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a small float32, ties to even
# int32 numbers per work item; the first item is the header: the number of items, and the blocks per row of the table.
ITEM = tl.constexpr(8)


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
    SCALED: tl.constexpr,
):  # fmt: skip
    """Store one KV head's key and value of one token. Tokens with a negative slot are padding.

    k, v: [tokens, kv_heads, dim]. slots: [tokens] int64. cache: [blocks, kv_heads, BLOCK * (DIM + V_DIM)].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        block = slot // BLOCK
        offset = slot % BLOCK
        share = cache_ptr + block * cache_block + head * cache_head
        d = tl.arange(0, DIM_P)
        e = tl.arange(0, V_DIM_P)
        k = tl.load(k_ptr + token * k_token + head * k_head + d, mask=d < DIM, other=0.0)
        v = tl.load(v_ptr + token * v_token + head * v_head + e, mask=e < V_DIM, other=0.0)
        if SCALED:
            scales = scales_ptr + block * scales_block + head * scales_head + (BLOCK * (DIM + V_DIM) + 3) // 4 + offset
            k, k_scale = _quantized(k.to(tl.float32), cache_ptr.dtype.element_ty)
            v, v_scale = _quantized(v.to(tl.float32), cache_ptr.dtype.element_ty)
            tl.store(scales, k_scale)
            tl.store(scales + BLOCK, v_scale)
        tl.store(share + offset * DIM + d, k, mask=d < DIM)
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
    BLOCK: tl.constexpr, OWN: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, NORM_VALUES: tl.constexpr,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE_TURN: tl.constexpr, PERIOD: tl.constexpr,
    SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate one token's heads of one KV head: queries in place, key and value to the cache.

    qkv: [tokens, (HEADS + OWN * KV_HEADS) * DIM]. OWN: 2: keys and values; 1: keys, which are the values as well before
    they are normalized and rotated; 0: none, so that nothing is stored. q_weight, k_weight: [DIM], used with NORM; WIDE
    as in `_normalized`. With NORM_VALUES a value is divided by its root mean square. The first TURNED numbers of a head
    are rotated, 0: none: number i with i + TURNED / 2, if INTERLEAVED 2 * i with 2 * i + 1; WIDE_TURN as WIDE of
    `_rotated`. positions: [tokens] int64. angles: [positions, 2, TURNED / 2] float32, cosines and sines. With PERIOD
    queries are then multiplied by q_scales[position // PERIOD]. slots, cache and scales as in `store`. GROUP_P >=
    HEADS / KV_HEADS and HALF_P >= DIM / 2 are powers of two. DEPENDENT as in skinny.multiply.

    The numbers of a head keep their order, also in the cache. decoder_layer.py separates alternating ones, which gives
    the same scores; no cache has keys of both.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    PAIRS: tl.constexpr = TURNED // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    i = tl.arange(0, HALF_P)
    live = i < HALF
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
    if TURNED:
        position = tl.load(positions_ptr + token)
        angle = angles_ptr + position * TURNED + i
        cos = tl.load(angle, mask=i < PAIRS, other=1.0)[None, :]
        sin = tl.load(angle + PAIRS, mask=i < PAIRS, other=0.0)[None, :]

    if NORM or TURNED:
        group = tl.arange(0, GROUP_P)[:, None]
        mask = (group < GROUP) & live[None, :]
        q_at = line + (kv_head * GROUP + group) * DIM
        a = tl.load(q_at + a_place[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(q_at + b_place[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            a, b = _normalized(a, b, q_weight_ptr + a_place, q_weight_ptr + b_place, live, eps, DTYPE, DIM, WIDE)
        if TURNED:
            a, b = _rotated(a, b, cos, sin, DTYPE, WIDE_TURN)
            if PERIOD:
                q_scale = tl.load(q_scales_ptr + position // PERIOD).to(tl.float32)
                a = a.to(tl.float32) * q_scale
                b = b.to(tl.float32) * q_scale
        tl.store(q_at + a_place[None, :], a.to(DTYPE), mask=mask)
        tl.store(q_at + b_place[None, :], b.to(DTYPE), mask=mask)

    slot = tl.load(slots_ptr + token)
    if (OWN > 0) & (slot >= 0):
        block = slot // BLOCK
        offset = slot % BLOCK
        one = live[None, :]
        k_at = line + (HEADS + kv_head) * DIM
        c = tl.load(k_at + a_place[None, :], mask=one, other=0.0).to(tl.float32)
        d = tl.load(k_at + b_place[None, :], mask=one, other=0.0).to(tl.float32)
        if NORM:
            c, d = _normalized(c, d, k_weight_ptr + a_place, k_weight_ptr + b_place, live, eps, DTYPE, DIM, WIDE)
        if TURNED:
            c, d = _rotated(c, d, cos, sin, DTYPE, WIDE_TURN)
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


@triton.jit
def _merged(top, total, values, its_top, its_total, its_values):
    """Return the softmax over two parts of a context, each given as its largest score, and its sums of weights and of
    weighted values. A part without scores changes nothing."""
    highest = tl.maximum(top, its_top)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    mine = tl.exp2(top - shift)
    its = tl.exp2(its_top - shift)
    return highest, total * mine + its_total * its, values * mine[:, None] + its_values * its[:, None]


@triton.jit
def _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM: tl.constexpr):
    """Return the softmax over a part that programs have stored, see `_merged`; without scores from `stop` on."""
    valid = valid & (index < stop)
    # Past the first-level cache, which other programs' stores do not reach.
    top = tl.load(weights_ptr + index * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(weights_ptr + index * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
    at = sums_ptr + index[:, None] * V_DIM + e[None, :]
    values = tl.load(at, mask=valid[:, None] & (e < V_DIM)[None, :], other=0.0, cache_modifier=".cg")
    return top, total, values


@triton.jit
def _attended(
    q, position, first, last, begin, end, cache_at, scales_at, table_at, scale, softcap, cache_block, scales_block,
    DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_P: tl.constexpr, V_DIM_P: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SKIP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the softmax of queries [ROWS, DIM_P] over the context from `begin` to `end`, see `_merged`.

    position: [ROWS], of each query; first, last: of the item's queries. cache_at, scales_at: the KV head's share of
    block 0. table_at: the row's blocks. scale is not negative.
    """
    d = tl.arange(0, DIM_P)
    e = tl.arange(0, V_DIM_P)
    t = tl.arange(0, TILE)
    # Scores that are not seen stay -inf even if the scale is rounded to 0.
    factor = LOG2E if SOFTCAP else tl.maximum(scale * LOG2E, 1e-30)
    # All queries see the keys in between.
    seen_begin = begin
    if WINDOW:
        seen_begin = tl.maximum(begin, last - WINDOW + 1)
    seen_end = tl.minimum(end, first + 1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, V_DIM_P], tl.float32)
    for at in range(begin // TILE * TILE, end, TILE):
        # Blocks before the window may be another sequence's, so other keys are loaded instead, and not seen below.
        key = tl.minimum(tl.maximum(at + t, begin), end - 1)
        block = tl.load(table_at + key // BLOCK).to(tl.int64)
        offset = key % BLOCK
        share = cache_at + block * cache_block
        k_at = (share + offset * DIM)[None, :] + d[:, None]
        v_at = (share + BLOCK * DIM + offset * V_DIM)[:, None] + e[None, :]
        k = tl.load(k_at, mask=(d < DIM)[:, None], other=0.0)
        if WIDEN:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
        else:
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SCALED:
            scales = scales_at + block * scales_block + (BLOCK * (DIM + V_DIM) + 3) // 4 + offset
            scores *= tl.load(scales)[None, :]
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))
        if (SKIP == 0) | (at < seen_begin) | (at + TILE > seen_end):
            own = at + t
            seen = (own[None, :] <= position[:, None]) & ((own >= begin) & (own < end))[None, :]
            if WINDOW:
                seen = seen & (own[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1) * factor)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * factor - shift[:, None])  # fused, one instruction multiplies and subtracts
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights = weights * tl.load(scales + BLOCK)[None, :]
        v = tl.load(v_at, mask=(e < V_DIM)[None, :], other=0.0)
        if WIDEN:
            values = values * decay[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            values = tl.dot(weights.to(q.dtype), v.to(q.dtype), values * decay[:, None], input_precision="ieee")
        top = highest
    return top, total, values


@triton.jit
def attend(
    q_ptr, cache_ptr, scales_ptr, table_ptr, work_ptr, starts_ptr, lengths_ptr, out_ptr,
    sums_ptr, weights_ptr, arrived_ptr, sinks_ptr, scale, softcap,
    q_token, q_head, cache_block, cache_head, scales_block, scales_head, out_token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_P: tl.constexpr,
    V_DIM_P: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, UNIFORM: tl.constexpr, SKIP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend causally from the queries of work items, for the KV head of the program.

    q: [tokens, HEADS, DIM]. out: [tokens, HEADS, V_DIM]. table: [rows, blocks]. starts: [rows + 1], a prefix sum.
    lengths: [rows] tokens in the cache, new ones included. work: items of (row, first query, part, number of parts,
    index of the first part among all). SPLIT: tokens per part; 0: rows are not split. An item has QUERIES queries, as
    far as its row has more. sums: [parts, HEADS, V_DIM] and weights: [parts, HEADS, 2] hold the parts' results;
    arrived: [parts, KV_HEADS] counts them and is zero before and after. ROWS >= QUERIES * HEADS // KV_HEADS is the
    height of a tile. UNIFORM: an item with 0 parts is its whole context, in parts that are added up as those of several
    items are, so that a token's sums have one order whatever its row is. SKIP: do not mask the keys of tiles that all
    queries see, which changes no result. WIDEN: multiply in float32, as the interpreter must. DEPENDENT as in
    skinny.multiply.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)  # first, so that programs without items start after those that have one
    count = tl.load(work_ptr)
    table_row = tl.load(work_ptr + 1)
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_P)
    e = tl.arange(0, V_DIM_P)
    head = kv_head * GROUP + m % GROUP
    for item in range(tl.program_id(1), count, tl.num_programs(1)):
        work = work_ptr + (item + 1) * ITEM
        row = tl.load(work)
        first_query = tl.load(work + 1)
        start = tl.load(starts_ptr + row)
        new = tl.load(starts_ptr + row + 1) - start
        length = tl.load(lengths_ptr + row)
        query = first_query + m // GROUP
        valid = (query < new) & (m < QUERIES * GROUP)
        token = (start + query).to(tl.int64)
        q_at = q_ptr + token[:, None] * q_token + head[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        position = length - new + query
        first = length - new + first_query
        begin = 0
        end = tl.minimum(length, first + QUERIES)
        last = end - 1  # the position of the last query
        if WINDOW:
            begin = tl.maximum(0, first - WINDOW + 1)
        cache_at = cache_ptr + kv_head * cache_head
        scales_at = scales_ptr + kv_head * scales_head
        table_at = table_ptr + row.to(tl.int64) * table_row
        if SPLIT:
            part = tl.load(work + 2)
            parts = tl.load(work + 3)
            base = tl.load(work + 4)
            # Parts are counted from the one in which the window begins.
            low = (begin // SPLIT + part) * SPLIT
        if UNIFORM:
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            values = tl.zeros([ROWS, V_DIM_P], tl.float32)
            if parts > 0:
                end = tl.minimum(end, low + SPLIT)
            for since in range(low, end, SPLIT):
                its_top, its_total, its_values = _attended(
                    q, position, first, last, tl.maximum(begin, since), tl.minimum(end, since + SPLIT), cache_at,
                    scales_at, table_at, scale, softcap, cache_block, scales_block, DIM, V_DIM, DIM_P, V_DIM_P,
                    BLOCK, ROWS, TILE, SKIP, WINDOW, SOFTCAP, SCALED, WIDEN,
                )  # fmt: skip
                top, total, values = _merged(top, total, values, its_top, its_total, its_values)
        else:
            if SPLIT:
                begin = tl.maximum(begin, low)
                end = tl.minimum(end, low + SPLIT)
            top, total, values = _attended(
                q, position, first, last, begin, end, cache_at, scales_at, table_at, scale, softcap, cache_block,
                scales_block, DIM, V_DIM, DIM_P, V_DIM_P, BLOCK, ROWS, TILE, SKIP, WINDOW, SOFTCAP, SCALED, WIDEN,
            )  # fmt: skip
        missing = row - row  # parts that have not been stored yet
        if SPLIT:
            if parts > 1:
                index = (base + part).to(tl.int64) * HEADS + head
                tl.store(weights_ptr + index * 2, top, mask=valid)
                tl.store(weights_ptr + index * 2 + 1, total, mask=valid)
                tl.store(
                    sums_ptr + index[:, None] * V_DIM + e[None, :], values,
                    mask=valid[:, None] & (e < V_DIM)[None, :],
                )  # fmt: skip
                tl.debug_barrier()  # all threads have stored before one of them counts the part
                counter = arrived_ptr + base * KV_HEADS + kv_head
                missing = parts - 1 - tl.atomic_add(counter, 1, sem="acq_rel")
                if missing == 0:
                    tl.store(counter, 0)
                    top = tl.full([ROWS], float("-inf"), tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    values = tl.zeros([ROWS, V_DIM_P], tl.float32)
                    # Several are loaded at once, as far as no registers spill: a load takes longer than the sums.
                    AHEAD: tl.constexpr = 1 if ROWS * V_DIM_P > 4096 else 4 if ROWS * V_DIM_P > 1024 else 2
                    stop = (base + parts).to(tl.int64) * HEADS
                    for other in range(0, parts, AHEAD):
                        index = (base + other).to(tl.int64) * HEADS + head
                        a_top, a_total, a_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                        if AHEAD > 1:
                            index += HEADS
                            b_top, b_total, b_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                        if AHEAD > 2:
                            index += HEADS
                            c_top, c_total, c_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                            index += HEADS
                            d_top, d_total, d_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                        top, total, values = _merged(top, total, values, a_top, a_total, a_values)
                        if AHEAD > 1:
                            top, total, values = _merged(top, total, values, b_top, b_total, b_values)
                        if AHEAD > 2:
                            top, total, values = _merged(top, total, values, c_top, c_total, c_values)
                            top, total, values = _merged(top, total, values, d_top, d_total, d_values)
        if missing == 0:
            if SINKS:
                sink = tl.load(sinks_ptr + head, mask=valid, other=0.0) * LOG2E
                highest = tl.maximum(top, sink)
                shift = tl.where(highest == float("-inf"), 0.0, highest)
                decay = tl.exp2(top - shift)
                total = total * decay + tl.exp2(sink - shift)
                values = values * decay[:, None]
            result = values / total[:, None]
            out_at = out_ptr + token[:, None] * out_token + (head * V_DIM)[:, None] + e[None, :]
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (e < V_DIM)[None, :])
