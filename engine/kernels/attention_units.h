// Ways to multiply a unit (pages.h) of queries by one of keys, or one of weights by one of values: one for each pair of
// types.
//
// step: sum[m][j] += x[m] * w[j] over AT_ONCE units, which are w_bytes apart. Number `half` of query m's unit is
// x[m * A + half * B].
#pragma once
#include "pages.h"

namespace {

struct Floats {
  typedef float Number;
  typedef Number Held;
  static const int X_BYTES = 4, AT_ONCE = 1;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at, int64_t) {
    V b[J];
    UNROLLED for (int j = 0; j < J; ++j) b[j] = load((const float*)(w[j] + at));
    UNROLLED for (int m = 0; m < M; ++m) {
      const V a = set1(((const float*)x)[m * A]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
  }
  // Store unit u of query m of a group of `tall` queries.
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) { ((uint32_t*)x)[u * tall + m] = unit; }
  // Store softmax weights, rounded to the type they are multiplied in; returns the rounded weights.
  static V store_weights(char* p, int lane, V e) {
    store((float*)p + lane, e);
    return e;
  }
};

// Widens bfloat16 to float by shifts, which is exact, and computes in floats.
struct Widened {
  typedef uint16_t Number;
  typedef Number Held;
  static const int X_BYTES = 8, AT_ONCE = 1;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at, int64_t) {
    V b[J];
    UNROLLED for (int j = 0; j < J; ++j) b[j] = lower(load_units(w[j] + at));
    UNROLLED for (int m = 0; m < M; ++m) {
      const V a = set1(((const float*)x)[m * A]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
    UNROLLED for (int j = 0; j < J; ++j) b[j] = upper(load_units(w[j] + at));
    UNROLLED for (int m = 0; m < M; ++m) {
      const V a = set1(((const float*)x)[m * A + B]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
  }
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) {
    ((uint32_t*)x)[2 * u * tall + m] = unit << 16;
    ((uint32_t*)x)[(2 * u + 1) * tall + m] = unit & 0xffff0000;
  }
  static V store_weights(char* p, int lane, V e) { return Floats::store_weights(p, lane, e); }
};

#if defined(HAS_DOT)
struct Dotted {
  typedef uint16_t Number;
  typedef Number Held;
  static const int X_BYTES = 4, AT_ONCE = 1;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at, int64_t) {
    U b[J];
    UNROLLED for (int j = 0; j < J; ++j) b[j] = load_units(w[j] + at);
    UNROLLED for (int m = 0; m < M; ++m) {
      uint32_t pair;
      memcpy(&pair, x + m * (A == 1 ? 4 : A * 2), 4);
      const U a = set1_units(pair);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = dot(sum[m][j], a, b[j]);
    }
  }
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) { Floats::put(x, u, m, tall, unit); }
  // The weights' sum adds the rounded weights, so that they still sum to 1.
  static V store_weights(char* p, int lane, V e) {
    const U halves = to_bf16_units(e);
    store_halves((uint16_t*)p + lane, halves);
    return lower(halves);
  }
};
typedef Dotted Halves;
#else
typedef Widened Halves;
#endif

// Widens int8 to float, which is exact; queries and weights are floats.
template <class Model>
struct WidenedBytes {
  typedef Model Number;
  typedef int8_t Held;
  static const int X_BYTES = 4, AT_ONCE = 1;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at, int64_t) {
    V b[J];
    UNROLLED for (int j = 0; j < J; ++j) b[j] = load_bytes((const int8_t*)w[j] + at);
    UNROLLED for (int m = 0; m < M; ++m) {
      const V a = set1(((const float*)x)[m * A]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
  }
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) {
    Floats::put(x, u, m, tall, sizeof(Number) == 2 ? unit << 16 : unit);
  }
  static V store_weights(char* p, int lane, V e) { return Floats::store_weights(p, lane, e); }
};

#if defined(HAS_DOT)
// Widens int8 to bfloat16, which is exact, and multiplies pairs of units like those of a cache in bfloat16. A prompt of
// 512 tokens takes 0.7 of the time that WidenedBytes takes.
struct DottedBytes {
  typedef uint16_t Number;
  typedef int8_t Held;
  static const int X_BYTES = 2, AT_ONCE = 2;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at, int64_t w_bytes) {
    U b[J];
    UNROLLED for (int j = 0; j < J; ++j) {
      const V first = load_bytes((const int8_t*)w[j] + at), second = load_bytes((const int8_t*)w[j] + at + w_bytes);
      b[j] = or_(shift_right<16>(as_units(first)), as_units(second));  // the lower halves of such floats are zeros
    }
    UNROLLED for (int m = 0; m < M; ++m) {
      uint32_t pair;
      memcpy(&pair, x + m * (A == 1 ? 4 : A * 2), 4);
      const U a = set1_units(pair);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = dot(sum[m][j], a, b[j]);
    }
  }
  // The second number of a pair is zero until it is put: with an odd number of units it is multiplied by what follows.
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) {
    uint32_t& pair = ((uint32_t*)x)[u / 2 * tall + m];
    pair = u % 2 ? pair | unit << 16 : unit;
  }
  // A weight times its value's scale is rounded; the sum of the weights adds the weight itself. The difference is at most
  // half of the rounding of the largest number of a value to int8.
  static V store_weights(char* p, int lane, V e) { return Dotted::store_weights(p, lane, e); }
};
#endif

template <class Model>
struct Bytes : WidenedBytes<Model> {};
#if defined(HAS_DOT)
template <>
struct Bytes<uint16_t> : DottedBytes {};
#endif

// sum[m][j] += x[m] * w[j] over all units. Prefetches the same offsets from `ahead` unless it is null: every EACH-th of
// its vectors starts a cache line, as do units at multiples of 64 bytes.
template <class Kind, int A, int B, int EACH, int M, int J>
INLINE void accumulate(V (&sum)[M][J], const char* x, int64_t x_bytes, const char* const (&w)[J], int64_t w_bytes,
                       int64_t units, const char* const* ahead) {
  constexpr int STEP = Kind::AT_ONCE;
  for (int64_t u = 0, at = 0; u < units; u += STEP, at += STEP * w_bytes, x += STEP * x_bytes) {
    for (int i = 0; ahead && i < STEP; ++i)
      if ((at + i * w_bytes) % 64 == 0)
        UNROLLED for (int j = 0; j < J; j += EACH) __builtin_prefetch(ahead[j] + at + i * w_bytes, 0, 2);
    Kind::template step<A, B>(sum, x, w, at, w_bytes);
  }
}

}  // namespace
