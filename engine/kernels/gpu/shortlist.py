"""Triton kernels that draw a row's token from a short list of its likeliest tokens, if the list is enough.

With top_k a list must hold the top_k largest logits, and with top_p alone tokens that have this share of all weights.
A row whose list is too long or too short is left to the kernels of logits.py, which take any row, and read the logits
several times.

The bound of a list is the n-th largest of the groups' largest keys: at least n keys reach it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .logit_numbers import (
    ALL,
    BOUND,
    COLDNESS,
    DRAWN,
    FIELDS,
    FLOOR,
    LOWEST,
    REACHED,
    STATE,
    TOP_K,
    TOP_P,
    UNIFORM,
    key_of,
    logit_of,
    top_of,
    weights_of,
)

NUCLEUS = tl.constexpr(64)  # n with top_p alone
LENGTH = tl.constexpr(512)  # of a list, at most
CHUNK = tl.constexpr(32)  # entries that all entries are compared with at once


@triton.jit
def find_bound(
    rows_ptr, state_ptr, maxima_ptr,
    GROUPS: tl.constexpr, LIVE: tl.constexpr, LIVE_P: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the bound of each row's list, LOWEST if it has none.

    maxima: [rows, GROUPS], see find_top; the first LIVE are of groups with logits. LIVE_P: a power of two, not smaller.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    _, is_finite, _ = top_of(state_ptr, row)
    coldness = tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True)
    top_p = tl.load(rows_ptr + row * FIELDS + TOP_P).to(tl.float64, bitcast=True)
    k = tl.load(rows_ptr + row * FIELDS + TOP_K)
    n = tl.where(k > 0, k, tl.where(top_p < 1.0, tl.minimum(NUCLEUS, LIVE), 0))
    bound = tl.full((), LOWEST, tl.int32)
    if is_finite & (coldness > 0.0) & (n > 0) & (n <= LIVE):
        maxima_ptr += row * GROUPS
        group = tl.arange(0, LIVE_P)
        key = tl.load(maxima_ptr + group, mask=group < LIVE, other=LOWEST)
        rank = tl.zeros([LIVE_P], tl.int32)
        for first in range(0, LIVE, CHUNK):
            other = first + tl.arange(0, CHUNK)
            its = tl.load(maxima_ptr + other, mask=other < LIVE, other=LOWEST)[None, :]
            is_before = (its > key[:, None]) | ((its == key[:, None]) & (other[None, :] < group[:, None]))
            rank += tl.sum(is_before.to(tl.int32), 1)
        bound = tl.sum(tl.where(rank == (n - 1).to(tl.int32), key, 0), 0)
        if logit_of(bound) == float("-inf"):  # fewer groups than n have a token that may be drawn
            bound = tl.full((), LOWEST, tl.int32)
    tl.store(state_ptr + row * STATE + BOUND, bound.to(tl.int64))


@triton.jit
def shortlist(
    x_ptr, rows_ptr, state_ptr, maxima_ptr, keys_ptr, ids_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the keys and ids of the logits that reach a row's bound, in any order, and count them.

    Without top_k the weights of all logits are added up as well. keys, ids: [rows, LENGTH] int32.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    bound = tl.load(state_ptr + row * STATE + BOUND).to(tl.int32)
    if bound > LOWEST:
        k = tl.load(rows_ptr + row * FIELDS + TOP_K)
        coldness = tl.load(rows_ptr + row * FIELDS + COLDNESS).to(tl.float64, bitcast=True).to(tl.float32)
        top, _, _ = top_of(state_ptr, row)
        total = tl.zeros([TILE], tl.int64)
        for tile in range(TILES):
            at = (row * tl.num_programs(1) + tl.program_id(1)) * TILES + tile
            highest = tl.max(tl.load(maxima_ptr + at * (TILE // GROUP) + tl.arange(0, TILE // GROUP)), 0)
            if (k == 0) | (highest >= bound):
                i = (tl.program_id(1) * TILES + tile) * TILE + tl.arange(0, TILE)
                live = i < SIZE
                x = tl.load(x_ptr + row * SIZE + i, mask=live, other=float("-inf"))
                if k == 0:
                    total += tl.where(live, weights_of(x, top, coldness), 0.0).to(tl.int64)
                if highest >= bound:
                    key = key_of(x)
                    reaches = (live & (key >= bound)).to(tl.int32)
                    base = tl.atomic_add(state_ptr + row * STATE + REACHED, tl.sum(reaches, 0).to(tl.int64))
                    place = base + tl.cumsum(reaches, 0) - reaches
                    listed = (reaches > 0) & (place < LENGTH)
                    tl.store(keys_ptr + row * LENGTH + place, key, mask=listed)
                    tl.store(ids_ptr + row * LENGTH + place, i, mask=listed)
        if k == 0:
            tl.atomic_add(state_ptr + row * STATE + ALL, tl.sum(total, 0), sem="relaxed")


@triton.jit
def _entries(keys_ptr, entry, count, lowest, top, coldness):
    """Return the weights of a list's entries, int64; 0 below `lowest`."""
    live = entry < count
    key = tl.load(keys_ptr + entry, mask=live, other=LOWEST)
    weight = weights_of(logit_of(tl.where(live, key, 0)), top, coldness)
    return tl.where(live & (key >= lowest), weight, 0.0).to(tl.int64)


@triton.jit
def draw_listed(
    rows_ptr, state_ptr, keys_ptr, ids_ptr, tokens_ptr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Sample each row whose list is enough, as `pick` does, and mark it. tokens: [rows] int64. A row has one program.

    Without top_k the smallest weight that top_p keeps must be above that of the bound: a weight is a rounded
    exponential, so that what is not listed weighs as much as the bound at most.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    state_ptr += row * STATE
    count = tl.load(state_ptr + REACHED)
    if (tl.load(state_ptr + BOUND) > LOWEST) & (count <= LENGTH):
        top, _, _ = top_of(state_ptr, 0)
        rows_ptr += row * FIELDS
        keys_ptr += row * LENGTH
        ids_ptr += row * LENGTH
        coldness = tl.load(rows_ptr + COLDNESS).to(tl.float64, bitcast=True).to(tl.float32)
        k = tl.load(rows_ptr + TOP_K)
        top_p = tl.load(rows_ptr + TOP_P).to(tl.float64, bitcast=True)
        entry = tl.arange(0, LENGTH)
        live = entry < count
        key = tl.load(keys_ptr + entry, mask=live, other=LOWEST)
        lowest = tl.full((), LOWEST, tl.int32)
        if k > 0:
            larger = tl.zeros([LENGTH], tl.int32)
            for first in range(0, count, CHUNK):
                other = first + tl.arange(0, CHUNK)
                its = tl.load(keys_ptr + other, mask=other < count, other=LOWEST)
                larger += tl.sum((its[None, :] > key[:, None]).to(tl.int32), 1)
            lowest = tl.min(tl.where(live & (larger < k), key, 0x7FFFFFFF), 0)
        weights = _entries(keys_ptr, entry, count, lowest, top, coldness)
        total = tl.sum(weights, 0)
        if k == 0:
            total = tl.load(state_ptr + ALL)
        floor = tl.load(rows_ptr + FLOOR)
        is_enough = count > 0
        if top_p < 1.0:
            need = tl.maximum(tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total), 1)
            upward = tl.zeros([LENGTH], tl.int64)  # the sum of the weights that are at least an entry's
            for first in range(0, count, CHUNK):
                its = _entries(keys_ptr, first + tl.arange(0, CHUNK), count, lowest, top, coldness)[None, :]
                upward += tl.sum(tl.where(its >= weights[:, None], its, 0), 1)
            smallest = tl.max(tl.where((weights > 0) & (upward >= need), weights, 0), 0)
            is_enough = smallest > 0
            if k == 0:
                bound = tl.load(state_ptr + BOUND).to(tl.int32)
                is_enough = smallest > tl.max(weights_of(logit_of(tl.full([1], 0, tl.int32) + bound), top, coldness), 0)
            floor = tl.maximum(floor, smallest)
        if is_enough:
            kept = tl.where(weights >= floor, weights, 0)
            total = tl.sum(kept, 0)
            target = (tl.load(rows_ptr + UNIFORM).to(tl.float64, bitcast=True) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            token = tl.load(ids_ptr + entry, mask=live, other=0)
            before = tl.zeros([LENGTH], tl.int64)  # the sum of the weights of tokens with lower ids
            for first in range(0, count, CHUNK):
                other = first + tl.arange(0, CHUNK)
                its = _entries(keys_ptr, other, count, lowest, top, coldness)
                its = tl.where(its >= floor, its, 0)[None, :]
                their = tl.load(ids_ptr + other, mask=other < count, other=0)
                before += tl.sum(tl.where(their[None, :] < token[:, None], its, 0), 1)
            is_drawn = (kept > 0) & (before <= target) & (target < before + kept)
            tl.store(tokens_ptr + row, tl.sum(tl.where(is_drawn, token, 0), 0).to(tl.int64))
            tl.store(state_ptr + DRAWN, tl.full((), 1, tl.int64))
