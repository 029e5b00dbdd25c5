"""Triton kernels of multi-head latent attention beside its products: norms, and the rotation of queries and keys.

heads.py multiplies each head, and attention.py attends to the latents. A program computes a row, or all heads of a
token, in float32, as layers.py and storing.py do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import layers, storing


@triton.jit
def _angles(positions_ptr, angles_ptr, token, i, PAIRS: tl.constexpr):
    """Return the cosines and sines of a token's pairs [1, pairs], see storing.rotate_store."""
    angle = angles_ptr + tl.load(positions_ptr + token) * (2 * PAIRS) + i
    cos = tl.load(angle, mask=i < PAIRS, other=1.0)[None, :]
    sin = tl.load(angle + PAIRS, mask=i < PAIRS, other=0.0)[None, :]
    return cos, sin


@triton.jit
def _places(i, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the places of the two numbers of pair i."""
    if INTERLEAVED:
        return 2 * i, 2 * i + 1
    else:
        return i, i + PAIRS


@triton.jit
def normalize(
    projected_ptr, query_gain_ptr, gain_ptr, positions_ptr, angles_ptr, queries_ptr, keys_ptr, query_eps, eps,
    projected_token,
    QUERIES: tl.constexpr, QUERIES_P: tl.constexpr, RANK: tl.constexpr, RANK_P: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_P: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write a token's key, the norm of its latent and the rotation of the rest; the second program of a token writes
    the norm of its first QUERIES numbers. The grid is (tokens, 2), or (tokens, 1) if those have no norm.

    projected: [tokens, QUERIES + RANK + 2 * PAIRS], of which tokens may have any stride. queries: [tokens, QUERIES] and
    keys: [tokens, RANK + 2 * PAIRS] are contiguous. The norms are as in layers.add_norm, without WIDE. TURNED: keys are
    rotated; positions, angles, INTERLEAVED and WIDE are as in storing.rotate_store, the last as WIDE_TURN there.
    QUERIES_P, RANK_P and PAIRS_P are powers of two of at least that size. DEPENDENT as in skinny.multiply.
    """
    DTYPE: tl.constexpr = projected_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    line = projected_ptr + token * projected_token
    if tl.program_id(1) == 0:
        n = tl.arange(0, RANK_P)
        latent = tl.load(line + QUERIES + n, mask=n < RANK, other=0.0).to(tl.float32)
        latent = layers._normalized(latent, gain_ptr, n, n < RANK, eps, RANK, False, False, DTYPE)
        key_at = keys_ptr + token * (RANK + 2 * PAIRS)
        tl.store(key_at + n, latent, mask=n < RANK)
        i = tl.arange(0, PAIRS_P)
        a_place, b_place = _places(i[None, :], PAIRS, INTERLEAVED)
        live = (i < PAIRS)[None, :]
        a = tl.load(line + QUERIES + RANK + a_place, mask=live, other=0.0).to(tl.float32)
        b = tl.load(line + QUERIES + RANK + b_place, mask=live, other=0.0).to(tl.float32)
        if TURNED:
            cos, sin = _angles(positions_ptr, angles_ptr, token, i, PAIRS)
            a, b = storing._rotated(a, b, cos, sin, DTYPE, WIDE)
        tl.store(key_at + RANK + a_place, a.to(DTYPE), mask=live)
        tl.store(key_at + RANK + b_place, b.to(DTYPE), mask=live)
    else:
        m = tl.arange(0, QUERIES_P)
        query = tl.load(line + m, mask=m < QUERIES, other=0.0).to(tl.float32)
        query = layers._normalized(query, query_gain_ptr, m, m < QUERIES, query_eps, QUERIES, False, False, DTYPE)
        tl.store(queries_ptr + token * QUERIES + m, query, mask=m < QUERIES)


@triton.jit
def rotate(
    q_ptr, positions_ptr, angles_ptr, out_ptr, q_token,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, PLAIN: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_P: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the last numbers of a token's queries, rotated. The grid is (tokens,).

    q: [tokens, HEADS, PLAIN + 2 * PAIRS], of which tokens may have any stride. out: [tokens, HEADS, RANK + 2 * PAIRS],
    contiguous. HEADS_P: a power of two >= HEADS. The other arguments are as in `normalize`.
    """
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.arange(0, PAIRS_P)
    head = tl.arange(0, HEADS_P)[:, None]
    a_place, b_place = _places(i[None, :], PAIRS, INTERLEAVED)
    live = (head < HEADS) & (i < PAIRS)[None, :]
    q_at = q_ptr + token * q_token + head * (PLAIN + 2 * PAIRS) + PLAIN
    a = tl.load(q_at + a_place, mask=live, other=0.0).to(tl.float32)
    b = tl.load(q_at + b_place, mask=live, other=0.0).to(tl.float32)
    if TURNED:
        cos, sin = _angles(positions_ptr, angles_ptr, token, i, PAIRS)
        a, b = storing._rotated(a, b, cos, sin, DTYPE, WIDE)
    out_at = out_ptr + (token * HEADS + head) * (RANK + 2 * PAIRS) + RANK
    tl.store(out_at + a_place, a.to(DTYPE), mask=live)
    tl.store(out_at + b_place, b.to(DTYPE), mask=live)
