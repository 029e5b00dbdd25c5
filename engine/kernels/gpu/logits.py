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

from .logit_numbers import (
    COLDNESS,
    DRAWN,
    FIELDS,
    FLOOR,
    LOWEST,
    SMALLEST,
    STATE,
    TOP,
    TOP_K,
    TOP_P,
    TOTAL,
    UNIFORM,
    key_of,
    packed,
    top_of,
    weights_of,
)

# A logit's key has 32 bits, in four digits of 8: what tl.histogram takes for a number is proportional to the bins.
COUNTS, COUNT_DIGITS = tl.constexpr(256), tl.constexpr(4)
# A weight's key is the difference of its bits from those of the smallest weight: 29 bits, in digits of 10, 10 and 9.
SUMS, LAST_SUMS, SUM_DIGITS = tl.constexpr(1024), tl.constexpr(512), tl.constexpr(3)


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
    total = tl.load(state_ptr + row * STATE + TOTAL)
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
def _is_drawn(state_ptr, row):
    """Return whether shortlist.py has drawn the row's token."""
    return tl.load(state_ptr + row * STATE + DRAWN) != 0


@triton.jit
def _is_random(rows_ptr, state_ptr, row):
    """Return whether a row's token is still to be sampled."""
    _, is_finite, _ = top_of(state_ptr, row)
    coldness = tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True)
    return is_finite & (coldness > 0.0) & (_is_drawn(state_ptr, row) == 0)


@triton.jit
def find_top(
    x_ptr, state_ptr, maxima_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Find each row's largest logit, the lowest of several; NaN is the largest.

    GROUP: write the largest key of each GROUP logits as well, if it is not 0. state: [rows, STATE] int64, zero before.
    maxima: [rows, parts * TILES * TILE / GROUP] int32.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (TILE * TILES)
    best = tl.zeros([TILE], tl.int64)
    for tile in range(TILES):
        i = first + tile * TILE + tl.arange(0, TILE)
        live = i < SIZE
        key = key_of(tl.load(x_ptr + row * SIZE + i, mask=live, other=float("-inf")))
        best = tl.maximum(best, tl.where(live, packed(key, i), 0))
        if GROUP:
            groups = tl.max(tl.reshape(tl.where(live, key, LOWEST), [TILE // GROUP, GROUP]), 1)
            at = (row * tl.num_programs(1) + tl.program_id(1)) * TILES + tile
            tl.store(maxima_ptr + at * (TILE // GROUP) + tl.arange(0, TILE // GROUP), groups)
    tl.atomic_max(state_ptr + row * STATE + TOP, tl.max(best, 0), sem="relaxed")


@triton.jit
def count_digit(
    x_ptr, rows_ptr, state_ptr, counts_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KNOWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count the next digit of the keys that begin with the KNOWN first digits of the row's top_k-th key.

    counts: [rows, COUNT_DIGITS, COUNTS] int32, zero before.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(rows_ptr + row * FIELDS + TOP_K)
    if (k > 0) & (_is_drawn(state_ptr, row) == 0):
        if KNOWN > 0:
            prefix, _ = _kth(counts_ptr, row, k, KNOWN)
        first = tl.program_id(1) * (TILE * TILES)
        counts = tl.zeros([COUNTS], tl.int32)
        for tile in range(TILES):
            i = first + tile * TILE + tl.arange(0, TILE)
            begins = i < SIZE
            key = key_of(tl.load(x_ptr + row * SIZE + i, mask=begins, other=float("-inf")))
            if KNOWN > 0:
                begins = begins & ((key >> (32 - 8 * KNOWN)) == prefix)
                digit = (key >> (24 - 8 * KNOWN)) & (COUNTS - 1)
            else:
                digit = (key >> 24) + COUNTS // 2
            counts += tl.histogram(digit, COUNTS, mask=begins)
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
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top, is_finite, _ = top_of(state_ptr, row)
    coldness = tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True).to(tl.float32)
    if is_finite & (coldness > 0.0) & (_is_drawn(state_ptr, row) == 0):
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
            weight = tl.where(key_of(x) >= lowest, weights_of(x, top, coldness), 0.0)
            whole = weight.to(tl.int64)
            total += whole
            if SAMPLE:
                kept += tl.where(whole >= floor, whole, 0)
                tl.store(weights_ptr + row * SIZE + i, weight, mask=live)
                if top_p < 1.0:
                    digit = (weight.to(tl.int32, bitcast=True) - SMALLEST) >> 19
                    tl.atomic_add(sums_ptr + row * (SUM_DIGITS * SUMS) + digit, whole, mask=whole > 0, sem="relaxed")
        tl.atomic_add(state_ptr + row * STATE + TOTAL, tl.sum(total, 0), sem="relaxed")
        if SAMPLE:
            tl.store(parts_ptr + row * PARTS + part, tl.sum(kept, 0))


@triton.jit
def sum_digit(
    rows_ptr, state_ptr, sums_ptr, weights_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KNOWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add up, by their next digit, the weights that begin with the KNOWN first digits of top_p's threshold."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(rows_ptr + row * FIELDS + TOP_P).to(tl.float64, bitcast=True)
    if _is_random(rows_ptr, state_ptr, row) & (top_p < 1.0):
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
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top_p = tl.load(rows_ptr + row * FIELDS + TOP_P).to(tl.float64, bitcast=True)
    if _is_random(rows_ptr, state_ptr, row) & (top_p < 1.0):
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
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    top, is_finite, index = top_of(state_ptr, row)
    index = tl.where(is_finite, index, -1)
    if SAMPLE:
        if _is_random(rows_ptr, state_ptr, row):
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
    tl.store(ids_ptr + row, index, mask=_is_drawn(state_ptr, row) == 0)


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
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    kth, _ = _kth(counts_ptr, row, tl.load(rows_ptr + row * FIELDS + TOP_K), COUNT_DIGITS)
    larger = tl.zeros([TILE], tl.int32)
    equal = tl.zeros([TILE], tl.int32)
    for tile in range(TILES):
        i = part * (TILE * TILES) + tile * TILE + tl.arange(0, TILE)
        live = i < SIZE
        key = key_of(tl.load(x_ptr + row * SIZE + i, mask=live, other=0.0))
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
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    _, is_finite, _ = top_of(state_ptr, row)
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
            key = key_of(x)
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
