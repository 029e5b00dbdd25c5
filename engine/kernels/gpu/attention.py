"""The Triton kernel of paged attention, `attend`; storing.py has those that write keys and values to the cache.

A block of the cache holds for each KV head its keys, then its values, and in int8 and fp8 then the scales of both. If
values are the first numbers of keys, as in multi-head latent attention, it holds keys and their scales alone, and a
tile of keys that has been loaded is the tile of values as well.
Strides count numbers of the tensor that they belong to. Sums are in float32.

`attend` computes the softmax online as in Dao 2023, "FlashAttention-2". Its programs take work items from a list that
the host makes, because it knows the length of every row. A row of one query is split over its context into parts of one
size; the program that finishes the last part adds all of them up in their order. So the result of a row depends on the
other rows of a step only as far as they decide that size (their number, and contexts of more than 65,536 tokens, see
gpu_plan.py) and the kernel's constants, see attend_shape.

Keys that are slightly wider than a power of two, as the 512 + 64 numbers of multi-head latent attention, are multiplied
in two tiles: one of 1,024 would be padding for nearly half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .prefetching import prefetch, prefetch_near

LOG2E = tl.constexpr(1.4426950408889634)
# int32 numbers per work item; the first item is the header: the number of items, the blocks per row of the table, and
# the tokens of a part.
ITEM = tl.constexpr(8)
LINE = tl.constexpr(64)  # numbers of 16 bits in a line of the cache
EQUAL = tl.constexpr(16)  # columns of a sum of weights that is computed as a product: the fewest that one has
AHEAD = tl.constexpr(8)  # blocks of a part whose keys and values are prefetched


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
def _masked(scores, own, position, begin, end, WINDOW: tl.constexpr):
    """Return scores with -inf where a query does not see a key; own: the positions of the keys."""
    seen = (own[None, :] <= position[:, None]) & ((own >= begin) & (own < end))[None, :]
    if WINDOW:
        seen = seen & (own[None, :] > position[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _tile(
    top, total, values, q, q_rest, position, begin, end, seen_begin, seen_end, at, cache_at, scales_at, table_at, scale,
    factor, softcap, cache_block, scales_block, DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_P: tl.constexpr,
    REST: tl.constexpr, V_DIM_P: tl.constexpr, IN_KEYS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, WIDEN: tl.constexpr, UNIFORM: tl.constexpr,
    MASKED: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """Return the softmax with TILE keys more, from `at` on. MASKED: not all queries see all of them; with BRANCH only
    if not all are between `seen_begin` and `seen_end`, which all queries see. UNIFORM: total is [ROWS, EQUAL]."""
    d = tl.arange(0, DIM_P)
    e = tl.arange(0, V_DIM_P)
    t = tl.arange(0, TILE)
    key = at + t
    if MASKED:
        # Blocks before the window may be another sequence's, so other keys are loaded instead, and not seen below.
        key = tl.minimum(tl.maximum(key, begin), end - 1)
    block = tl.load(table_at + key // BLOCK).to(tl.int64)
    offset = key % BLOCK
    share = cache_at + block * cache_block
    k_at = (share + offset * DIM)[:, None] + d[None, :]
    # With heads of one size, the addresses of values are those of keys plus a constant, which takes no instructions.
    v_at = k_at + BLOCK * DIM if DIM == V_DIM else (share + BLOCK * DIM + offset * V_DIM)[:, None] + e[None, :]
    k = tl.load(k_at) if DIM >= DIM_P else tl.load(k_at, mask=(d < DIM)[None, :], other=0.0)
    if WIDEN:
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if REST:
        r = DIM_P + tl.arange(0, REST)
        rest_at = (share + offset * DIM)[:, None] + r[None, :]
        rest = tl.load(rest_at) if DIM == DIM_P + REST else tl.load(rest_at, mask=(r < DIM)[None, :], other=0.0)
        if WIDEN:
            scores = tl.dot(q_rest.to(tl.float32), tl.trans(rest.to(tl.float32)), scores, input_precision="ieee")
        else:
            scores = tl.dot(q_rest, tl.trans(rest.to(q.dtype)), scores, input_precision="ieee")
    if SCALED:
        scales = scales_at + block * scales_block + (BLOCK * (DIM + (0 if IN_KEYS else V_DIM)) + 3) // 4 + offset
        key_scales = tl.load(scales)
        scores *= key_scales[None, :]
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))
    if BRANCH:
        if (at < seen_begin) | (at + TILE > seen_end):
            scores = _masked(scores, at + t, position, begin, end, WINDOW)
    elif MASKED:
        scores = _masked(scores, at + t, position, begin, end, WINDOW)
    highest = tl.maximum(top, tl.max(scores, 1) * factor)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores * factor - shift[:, None])  # fused, one instruction multiplies and subtracts
    decay = tl.exp2(top - shift)
    if UNIFORM:
        # A product adds up in one order in all tiles. The order of tl.sum is that in which a tile lies in threads.
        ones = tl.full([TILE, EQUAL], 1.0, tl.float32 if WIDEN else q.dtype)
        total = tl.dot(weights.to(ones.dtype), ones, total * decay[:, None], input_precision="ieee")
    else:
        total = total * decay + tl.sum(weights, 1)
    NARROW: tl.constexpr = SCALED and q.dtype == tl.float16
    if SCALED:
        own = key_scales if IN_KEYS else tl.load(scales + BLOCK)
        if NARROW:
            # A weight times a scale may be less than the least number of float16, so the largest scale of the tile is
            # multiplied by afterwards. bfloat16 has the range of float32.
            most = tl.max(own, 0)
            most = tl.where(most > 0.0, most, 1.0)
            own = own / most
        weights = weights * own[None, :]
    v_live = (e < V_DIM)[None, :]
    v = k if IN_KEYS else tl.load(v_at) if V_DIM == V_DIM_P else tl.load(v_at, mask=v_live, other=0.0)
    if WIDEN:
        added = tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        values = values * decay[:, None] + (added * most if NARROW else added)
    elif NARROW:
        added = tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        values = values * decay[:, None] + added * most
    else:
        values = tl.dot(weights.to(q.dtype), v.to(q.dtype), values * decay[:, None], input_precision="ieee")
    return highest, total, values


@triton.jit
def _attended(
    q, q_rest, position, first, last, begin, end, cache_at, scales_at, table_at, scale, softcap, cache_block,
    scales_block, DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_P: tl.constexpr, REST: tl.constexpr,
    V_DIM_P: tl.constexpr, IN_KEYS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SKIP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, WIDEN: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """Return the softmax of queries [ROWS, DIM_P] and the rest of their numbers [ROWS, REST] over the context from
    `begin` to `end`, see `_merged`.

    position: [ROWS], of each query; first, last: of the item's queries. cache_at, scales_at: the KV head's share of
    block 0. table_at: the row's blocks. scale is not negative. With SKIP of 2 and no WINDOW, begin is a multiple of
    TILE.
    """
    # Scores that are not seen stay -inf even if the scale is rounded to 0.
    factor = LOG2E if SOFTCAP else tl.maximum(scale * LOG2E, 1e-30)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, EQUAL] if UNIFORM else [ROWS], tl.float32)
    values = tl.zeros([ROWS, V_DIM_P], tl.float32)
    since = begin // TILE * TILE
    # All queries see the keys in between.
    seen_begin = begin
    if WINDOW:
        seen_begin = tl.maximum(begin, last - WINDOW + 1)
    seen_end = tl.minimum(end, first + 1)
    if SKIP == 2:
        # Three ranges: keys that not all windows have, keys that all queries see, and the rest. The one in the middle,
        # usually the longest, needs no masks.
        seen = tl.maximum(since, seen_end // TILE * TILE)
        if WINDOW:
            head = tl.minimum(tl.cdiv(seen_begin, TILE) * TILE, seen)
            for at in tl.range(since, head, TILE, num_stages=1):
                top, total, values = _tile(
                    top, total, values, q, q_rest, position, begin, end, seen_begin, seen_end, at, cache_at, scales_at,
                    table_at, scale, factor, softcap, cache_block, scales_block, DIM, V_DIM, DIM_P, REST, V_DIM_P,
                    IN_KEYS, BLOCK, TILE, WINDOW, SOFTCAP, SCALED, WIDEN, UNIFORM, True, False,
                )  # fmt: skip
            since = head
        for at in range(since, seen, TILE):
            top, total, values = _tile(
                top, total, values, q, q_rest, position, begin, end, seen_begin, seen_end, at, cache_at, scales_at,
                table_at, scale, factor, softcap, cache_block, scales_block, DIM, V_DIM, DIM_P, REST, V_DIM_P,
                IN_KEYS, BLOCK, TILE, WINDOW, SOFTCAP, SCALED, WIDEN, UNIFORM, False, False,
            )  # fmt: skip
        for at in tl.range(seen, end, TILE, num_stages=1):
            top, total, values = _tile(
                top, total, values, q, q_rest, position, begin, end, seen_begin, seen_end, at, cache_at, scales_at,
                table_at, scale, factor, softcap, cache_block, scales_block, DIM, V_DIM, DIM_P, REST, V_DIM_P,
                IN_KEYS, BLOCK, TILE, WINDOW, SOFTCAP, SCALED, WIDEN, UNIFORM, True, False,
            )  # fmt: skip
    else:
        for at in range(since, end, TILE):
            top, total, values = _tile(
                top, total, values, q, q_rest, position, begin, end, seen_begin, seen_end, at, cache_at, scales_at,
                table_at, scale, factor, softcap, cache_block, scales_block, DIM, V_DIM, DIM_P, REST, V_DIM_P,
                IN_KEYS, BLOCK, TILE, WINDOW, SOFTCAP, SCALED, WIDEN, UNIFORM, True, SKIP == 1,
            )  # fmt: skip
    return top, tl.max(total, 1) if UNIFORM else total, values


@triton.jit
def attend(
    q_ptr, cache_ptr, scales_ptr, table_ptr, work_ptr, starts_ptr, lengths_ptr, out_ptr,
    sums_ptr, weights_ptr, arrived_ptr, sinks_ptr, scale, softcap,
    q_token, q_head, cache_block, cache_head, scales_block, scales_head, out_token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARING: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    DIM_P: tl.constexpr, REST: tl.constexpr, V_DIM_P: tl.constexpr, IN_KEYS: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTED: tl.constexpr, UNIFORM: tl.constexpr,
    SKIP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
    WIDEN: tl.constexpr, NEAR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend causally from the queries of work items, for the KV head of the program, or for some of the query heads
    that share it.

    q: [tokens, HEADS, DIM]. out: [tokens, HEADS, V_DIM]. table: [rows, blocks]. starts: [rows + 1], a prefix sum.
    lengths: [rows] tokens in the cache, new ones included. work: items of (row, first query, part, number of parts,
    index of the first part among all). PARTED: an item is a part of its row's context. An item has QUERIES queries, as
    far as its row has more. SHARING programs share a KV head, each with as many of its query heads. sums: [parts,
    HEADS, V_DIM] and weights: [parts, HEADS, 2] hold the parts' results; arrived: [parts, KV_HEADS * SHARING] counts
    them and is zero before and after. DIM_P >= DIM, or DIM_P + REST >= DIM, if a key's last numbers have a tile of
    their own, are the widths of its tiles. IN_KEYS: a value is the first V_DIM numbers of its key, and is not stored;
    V_DIM_P is DIM_P. ROWS >= QUERIES * the query heads of a program is their height. UNIFORM:
    without PARTED an item's context is in parts, too, which are added up as those of several items are, so that a
    token's sums have one order whatever its row is. SKIP: the keys of tiles that all queries see are not masked, which
    changes no result: with 1 a branch decides, with 2 they have a loop of their own. WIDEN: multiply in float32, as the
    interpreter must. NEAR: a power of two, the number of lines of 64 numbers in a head's share of a block, which are
    prefetched; 0: they are not. DEPENDENT as in skinny.multiply.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    OWN: tl.constexpr = (GROUP + SHARING - 1) // SHARING  # query heads of a program
    # First, so that programs without items start after those that have one.
    kv_head = tl.program_id(0) // SHARING
    count = tl.load(work_ptr)
    table_row = tl.load(work_ptr + 1)
    split = tl.load(work_ptr + 2)
    if DEPENDENT:
        # The step's inputs were there before its first kernel began: those of the first item are prefetched while this
        # one waits.
        if tl.program_id(1) < count:
            ahead = work_ptr + (tl.program_id(1) + 1) * ITEM
            row = tl.load(ahead)
            prefetch_near(starts_ptr + row)
            prefetch_near(lengths_ptr + row)
            table_ahead = table_ptr + row.to(tl.int64) * table_row
            first_block = tl.load(ahead + 2) * split // BLOCK
            prefetch_near(table_ahead + first_block)
            if NEAR:
                # Keys and values, too: of a part without a window, up to the last block that the row has.
                SHARE: tl.constexpr = BLOCK * (DIM + (0 if IN_KEYS else V_DIM))  # numbers of a head in a block
                last_block = tl.maximum(tl.load(lengths_ptr + row) - 1, 0) // BLOCK
                last_block = tl.minimum(last_block, first_block + tl.maximum(split // BLOCK, 1) - 1)
                block = tl.minimum(first_block + tl.arange(0, AHEAD), last_block)
                at = tl.load(table_ahead + block).to(tl.int64) * cache_block + kv_head * cache_head
                number = tl.minimum(tl.arange(0, NEAR) * LINE, SHARE - 1)
                prefetch(cache_ptr + at[:, None] + number[None, :])
        gdc_wait()
        gdc_launch_dependents()
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_P)
    e = tl.arange(0, V_DIM_P)
    place = tl.program_id(0) % SHARING * OWN + m % OWN  # of a query head among those that share the KV head
    head = kv_head * GROUP + place
    for item in range(tl.program_id(1), count, tl.num_programs(1)):
        work = work_ptr + (item + 1) * ITEM
        row = tl.load(work)
        first_query = tl.load(work + 1)
        start = tl.load(starts_ptr + row)
        new = tl.load(starts_ptr + row + 1) - start
        length = tl.load(lengths_ptr + row)
        query = first_query + m // OWN
        valid = (query < new) & (m < QUERIES * OWN)
        if GROUP % OWN:
            valid = valid & (place < GROUP)
        token = (start + query).to(tl.int64)
        q_at = q_ptr + token[:, None] * q_token + head[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        q_rest = q  # which is not read
        if REST:
            r = DIM_P + tl.arange(0, REST)
            rest_at = q_ptr + token[:, None] * q_token + head[:, None] * q_head + r[None, :]
            q_rest = tl.load(rest_at, mask=valid[:, None] & (r < DIM)[None, :], other=0.0)
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
        if PARTED:
            part = tl.load(work + 2)
            parts = tl.load(work + 3)
            base = tl.load(work + 4)
            # Parts are counted from the one in which the window begins.
            low = (begin // split + part) * split
        if UNIFORM and not PARTED:
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            values = tl.zeros([ROWS, V_DIM_P], tl.float32)
            for since in range(begin // split * split, end, split):
                its_top, its_total, its_values = _attended(
                    q, q_rest, position, first, last, tl.maximum(begin, since), tl.minimum(end, since + split),
                    cache_at, scales_at, table_at, scale, softcap, cache_block, scales_block, DIM, V_DIM, DIM_P, REST,
                    V_DIM_P, IN_KEYS, BLOCK, ROWS, TILE, SKIP, WINDOW, SOFTCAP, SCALED, WIDEN, UNIFORM,
                )  # fmt: skip
                top, total, values = _merged(top, total, values, its_top, its_total, its_values)
        else:
            if PARTED:
                begin = tl.maximum(begin, low)
                end = tl.minimum(end, low + split)
            top, total, values = _attended(
                q, q_rest, position, first, last, begin, end, cache_at, scales_at, table_at, scale, softcap,
                cache_block, scales_block, DIM, V_DIM, DIM_P, REST, V_DIM_P, IN_KEYS, BLOCK, ROWS, TILE, SKIP, WINDOW,
                SOFTCAP, SCALED, WIDEN, UNIFORM,
            )  # fmt: skip
        missing = row - row  # parts that have not been stored yet
        if PARTED:
            if parts > 1:
                index = (base + part).to(tl.int64) * HEADS + head
                tl.store(weights_ptr + index * 2, top, mask=valid)
                tl.store(weights_ptr + index * 2 + 1, total, mask=valid)
                tl.store(
                    sums_ptr + index[:, None] * V_DIM + e[None, :], values,
                    mask=valid[:, None] & (e < V_DIM)[None, :],
                )  # fmt: skip
                tl.debug_barrier()  # all threads have stored before one of them counts the part
                counter = arrived_ptr + base * (KV_HEADS * SHARING) + tl.program_id(0)
                missing = parts - 1 - tl.atomic_add(counter, 1, sem="acq_rel")
                if missing == 0:
                    tl.store(counter, 0)
                    top = tl.full([ROWS], float("-inf"), tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    values = tl.zeros([ROWS, V_DIM_P], tl.float32)
                    # Several are loaded at once, as far as no registers spill: a load takes longer than the sums.
                    AT_ONCE: tl.constexpr = 1 if ROWS * V_DIM_P > 4096 else 4 if ROWS * V_DIM_P > 1024 else 2
                    stop = (base + parts).to(tl.int64) * HEADS
                    for other in range(0, parts, AT_ONCE):
                        index = (base + other).to(tl.int64) * HEADS + head
                        a_top, a_total, a_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                        if AT_ONCE > 1:
                            index += HEADS
                            b_top, b_total, b_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                        if AT_ONCE > 2:
                            index += HEADS
                            c_top, c_total, c_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                            index += HEADS
                            d_top, d_total, d_values = _stored(weights_ptr, sums_ptr, index, stop, e, valid, V_DIM)
                        top, total, values = _merged(top, total, values, a_top, a_total, a_values)
                        if AT_ONCE > 1:
                            top, total, values = _merged(top, total, values, b_top, b_total, b_values)
                        if AT_ONCE > 2:
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
