"""Triton kernels that sample from a step's logits, and that find the most likely tokens.

engine/runner/logits.py defines the results and computes them in torch; engine/runner/triton_logits.py launches these
kernels. Logits are [rows, SIZE] float32, contiguous. Most kernels have a program for each row and each part of it, and
a part is TILES tiles of TILE logits. The parts of a row are combined by atomic operations on integers, whose results do
not depend on the order, so nothing depends on the other rows either. DEPENDENT as in skinny.multiply.

top_k and top_p are thresholds, found digit by digit instead of by sorting: numbers are mapped to integer keys in the
same order, a first pass counts the keys, or adds up the weights, by the key's first digit, and further passes do so by
the next digit, for the keys that begin with the threshold's digits so far.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Numbers of a row in `rows`, int64 or the bits of float64: 1 / temperature rounded to float32 (0: greedy), top_p, the
# random number, min_p as a weight, top_k (0: off).
FIELDS = tl.constexpr(5)
COLDNESS, TOP_P, UNIFORM, FLOOR, TOP_K = (tl.constexpr(field) for field in range(5))
# Numbers of a row in `state`: its largest logit and the index, see `_packed`, and the sum of its weights.
STATE = tl.constexpr(2)
# A logit's key has 32 bits, in four digits of 8: what tl.histogram takes for a number is proportional to the bins.
COUNTS, COUNT_DIGITS = tl.constexpr(256), tl.constexpr(4)
# A weight's key is the difference of its bits from those of the smallest weight: 29 bits, in digits of 10, 10 and 9.
SUMS, LAST_SUMS, SUM_DIGITS = tl.constexpr(1024), tl.constexpr(512), tl.constexpr(3)
SMALLEST = tl.constexpr(0x3F800000)  # the bits of 1.0
LOWEST = tl.constexpr(-(1 << 31))  # below all keys of logits

ONE = tl.constexpr(float(1 << 44))  # the weight of the most likely token
# Constants of `exponential` in engine/kernels/logits_weights.h.
SHIFT = tl.constexpr(1.5 * 2.0**52)
PER_UNIT = tl.constexpr(float.fromhex("0x1.71547652b82fep3"))  # 8 / log(2)
LOG2_HIGH = tl.constexpr(float.fromhex("-0x1.62e42fefa0000p-4"))
LOG2_LOW = tl.constexpr(float.fromhex("-0x1.cf79abc9e3b39p-43"))
TERM_8, TERM_7, TERM_6 = tl.constexpr(1 / 40320), tl.constexpr(1 / 5040), tl.constexpr(1 / 720)
TERM_5, TERM_4, TERM_3 = tl.constexpr(1 / 120), tl.constexpr(1 / 24), tl.constexpr(1 / 6)
EIGHTH_1 = tl.constexpr(float.fromhex("0x1.172b83c7d517bp+0"))  # 2**(1 / 8)
EIGHTH_2 = tl.constexpr(float.fromhex("0x1.306fe0a31b715p+0"))
EIGHTH_3 = tl.constexpr(float.fromhex("0x1.4bfdad5362a27p+0"))
EIGHTH_4 = tl.constexpr(float.fromhex("0x1.6a09e667f3bcdp+0"))
EIGHTH_5 = tl.constexpr(float.fromhex("0x1.8ace5422aa0dbp+0"))
EIGHTH_6 = tl.constexpr(float.fromhex("0x1.ae89f995ad3adp+0"))
EIGHTH_7 = tl.constexpr(float.fromhex("0x1.d5818dcfba487p+0"))


# -- numbers and keys -------------------------------------------------------------------------------------------------


@triton.jit
def _key(x):
    """Return int32 keys in the order of float32 numbers. Both zeros have one key, and NaN has the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _packed(key, i):
    """Return key and index of logits as one positive int64: larger for a larger key, then for a lower index."""
    return ((key.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def _top(state_ptr, row):
    """Return a row's largest logit, whether it is finite, and its index."""
    packed = tl.load(state_ptr + row * STATE)
    key = ((packed >> 31) - 0x80000000).to(tl.int32)
    top = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return top, tl.abs(top) < float("inf"), 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def _exponential(x):
    """Return e**x of float64 numbers from -32 to 0.

    These are the operations of the CPU kernels in the same order, and each is exact or rounded once, so that results
    have the same bits on every device. Constants are tensors, because an operand that is a plain number is a float32.
    """
    shift = tl.full(x.shape, SHIFT, tl.float64)
    one = tl.full(x.shape, 1.0, tl.float64)
    n = tl.fma(x, tl.full(x.shape, PER_UNIT, tl.float64), shift)
    whole = n - shift
    r = tl.fma(whole, tl.full(x.shape, LOG2_HIGH, tl.float64), x)
    r = tl.fma(whole, tl.full(x.shape, LOG2_LOW, tl.float64), r)
    e = tl.fma(tl.full(x.shape, TERM_8, tl.float64), r, tl.full(x.shape, TERM_7, tl.float64))
    e = tl.fma(e, r, tl.full(x.shape, TERM_6, tl.float64))
    e = tl.fma(e, r, tl.full(x.shape, TERM_5, tl.float64))
    e = tl.fma(e, r, tl.full(x.shape, TERM_4, tl.float64))
    e = tl.fma(e, r, tl.full(x.shape, TERM_3, tl.float64))
    e = tl.fma(e, r, tl.full(x.shape, 0.5, tl.float64))
    e = tl.fma(e, r, one)
    e = tl.fma(e, r, one)
    bits = n.to(tl.int64, bitcast=True)
    is_odd = (bits & 1) != 0
    zeroth = tl.where(is_odd, tl.full(x.shape, EIGHTH_1, tl.float64), one)
    second = tl.where(is_odd, tl.full(x.shape, EIGHTH_3, tl.float64), tl.full(x.shape, EIGHTH_2, tl.float64))
    fourth = tl.where(is_odd, tl.full(x.shape, EIGHTH_5, tl.float64), tl.full(x.shape, EIGHTH_4, tl.float64))
    sixth = tl.where(is_odd, tl.full(x.shape, EIGHTH_7, tl.float64), tl.full(x.shape, EIGHTH_6, tl.float64))
    is_second = (bits & 2) != 0
    e *= tl.where((bits & 4) != 0, tl.where(is_second, sixth, fourth), tl.where(is_second, second, zeroth))
    return (e.to(tl.int64, bitcast=True) + ((bits >> 3) << 52)).to(tl.float64, bitcast=True)


@triton.jit
def _weights(x, top, coldness):
    """Return floor(2^44 e^(coldness (x - top))), whole numbers in float32. x is at most top."""
    scaled = tl.maximum((x - top) * coldness, -32.0)
    return tl.floor(_exponential(scaled.to(tl.float64)).to(tl.float32) * ONE)


# -- thresholds -------------------------------------------------------------------------------------------------------


@triton.jit
def _bin(sums_ptr, need, BINS: tl.constexpr):
    """Return the bin in which the sums of bins, added from the last bin down, reach `need`, and the rest of `need`."""
    sums = tl.load(sums_ptr + (BINS - 1 - tl.arange(0, BINS)))
    is_short = tl.cumsum(sums, 0) < need
    return BINS - 1 - tl.sum(is_short.to(tl.int32), 0), need - tl.sum(tl.where(is_short, sums, 0), 0)


@triton.jit
def _threshold(sums_ptr, need, BINS: tl.constexpr, THIRD: tl.constexpr, FIRST: tl.constexpr, KNOWN: tl.constexpr):
    """Return the first KNOWN digits of the largest key such that all keys from it up sum to `need`, and the rest.

    The rest is what the keys that begin with these digits must sum to. sums: [digits, BINS]. The first digit is counted
    from FIRST, and the third digit has THIRD values.
    """
    digit, need = _bin(sums_ptr, need, BINS)
    key = digit + FIRST
    if KNOWN > 1:
        digit, need = _bin(sums_ptr + BINS, need, BINS)
        key = key * BINS + digit
    if KNOWN > 2:
        digit, need = _bin(sums_ptr + 2 * BINS, need, BINS)
        key = key * THIRD + digit
    if KNOWN > 3:
        digit, need = _bin(sums_ptr + 3 * BINS, need, BINS)
        key = key * BINS + digit
    return key, need


@triton.jit
def _kth(counts_ptr, row, k, KNOWN: tl.constexpr):
    """Return the first KNOWN digits of the k-th largest logit's key, and how many of those with them are needed."""
    counts_ptr += row * (COUNT_DIGITS * COUNTS)
    return _threshold(counts_ptr, k.to(tl.int32), COUNTS, COUNTS, -COUNTS // 2, KNOWN)


@triton.jit
def _mass(state_ptr, sums_ptr, row, top_p, KNOWN: tl.constexpr):
    """Return the first KNOWN digits of the key of the smallest weight that top_p needs."""
    total = tl.load(state_ptr + row * STATE + 1)
    need = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
    sums_ptr += row * (SUM_DIGITS * SUMS)
    key, _ = _threshold(sums_ptr, tl.maximum(need, 1), SUMS, LAST_SUMS, 0, KNOWN)
    return key


@triton.jit
def _floor(rows_ptr, state_ptr, sums_ptr, row):
    """Return the smallest weight that min_p and top_p keep."""
    floor = tl.load(rows_ptr + row * FIELDS + FLOOR)
    top_p = tl.load(rows_ptr + row * FIELDS + TOP_P).to(tl.float64, bitcast=True)
    if top_p < 1.0:
        key = _mass(state_ptr, sums_ptr, row, top_p, SUM_DIGITS)
        floor = tl.maximum(floor, (key + SMALLEST).to(tl.float32, bitcast=True).to(tl.int64))
    return floor


@triton.jit
def find_top(
    x_ptr, rows_ptr, state_ptr, counts_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Find each row's largest logit, the lowest of several; NaN is the largest.

    COUNT: count the first digits of the keys of rows with top_k. state: [rows, STATE] int64. counts: [rows,
    COUNT_DIGITS, COUNTS] int32. Both are zero before.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if COUNT:
        has_k = tl.load(rows_ptr + row * FIELDS + TOP_K) > 0
    first = tl.program_id(1) * (TILE * TILES)
    best = tl.zeros([TILE], tl.int64)
    counts = tl.zeros([COUNTS], tl.int32)
    for tile in range(TILES):
        i = first + tile * TILE + tl.arange(0, TILE)
        live = i < SIZE
        key = _key(tl.load(x_ptr + row * SIZE + i, mask=live, other=float("-inf")))
        best = tl.maximum(best, tl.where(live, _packed(key, i), 0))
        if COUNT:
            if has_k:
                counts += tl.histogram((key >> 24) + COUNTS // 2, COUNTS, mask=live)
    tl.atomic_max(state_ptr + row * STATE, tl.max(best, 0), sem="relaxed")
    if COUNT:
        bins = tl.arange(0, COUNTS)
        tl.atomic_add(counts_ptr + row * (COUNT_DIGITS * COUNTS) + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def count_digit(
    x_ptr, rows_ptr, counts_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KNOWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count the next digit of the keys that begin with the KNOWN first digits of the row's top_k-th key."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(rows_ptr + row * FIELDS + TOP_K)
    if k > 0:
        prefix, _ = _kth(counts_ptr, row, k, KNOWN)
        first = tl.program_id(1) * (TILE * TILES)
        counts = tl.zeros([COUNTS], tl.int32)
        for tile in range(TILES):
            i = first + tile * TILE + tl.arange(0, TILE)
            live = i < SIZE
            key = _key(tl.load(x_ptr + row * SIZE + i, mask=live, other=float("-inf")))
            begins = live & ((key >> (32 - 8 * KNOWN)) == prefix)
            counts += tl.histogram((key >> (24 - 8 * KNOWN)) & (COUNTS - 1), COUNTS, mask=begins)
        bins = tl.arange(0, COUNTS)
        to = counts_ptr + row * (COUNT_DIGITS * COUNTS) + KNOWN * COUNTS
        tl.atomic_add(to + bins, counts, mask=counts > 0, sem="relaxed")


# -- sampling ---------------------------------------------------------------------------------------------------------


@triton.jit
def weigh(
    x_ptr, rows_ptr, state_ptr, counts_ptr, sums_ptr, weights_ptr, parts_ptr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SAMPLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add up the weights of each row's logits. SAMPLE: of those that top_k keeps, and store them.

    weights: [rows, SIZE] float32. parts: [rows, PARTS] int64, the sums of the weights that min_p keeps. sums: [rows,
    SUM_DIGITS, SUMS] int64, zero before: with top_p, the weights are added up by their first digit as well.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top, is_finite, _ = _top(state_ptr, row)
    coldness = tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True).to(tl.float32)
    if is_finite & (coldness > 0.0):
        floor = tl.load(rows_ptr + row * FIELDS + FLOOR)
        top_p = tl.load(rows_ptr + row * FIELDS + TOP_P).to(tl.float64, bitcast=True)
        lowest = tl.full((), LOWEST, tl.int32)
        if SAMPLE:
            k = tl.load(rows_ptr + row * FIELDS + TOP_K)
            if k > 0:
                lowest, _rest = _kth(counts_ptr, row, k, COUNT_DIGITS)
        total = tl.zeros([TILE], tl.int64)
        kept = tl.zeros([TILE], tl.int64)
        for tile in range(TILES):
            i = part * (TILE * TILES) + tile * TILE + tl.arange(0, TILE)
            live = i < SIZE
            x = tl.load(x_ptr + row * SIZE + i, mask=live, other=float("-inf"))
            weight = tl.where(_key(x) >= lowest, _weights(x, top, coldness), 0.0)
            whole = weight.to(tl.int64)
            total += whole
            if SAMPLE:
                kept += tl.where(whole >= floor, whole, 0)
                tl.store(weights_ptr + row * SIZE + i, weight, mask=live)
                if top_p < 1.0:
                    digit = (weight.to(tl.int32, bitcast=True) - SMALLEST) >> 19
                    tl.atomic_add(sums_ptr + row * (SUM_DIGITS * SUMS) + digit, whole, mask=whole > 0, sem="relaxed")
        tl.atomic_add(state_ptr + row * STATE + 1, tl.sum(total, 0), sem="relaxed")
        if SAMPLE:
            tl.store(parts_ptr + row * PARTS + part, tl.sum(kept, 0))


@triton.jit
def sum_digit(
    rows_ptr, state_ptr, sums_ptr, weights_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KNOWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add up, by their next digit, the weights that begin with the KNOWN first digits of top_p's threshold."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    _, is_finite, _ = _top(state_ptr, row)
    top_p = tl.load(rows_ptr + row * FIELDS + TOP_P).to(tl.float64, bitcast=True)
    if is_finite & (tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True) > 0.0) & (top_p < 1.0):
        prefix = _mass(state_ptr, sums_ptr, row, top_p, KNOWN)
        to = sums_ptr + row * (SUM_DIGITS * SUMS) + KNOWN * SUMS
        for tile in range(TILES):
            i = tl.program_id(1) * (TILE * TILES) + tile * TILE + tl.arange(0, TILE)
            weight = tl.load(weights_ptr + row * SIZE + i, mask=i < SIZE, other=0.0)
            key = weight.to(tl.int32, bitcast=True) - SMALLEST
            if KNOWN == 1:
                begins = (weight > 0.0) & ((key >> 19) == prefix)
                digit = (key >> 9) & (SUMS - 1)
            else:
                begins = (weight > 0.0) & ((key >> 9) == prefix)
                digit = key & (LAST_SUMS - 1)
            tl.atomic_add(to + digit, weight.to(tl.int64), mask=begins, sem="relaxed")


@triton.jit
def sum_kept(
    rows_ptr, state_ptr, sums_ptr, weights_ptr, parts_ptr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the sums of the weights that min_p and top_p keep, for the rows with top_p, to `parts` of `weigh`."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    _, is_finite, _ = _top(state_ptr, row)
    is_random = tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True) > 0.0
    if is_finite & is_random & (tl.load(rows_ptr + row * FIELDS + TOP_P).to(tl.float64, bitcast=True) < 1.0):
        floor = _floor(rows_ptr, state_ptr, sums_ptr, row)
        kept = tl.zeros([TILE], tl.int64)
        for tile in range(TILES):
            i = part * (TILE * TILES) + tile * TILE + tl.arange(0, TILE)
            whole = tl.load(weights_ptr + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.int64)
            kept += tl.where(whole >= floor, whole, 0)
        tl.store(parts_ptr + row * PARTS + part, tl.sum(kept, 0))


@triton.jit
def pick(
    rows_ptr, state_ptr, sums_ptr, weights_ptr, parts_ptr, tops_ptr, ids_ptr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    SAMPLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write each row's largest logit, and its index or with SAMPLE a sampled one; -1 if the logit is not finite.

    tops: [rows] float32. ids: [rows] int64. PARTS_P: a power of two >= PARTS. A row has one program.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    top, is_finite, index = _top(state_ptr, row)
    index = tl.where(is_finite, index, -1)
    if SAMPLE:
        if is_finite & (tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True) > 0.0):
            floor = _floor(rows_ptr, state_ptr, sums_ptr, row)
            part = tl.arange(0, PARTS_P)
            sums = tl.load(parts_ptr + row * PARTS + part, mask=part < PARTS, other=0)
            total = tl.sum(sums, 0)
            target = (
                tl.load(rows_ptr + row * FIELDS + UNIFORM).to(tl.float64, bitcast=True) * total.to(tl.float64)
            ).to(tl.int64)
            target = tl.minimum(target, total - 1)
            is_before = tl.cumsum(sums, 0) <= target
            target -= tl.sum(tl.where(is_before, sums, 0), 0)
            first = tl.sum(is_before.to(tl.int32), 0) * (TILE * TILES)
            index = first.to(tl.int64)
            upto = tl.full((), 0, tl.int64)
            for tile in range(TILES):
                i = first + tile * TILE + tl.arange(0, TILE)
                whole = tl.load(weights_ptr + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.int64)
                whole = tl.where(whole >= floor, whole, 0)
                index += tl.sum((upto + tl.cumsum(whole, 0) <= target).to(tl.int32), 0)
                upto += tl.sum(whole, 0)
    tl.store(tops_ptr + row, top)
    tl.store(ids_ptr + row, index)


# -- the most likely tokens -------------------------------------------------------------------------------------------


@triton.jit
def tally(
    x_ptr, rows_ptr, counts_ptr, parts_ptr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count the logits of each part that are larger than the row's top_k-th, and those that equal it.

    parts: [rows, PARTS, 2] int32.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    kth, _ = _kth(counts_ptr, row, tl.load(rows_ptr + row * FIELDS + TOP_K), COUNT_DIGITS)
    larger = tl.zeros([TILE], tl.int32)
    equal = tl.zeros([TILE], tl.int32)
    for tile in range(TILES):
        i = part * (TILE * TILES) + tile * TILE + tl.arange(0, TILE)
        live = i < SIZE
        key = _key(tl.load(x_ptr + row * SIZE + i, mask=live, other=0.0))
        larger += (live & (key > kth)).to(tl.int32)
        equal += (live & (key == kth)).to(tl.int32)
    tl.store(parts_ptr + (row * PARTS + part) * 2, tl.sum(larger, 0))
    tl.store(parts_ptr + (row * PARTS + part) * 2 + 1, tl.sum(equal, 0))


@triton.jit
def collect(
    x_ptr, rows_ptr, state_ptr, counts_ptr, parts_ptr, values_ptr, ids_ptr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the row's top_k largest logits and their ids by ascending id, unless its largest is not finite.

    Of equal ones the lowest ids are written. values: [rows, top_k] float32. ids: [rows, top_k] int64.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    _, is_finite, _ = _top(state_ptr, row)
    if is_finite:
        k = tl.load(rows_ptr + row * FIELDS + TOP_K)
        kth, num_equal = _kth(counts_ptr, row, k, COUNT_DIGITS)
        other = tl.arange(0, PARTS_P)
        counts = parts_ptr + (row * PARTS + other) * 2
        larger = tl.sum(tl.load(counts, mask=other < part, other=0), 0)
        equal = tl.sum(tl.load(counts + 1, mask=other < part, other=0), 0)
        for tile in range(TILES):
            i = part * (TILE * TILES) + tile * TILE + tl.arange(0, TILE)
            live = i < SIZE
            x = tl.load(x_ptr + row * SIZE + i, mask=live, other=0.0)
            key = _key(x)
            # Both counts in one number, because a tile has fewer than 2^16 logits.
            counted = (live & (key > kth)).to(tl.int32) + ((live & (key == kth)).to(tl.int32) << 16)
            before = tl.cumsum(counted, 0) - counted
            equal_before = equal + (before >> 16)
            at = larger + (before & 0xFFFF) + tl.minimum(equal_before, num_equal)
            is_listed = (counted == 1) | ((counted > 1) & (equal_before < num_equal))
            is_listed = is_listed & (at < k)  # even if a device counts wrongly, which the trial finds out
            tl.store(ids_ptr + row * k + at, i.to(tl.int64), mask=is_listed)
            tl.store(values_ptr + row * k + at, x, mask=is_listed)
            total = tl.sum(counted, 0)
            larger += total & 0xFFFF
            equal += total >> 16
