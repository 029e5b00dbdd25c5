// Numbers of the two kinds that models compute in, as vectors. Of a vector `count` numbers may be there: the rest is 0
// where it is read, and not written.
#pragma once
#include "isa.h"

#include <string.h>

static inline V widen(const float* p) { return load(p); }
static inline V widen(const uint16_t* p) { return load_bf16(p); }

template <class Number>
static inline V get(const Number* p, int64_t count) {
  if (count >= LANES) return widen(p);
  Number some[LANES] = {};
  memcpy(some, p, (size_t)count * sizeof(Number));
  return widen(some);
}

static inline float as_number(int32_t bits) {
  union { int32_t i; float f; } u = {bits};
  return u.f;
}

// The largest of `count` vectors of numbers without their signs; no number is more than infinity is more than any.
template <class Read>
static inline float top_of(int64_t count, Read read) {
  U most = all_units(0);
  for (int64_t i = 0; i < count; ++i) most = greater_ints(most, both(as_units(read(i)), all_units(0x7fffffff)));
  return as_number(largest_int(most));
}

static inline void write(float* p, V v) { store(p, v); }
static inline void write(uint16_t* p, V v) { store_halves(p, rounded(v)); }

template <class Number>
static inline void put(Number* p, V v, int64_t count) {
  if (count >= LANES) return write(p, v);
  Number some[LANES];
  write(some, v);
  memcpy(p, some, (size_t)count * sizeof(Number));
}
