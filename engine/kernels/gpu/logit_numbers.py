"""What the Triton kernels that sample share: the numbers of a row, keys and weights of logits."""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers of a row in `rows`, int64 or the bits of float64: 1 / temperature rounded to float32 (0: greedy), top_p, the
# random number, min_p as a weight, top_k (0: off).
FIELDS = tl.constexpr(5)
COLDNESS, TOP_P, UNIFORM, FLOOR, TOP_K = (tl.constexpr(field) for field in range(5))
# Numbers of a row in `state`: its largest logit and the index, see `packed`, and the sum of its weights. Those that
# shortlist.py uses: a bound of keys, how many reach it, the sum of all weights, and whether the row has been drawn.
STATE = tl.constexpr(6)
TOP, TOTAL, BOUND, REACHED, ALL, DRAWN = (tl.constexpr(place) for place in range(6))
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
def key_of(x):
    """Return int32 keys in the order of float32 numbers. Both zeros have one key, and NaN has the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def logit_of(key):
    """Return the float32 numbers of keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(key, i):
    """Return key and index of logits as one positive int64: larger for a larger key, then for a lower index."""
    return ((key.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def top_of(state_ptr, row):
    """Return a row's largest logit, whether it is finite, and its index."""
    packed = tl.load(state_ptr + row * STATE + TOP)
    top = logit_of(((packed >> 31) - 0x80000000).to(tl.int32))
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
def weights_of(x, top, coldness):
    """Return floor(2^44 e^(coldness (x - top))), whole numbers in float32. x is at most top."""
    scaled = tl.maximum((x - top) * coldness, -32.0)
    return tl.floor(_exponential(scaled.to(tl.float64)).to(tl.float32) * ONE)
