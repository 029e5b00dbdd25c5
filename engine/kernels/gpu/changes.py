"""Triton kernels that change a step's logits before temperature, in place: penalties, biases, excluded tokens, masks.

Logits are [rows, SIZE] float32, contiguous. engine/runner/changes.py computes the same in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def penalize(x_ptr, at_ptr, penalties_ptr, count, TILE: tl.constexpr):
    """Apply penalties to `count` different logits. at: [count] int64, their offsets. penalties: [3, count] float32:
    the repetition penalty, and what the frequency and the presence penalty subtract."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = i < count
    at = tl.load(at_ptr + i, mask=live, other=0)
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    repetition = tl.load(penalties_ptr + i, mask=live, other=1.0)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = x - tl.load(penalties_ptr + count + i, mask=live, other=0.0)
    x = x - tl.load(penalties_ptr + 2 * count + i, mask=live, other=0.0)
    tl.store(x_ptr + at, x, mask=live)


@triton.jit(do_not_specialize=["count"])
def add(x_ptr, at_ptr, biases_ptr, count, TILE: tl.constexpr):
    """Add a bias to each of `count` different logits."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = i < count
    at = tl.load(at_ptr + i, mask=live, other=0)
    x = tl.load(x_ptr + at, mask=live, other=0.0) + tl.load(biases_ptr + i, mask=live, other=0.0)
    tl.store(x_ptr + at, x, mask=live)


@triton.jit(do_not_specialize=["count"])
def exclude(x_ptr, at_ptr, count, TILE: tl.constexpr):
    """Set `count` logits to negative infinity."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = tl.load(at_ptr + i, mask=i < count, other=0)
    tl.store(x_ptr + at, tl.full([TILE], float("-inf"), tl.float32), mask=i < count)


@triton.jit
def forbid(x_ptr, chosen_ptr, bits_ptr, SIZE: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr):
    """Set the logits that masks forbid to negative infinity. chosen: [masks] int64, indices of rows. bits: [masks,
    WORDS] int32, 1: allowed."""
    mask = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = i < SIZE
    word = tl.load(bits_ptr + mask * WORDS + (i >> 5), mask=live, other=0)
    is_forbidden = live & (((word >> (i & 31)) & 1) == 0)
    x_ptr += tl.load(chosen_ptr + mask) * SIZE
    tl.store(x_ptr + i, tl.full([TILE], float("-inf"), tl.float32), mask=is_forbidden)
