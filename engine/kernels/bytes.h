// Rows of x quantized to bytes, and their products with bytes of a weight.
//
// Activations have a scale for each group of a row, because a few columns are often far larger than the others and
// should cost precision only in their own group. A group whose numbers are all smaller than TINY counts as zero.
#pragma once
#include <float.h>

#include "numbers.h"

namespace {

const float TINY = 7.8886e-31f;  // 2^-100: a scale is never subnormal
const int LARGEST = 127;         // of a quantized activation, and of a weight in 8 bits
const int FINE_BITS = 7;         // that a second byte adds to an activation
const int FINE = 1 << FINE_BITS;

// -- numbers to bytes -------------------------------------------------------------------------------------------------

// The scale with which `steps` steps make `top`; NaN if top is NaN or infinite.
float scale_of(float top, int steps) {
  if (!(top <= FLT_MAX)) return bits_to_float(0x7fc00000);
  return top < TINY ? 0.0f : top / (float)steps;
}

// A group of a row of x, quantized to int8 and padded with zeros.
template <int SIZE>
struct Bytes {
  int8_t numbers[SIZE];
  int32_t sum;
  float scale;
  V inverse;

  template <class Number>
  void quantize(const Number* x, int64_t count) {
    Number padded[SIZE];
    if (count < SIZE) {
      memset(padded, 0, sizeof(padded));
      memcpy(padded, x, (size_t)count * sizeof(Number));
      x = padded;
    }
    const float top = max_magnitude(SIZE / LANES, [&](int64_t i) { return widen(x + i * LANES); });
    scale = scale_of(top, LARGEST);
    inverse = set1(scale > 0 ? (float)LARGEST / top : 0.0f);  // NaN becomes 0x80000000, whose lowest byte is 0
    U total = set1_units(0);
    for (int i = 0; i < SIZE / LANES; ++i) {
      const U ints = round_to_ints(mul(widen(x + i * LANES), inverse));
      store_lowest_bytes(numbers + i * LANES, ints);
      total = add_ints(total, ints);
    }
    sum = sum_int_lanes(total);
  }

  // Quantize what `quantize` has rounded away from a whole group, in steps of scale / FINE; returns the sum of the steps.
  template <class Number>
  int32_t quantize_rest(const Number* x, int8_t* rest) const {
    U total = set1_units(0);
    for (int i = 0; i < SIZE / LANES; ++i) {
      const V left = sub(mul(widen(x + i * LANES), inverse), load_bytes(numbers + i * LANES));
      const U ints = round_to_ints(mul(left, set1((float)FINE)));
      store_lowest_bytes(rest + i * LANES, ints);
      total = add_ints(total, ints);
    }
    return sum_int_lanes(total);
  }
};

// -- bytes multiplied -------------------------------------------------------------------------------------------------

// Way multiplies four bytes of x by four of a weight. The weight is stored with ZERO added to each number, and is
// multiplied with OFFSET added. Narrow is for stored numbers of up to 6 bits, to which nothing is added.
const int ZERO = 128;

#if defined(HAS_VNNI)
struct Way {
  static const int OFFSET = ZERO;
  template <int M, int J>
  static inline __attribute__((always_inline)) void step(U (&sum)[M][J], const U (&w)[J], const char* x) {
    UNROLLED for (int m = 0; m < M; ++m) {
      const U a = set1_units(((const uint32_t*)x)[m]);
      UNROLLED for (int j = 0; j < J; ++j) add_bytes(sum[m][j], w[j], a);
    }
  }
};
#else
// Multiplies magnitudes of weights by x with the signs of the weights: the sum of two such products fits in 16 bits.
struct Way {
  static const int OFFSET = 0;
  template <int M, int J>
  static inline __attribute__((always_inline)) void step(U (&sum)[M][J], const U (&w)[J], const char* x) {
    UNROLLED for (int j = 0; j < J; ++j) {
      const U weights = xor_(w[j], set1_units(0x80808080)), sizes = absolute_bytes(weights);
      UNROLLED for (int m = 0; m < M; ++m) {
        const U products = madd_bytes(sizes, signed_bytes(set1_units(((const uint32_t*)x)[m]), weights));
        sum[m][j] = add_ints(sum[m][j], madd_pairs(products, set1_units(0x00010001)));
        in_order(sum[m][j]);
      }
    }
  }
};

// Adds the products of several steps in 16 bits, which takes half the time.
struct Narrow {
  // How many steps' sums fit in 16 bits, of `most`: a step adds two products of at most `largest` * LARGEST.
  static constexpr int steps(int largest, int most) {
    return 2 * largest * LARGEST * most < 1 << 15 ? most : steps(largest, most / 2);
  }

  template <int M, int J>
  static inline __attribute__((always_inline)) void step(U (&products)[M][J], bool first, const U (&w)[J], const char* x) {
    UNROLLED for (int m = 0; m < M; ++m) {
      const U a = set1_units(((const uint32_t*)x)[m]);
      UNROLLED for (int j = 0; j < J; ++j) {
        const U two = madd_bytes(w[j], a);
        products[m][j] = first ? two : add_halves(products[m][j], two);
        in_order(products[m][j]);
      }
    }
  }

  template <int M, int J>
  static inline __attribute__((always_inline)) void add(U (&sum)[M][J], const U (&products)[M][J]) {
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < J; ++j)
        sum[m][j] = add_ints(sum[m][j], madd_pairs(products[m][j], set1_units(0x00010001)));
  }
};
#endif

}  // namespace
