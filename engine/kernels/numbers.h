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

static inline void write(float* p, V v) { store(p, v); }
static inline void write(uint16_t* p, V v) { store_halves(p, rounded(v)); }

template <class Number>
static inline void put(Number* p, V v, int64_t count) {
  if (count >= LANES) return write(p, v);
  Number some[LANES];
  write(some, v);
  memcpy(p, some, (size_t)count * sizeof(Number));
}
