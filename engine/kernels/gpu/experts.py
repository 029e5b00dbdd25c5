"""Triton kernels of a mixture of experts beside its products: the choice of experts, the order of work, and the sum.

A pair is a token and one of its experts; its number is token * ACTIVE + the expert's place in the token's order. The
products compute pairs in tiles, all of one expert (as in vLLM's `fused_moe`). How many tiles an expert needs is known
on the device alone. So there are as many tiles as any choice can need, and those that are left over compute nothing.
DEPENDENT as in skinny.multiply.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def choose(
    logits_ptr, correction_ptr, scales_ptr, slots_ptr, weights_ptr, chosen_ptr, scale,
    EXPERTS: tl.constexpr, ACTIVE: tl.constexpr, ACTIVE_P: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, KEPT: tl.constexpr, SIZE_P: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECT: tl.constexpr, NORMALIZE: tl.constexpr, EPSILON: tl.constexpr,
    SCALES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the weights and the numbers of a token's experts, the best first; among equals the first one is better.

    logits: [tokens, EXPERTS]. weights: [tokens, ACTIVE] float32, times `scale`. chosen: [tokens, ACTIVE] int32. The
    weights are a softmax over all experts, or with SIGMOID sigmoids. With CORRECT correction [EXPERTS] is added to them
    for the choice. With NORMALIZE a token's weights are divided by their sum + EPSILON. With SCALES they are multiplied
    by those of the experts, [EXPERTS]. Experts come from the KEPT best of GROUPS groups: a group's score is its largest
    rank, with SIGMOID the sum of its two largest. ACTIVE_P, GROUPS_P, SIZE_P: powers of two, not smaller; the last one
    of a group's size.

    slots: [tokens] int64. A token whose slot is below 0 is padding: its experts are all EXPERTS, which no expert is, so
    that no weight is read for it.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    i, place = tl.arange(0, GROUPS_P * SIZE_P), tl.arange(0, ACTIVE_P)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    live = (i // SIZE_P < GROUPS) & (i % SIZE_P < SIZE)
    e = i // SIZE_P * SIZE + i % SIZE_P
    logits = tl.load(logits_ptr + token * EXPERTS + e, mask=live, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores /= tl.sum(scores, 0)
    ranks = scores
    if CORRECT:
        ranks += tl.load(correction_ptr + e, mask=live, other=0.0).to(tl.float32)
    ranks = tl.where(live & (ranks == ranks), ranks, float("-inf"))  # where they are no numbers, so are the weights
    if GROUPS > 1:
        grouped = tl.reshape(ranks, [GROUPS_P, SIZE_P])
        sums = tl.max(grouped, 1)
        if SIGMOID:
            others = tl.arange(0, SIZE_P)[None, :] != tl.argmax(grouped, 1)[:, None]
            sums += tl.max(tl.where(others, grouped, float("-inf")), 1)
        group = tl.arange(0, GROUPS_P)
        is_kept = tl.zeros([GROUPS_P], tl.int32)
        for _ in tl.static_range(KEPT):
            best = tl.argmax(sums, 0)
            is_kept = tl.where(group == best, 1, is_kept)
            sums = tl.where(group == best, float("-inf"), sums)
        ranks = tl.reshape(tl.where(is_kept[:, None] > 0, grouped, float("-inf")), [GROUPS_P * SIZE_P])
    weights = tl.zeros([ACTIVE_P], tl.float32)
    chosen = tl.zeros([ACTIVE_P], tl.int32)
    for number in tl.static_range(ACTIVE):
        best = tl.argmax(ranks, 0)
        weights = tl.where(place == number, tl.sum(tl.where(i == best, scores, 0.0), 0), weights)
        chosen = tl.where(place == number, best // SIZE_P * SIZE + best % SIZE_P, chosen)
        ranks = tl.where(i == best, float("-inf"), ranks)
    if NORMALIZE:
        weights /= tl.sum(weights, 0) + EPSILON
    if SCALES:
        weights *= tl.load(scales_ptr + chosen).to(tl.float32)
    chosen = tl.where(slot < 0, EXPERTS, chosen)
    at = token * ACTIVE + place
    tl.store(weights_ptr + at, weights * scale, mask=place < ACTIVE)
    tl.store(chosen_ptr + at, chosen, mask=place < ACTIVE)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def arrange(
    chosen_ptr, pairs_ptr, owners_ptr, pairs, tiles,
    EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write an expert's pairs, in their order, to the tiles that follow those of the experts before it.

    The grid is (EXPERTS). chosen: [pairs] int32, EXPERTS for a pair of padding, which is in no tile. pairs_ptr:
    [tiles * TOKENS] int32, -1 where a tile has no pair. owners: [tiles] int32, each tile's expert, -1 behind the last
    expert's. EXPERTS_P: a power of two above EXPERTS.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    e, i = tl.arange(0, EXPERTS_P), tl.arange(0, TILE)
    counts = tl.zeros([EXPERTS_P], tl.int32)
    for first in range(0, pairs, TILE):
        chosen = tl.load(chosen_ptr + first + i, mask=first + i < pairs, other=EXPERTS)
        counts += tl.histogram(chosen, EXPERTS_P)
    needed = (counts + TOKENS - 1) // TOKENS
    tile = tl.sum(tl.where(e < expert, needed, 0), 0)
    end = tile + tl.sum(tl.where(e == expert, needed, 0), 0)
    at = tile * TOKENS
    for first in range(0, pairs, TILE):
        chosen = tl.load(chosen_ptr + first + i, mask=first + i < pairs, other=EXPERTS)
        own = (chosen == expert).to(tl.int32)
        tl.store(pairs_ptr + at + tl.cumsum(own, 0) - 1, first + i, mask=own > 0)
        at += tl.sum(own, 0)
    rest = at + tl.arange(0, TOKENS)
    tl.store(pairs_ptr + rest, tl.full([TOKENS], -1, tl.int32), mask=rest < end * TOKENS)
    for first in range(tile, end, TILE):
        tl.store(owners_ptr + first + i, tl.full([TILE], 0, tl.int32) + expert, mask=first + i < end)
    if expert == EXPERTS - 1:
        for first in range(end, tiles, TILE):
            tl.store(owners_ptr + first + i, tl.full([TILE], -1, tl.int32), mask=first + i < tiles)


@triton.jit
def combine(
    x_ptr, results_ptr, weights_ptr, shared_ptr, gates_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add weight * result of a token's experts, in their order, to TILE numbers of its row of x in place.

    x: [tokens, SIZE]. results: [tokens * ACTIVE, SIZE]. weights: [tokens, ACTIVE] float32. With SHARED a row of shared
    [tokens, SIZE] is added first, with GATED times the sigmoid of gates [tokens]; both are rounded, as in torch. The
    sum is in float32, and is rounded once.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = i < SIZE
    x_at = x_ptr + token * SIZE + i
    total = tl.load(x_at, mask=live, other=0.0).to(tl.float32)
    if SHARED:
        shared = tl.load(shared_ptr + token * SIZE + i, mask=live, other=0.0).to(tl.float32)
        if GATED:
            DTYPE: tl.constexpr = shared_ptr.dtype.element_ty
            gate = 1.0 / (1.0 + tl.exp(-tl.load(gates_ptr + token).to(tl.float32)))
            shared = (shared * gate.to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
        total += shared
    for number in tl.static_range(ACTIVE):
        pair = token * ACTIVE + number
        result = tl.load(results_ptr + pair * SIZE + i, mask=live, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + pair)
    tl.store(x_at, total.to(x_ptr.dtype.element_ty), mask=live)
