// Vectors of the two number types that models compute in, float32 and bfloat16. A vector may hold only `count` numbers:
// the others read as 0 and are not written.
#pragma once
#include "isa.h"
#include "structures.h"

#include <string.h>

#define UNROLLED _Pragma("GCC unroll 16")

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline V widen(const float* p) { return load(p); }
static inline V widen(const uint16_t* p) { return load_bf16(p); }

template <class Number>
static inline V get(const Number* p, int64_t count) {
  if (count >= LANES) return widen(p);
  Number some[LANES] = {};
  memcpy(some, p, (size_t)count * sizeof(Number));
  return widen(some);
}

static inline float bits_to_float(int32_t bits) {
  union { int32_t i; float f; } u = {bits};
  return u.f;
}

// The largest magnitude in `count` vectors. NaN counts as larger than infinity.
template <class Read>
static inline float max_magnitude(int64_t count, Read read) {
  U magnitude = set1_units(0);
  for (int64_t i = 0; i < count; ++i) magnitude = max_ints(magnitude, and_(as_units(read(i)), set1_units(0x7fffffff)));
  return bits_to_float(max_int_lane(magnitude));
}

static inline void write(float* p, V v) { store(p, v); }
static inline void write(uint16_t* p, V v) { store_halves(p, to_bf16_units(v)); }

// Round to Number's precision.
template <class Number>
static inline V round_to(V v) {
  return sizeof(Number) == 4 ? v : lower(to_bf16_units(v));
}

template <class Number>
static inline void put(Number* p, V v, int64_t count) {
  if (count >= LANES) return write(p, v);
  Number some[LANES];
  write(some, v);
  memcpy(p, some, (size_t)count * sizeof(Number));
}

// max(0, x) squared. NaN stays NaN.
static inline V squared_relu(V x) {
  x = where_less(x, zero(), zero(), x);
  return mul(x, x);
}

// activation(gate) * up. NaN stays NaN.
static inline V gated(const Gate& how, V gate, V up) {
  const V one = set1(1.0f);
  switch (how.activation) {
    case 0: return mul(silu(gate), up);
    case 1: return mul(gelu_tanh(gate), up);
    case 3: return mul(gelu(gate), up);
    case 4: return mul(where_less(gate, zero(), zero(), gate), up);
  }
  const V limit = set1(how.limit);
  gate = min(limit, gate), up = max(set1(-how.limit), min(limit, up));
  return mul(divide(gate, add(one, exponential(mul(gate, set1(-how.alpha))))), add(up, one));
}
