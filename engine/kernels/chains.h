// Products of plain numbers, float32 or bfloat16, see matmul.h: each element of y is one chain of fused multiply-adds
// along k.
#pragma once
#include "matmul.h"

namespace {

// Each number of x is broadcast once for all panels.
template <int M, int J>
inline __attribute__((always_inline)) void multiply(V (&sum)[M][J], const float* x, const V (&weights)[J]) {
  UNROLLED for (int m = 0; m < M; ++m) {
    const V a = set1(x[m]);
    UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, weights[j], sum[m][j]);
  }
}

// Readers of LANES units of a row of x, padded with zeros: a unit is a float, or a pair of bfloat16.
auto floats(const float* x, int64_t columns) {
  return [=](int64_t m, int64_t k) { return as_units(get(x + m * columns + k, columns - k)); };
}

auto pairs(const uint16_t* x, int64_t columns) {
  return [=](int64_t m, int64_t k) {
    const int64_t left = columns - 2 * k;
    if (left >= 2 * LANES) return load_units(x + m * columns + 2 * k);
    uint16_t numbers[2 * LANES] = {};
    memcpy(numbers, x + m * columns + 2 * k, (size_t)left * 2);
    return load_units(numbers);
  };
}

struct Floats {
  typedef float Number;
  static const int PER_UNIT = 1, X_BYTES = 4;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    V weights[2 * P];
    UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = load((const float*)(w + j / 2 * panel) + j % 2 * LANES);
    multiply(sum, (const float*)x, weights);
  }
  static void pack_x(const float* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    if (rows == 1) memcpy(to, x, (size_t)columns * 4);
    else interleave<1>(units, rows, floats(x, columns), [](U unit, int) { return unit; }, to);
  }
};

// Widens bfloat16 to float by shifts, which is exact, and computes in floats.
struct Widened {
  typedef uint16_t Number;
  static const int PER_UNIT = 2, X_BYTES = 8;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    U units[2 * P];
    V weights[2 * P];
    UNROLLED for (int j = 0; j < 2 * P; ++j) units[j] = load_units((const float*)(w + j / 2 * panel) + j % 2 * LANES);
    UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = lower(units[j]);
    multiply(sum, (const float*)x, weights);
    UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = upper(units[j]);
    multiply(sum, (const float*)x + M, weights);
  }
  static void pack_x(const uint16_t* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    const auto widened = [](U unit, int half) { return as_units(half ? upper(unit) : lower(unit)); };
    interleave<2>(units, rows, pairs(x, columns), widened, to);
  }
};

#if defined(HAS_DOT)
struct Dotted {
  typedef uint16_t Number;
  static const int PER_UNIT = 2, X_BYTES = 4;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    UNROLLED for (int p = 0; p < P; ++p) {
      const U w0 = load_units(w + p * panel), w1 = load_units((const float*)(w + p * panel) + LANES);
      UNROLLED for (int m = 0; m < M; ++m) {
        const U a = set1_units(((const uint32_t*)x)[m]);
        sum[m][2 * p] = dot(sum[m][2 * p], a, w0);
        sum[m][2 * p + 1] = dot(sum[m][2 * p + 1], a, w1);
      }
    }
  }
  static void pack_x(const uint16_t* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    interleave<1>(units, rows, pairs(x, columns), [](U unit, int) { return unit; }, to);
  }
};
typedef Dotted Halves;
#else
typedef Widened Halves;
#endif

// Computes each element by one chain of fused multiply-adds along k, in a register.
template <class Unit>
struct Chain : Unit, InPanels<Chain<Unit>> {
  static int64_t units(int64_t columns) { return (columns + Unit::PER_UNIT - 1) / Unit::PER_UNIT; }
  static int64_t row_bytes(int64_t units) { return units * Unit::X_BYTES; }

  template <int M, int P>
  static inline __attribute__((always_inline)) void sums(const Matrix&, int64_t units, int64_t, const char* w, char*,
                                                         const char* xs, const char* ahead, int lines,
                                                         float (&out)[M][P][WIDTH]) {
    V sum[M][2 * P];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) sum[m][j] = zero();
    const int64_t size = Chain::panel_bytes(units);
    for (int64_t u = 0; u < units;) {
      const int64_t end = u + 8 < units ? u + 8 : units;
      for (int l = 0; l < 8 * lines; ++l, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      for (; u < end; ++u, w += WIDTH * 4, xs += M * Unit::X_BYTES) Unit::template step<M, P>(sum, xs, w, size);
    }
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) store(out[m][0] + j * LANES, sum[m][j]);
  }
};

}  // namespace
