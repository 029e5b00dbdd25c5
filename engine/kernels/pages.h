// The paged cache: where keys and values lie in it, and the writing of them.
//
// Units. Four bytes: one float, or two bfloat16, the first in the lower half; in a cache of int8 one byte. Keys are
// paired along their dimension, values along the tokens, so that one vector instruction takes a unit of LANES tokens
// (scores) or of LANES dimensions (weighted values), and no sum ever runs across a vector.
//
// Layout. A block is, for each KV head, its pages of 16 tokens one after another, of each page first the keys as
// [unit of the dimension][16 tokens], then the values as [unit of the tokens][dimension]: two cells. What a head reads
// of a block is one run of memory, and heads lie side by side. Where the block size or the head size is no multiple of
// 16 the layout is plain, for each KV head [token][dimension] of keys, then of values, and a tile is brought into the
// form of cells before it is used, once for all queries.
//
// int8. A key or a value is whole numbers from -127 to 127 and a scale, a float, that they are multiplied with: the
// largest number's size / 127. The 16 scales of a page's keys lie behind their cell, and those of its values behind
// theirs; in the plain layout each lies behind its key or value. So they are part of the run.
#pragma once
#include "structures.h"
#include "numbers.h"

#include <float.h>
#include <math.h>

namespace {

const int PAGE = 16;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What turns numbers into whole ones, and these back. Numbers too small for a scale to be exact are taken as zeros; what
// is no number, or infinite, makes a scale that is none.
struct Scale {
  float factor, inverse;
  template <class Number>
  static Scale of(const Number* x, int64_t size) {
    const float top = top_of(up(size, LANES), [=](int64_t i) { return get(x + i * LANES, size - i * LANES); });
    if (!(top <= FLT_MAX)) return {NAN, 0.0f};
    if (top < 127 * FLT_MIN) return {0.0f, 0.0f};
    return {top / 127, 127 / top};
  }
};

// The cache of one layer. Number: what the model computes in; Held: the same, or int8_t.
template <class Number, class Held>
struct Pages {
  static const bool SCALED = sizeof(Held) == 1;
  static const int UNIT = SCALED ? 1 : 4, PER_UNIT = UNIT / sizeof(Held);
  static const int SCALE = SCALED ? sizeof(float) : 0;  // bytes of a token's

  const Call& call;
  char* const cache;
  int64_t units;   // of a key
  int64_t padded;  // head size up to whole vectors of every width
  int shift;       // of a block size that is a power of two, else -1: divisions would show
  bool packed;

  Pages(const Call& call, void* cache) : call(call), cache((char*)cache) {
    units = up(call.head_dim, PER_UNIT);
    padded = up(call.head_dim, PAGE) * PAGE;
    const bool is_power = (call.block_size & (call.block_size - 1)) == 0;
    shift = is_power ? __builtin_ctzll((uint64_t)call.block_size) : -1;
    packed = call.block_size % PAGE == 0 && call.head_dim % PAGE == 0;
  }

  // Bytes of a page's keys and values; behind each lie its scales.
  int64_t key_cell() const { return units * PAGE * UNIT; }
  int64_t value_cell() const { return PAGE / PER_UNIT * padded * UNIT; }
  int64_t value_at() const { return key_cell() + PAGE * SCALE; }  // in a page
  int64_t page() const { return value_at() + value_cell() + PAGE * SCALE; }
  // Bytes of a token's key or value in the plain layout.
  int64_t line() const { return call.head_dim * sizeof(Held) + SCALE; }

  int64_t block_of(int64_t place) const {
    return shift >= 0 ? place >> shift : (int64_t)((uint32_t)place / (uint32_t)call.block_size);
  }

  // Of a KV head's share of a block: in the packed layout the page of `offset`, else the keys.
  char* place(int64_t block, int64_t head, int64_t offset) const {
    char* share = cache + (block * call.kv_heads + head) * call.block_size * 2 * line();
    return share + (packed ? offset / PAGE * page() : 0);
  }

  // -- one key or value as the cache holds it, into cells; t: its place in the page ---------------------------------

  void lay_key(const Held* key, char* cell, int64_t t) const {
    const int64_t whole = call.head_dim / PER_UNIT;
    for (int64_t u = 0; u < whole; ++u) memcpy(cell + (u * PAGE + t) * UNIT, key + u * PER_UNIT, UNIT);
    if (whole < units) memcpy(cell + (whole * PAGE + t) * UNIT, key + whole * PER_UNIT, sizeof(Held));
    if (SCALED) memcpy(cell + key_cell() + t * SCALE, key + call.head_dim, SCALE);
  }

  void lay_value(const Held* value, char* cell, int64_t t) const {
    Held* to = (Held*)cell + t / PER_UNIT * padded * PER_UNIT + t % PER_UNIT;
    for (int64_t d = 0; d < call.head_dim; ++d) to[d * PER_UNIT] = value[d];
    if (SCALED) memcpy(cell + value_cell() + t * SCALE, value + call.head_dim, SCALE);
  }

  // Two values that share units, t even.
  void lay_values(const Held* first, const Held* second, char* cell, int64_t t) const {
    lay_pair(first, second, cell + t / PER_UNIT * padded * UNIT, call.head_dim);
  }
  static void lay_pair(const float* first, const float* second, char* to, int64_t dim) {
    memcpy(to, first, (size_t)dim * 4);
    memcpy(to + dim * 4, second, (size_t)dim * 4);
  }
  static void lay_pair(const uint16_t* first, const uint16_t* second, char* to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) {
      const U low = shifted_down<16>(as_units(load_bf16(first + d))), high = as_units(load_bf16(second + d));
      store_units(to + d * 4, either(low, high));
    }
  }

  // -- new ones -----------------------------------------------------------------------------------------------------

  // Write the keys and values of tokens [from, to) of one KV head; k and v: of the first token and head. Different
  // tokens never share a number, only cache lines.
  void write(int64_t head, const Number* k, const Number* v, int64_t from, int64_t to) const {
    for (int64_t i = from; i < to; ++i) {
      const int64_t block = call.slots[i] / call.block_size, offset = call.slots[i] % call.block_size;
      const Number *key = k + i * call.k_token + head * call.k_head, *value = v + i * call.v_token + head * call.v_head;
      const bool paired = offset % 2 == 0 && i + 1 < to && call.slots[i + 1] == call.slots[i] + 1;
      i += write_one(key, value, place(block, head, offset), offset, paired);
    }
  }

  // A token's; where it is paired the next one's too. Gives how many more than one were written.
  int64_t write_one(const Held* key, const Held* value, char* share, int64_t offset, bool paired) const {
    if (!packed) {
      memcpy(share + offset * line(), key, (size_t)line());
      memcpy(share + (call.block_size + offset) * line(), value, (size_t)line());
      return 0;
    }
    lay_key(key, share, offset % PAGE);
    if (paired) {
      lay_key(key + call.k_token, share, offset % PAGE + 1);
      lay_values(value, value + call.v_token, share + value_at(), offset % PAGE);
    } else {
      lay_value(value, share + value_at(), offset % PAGE);
    }
    return paired;
  }

  template <class Wide>
  int64_t write_one(const Wide* key, const Wide* value, char* share, int64_t offset, bool) const {
    if (packed) {
      const int64_t t = offset % PAGE;
      char* values = share + value_at();
      narrow(key, share + t, PAGE, share + key_cell() + t * SCALE);
      narrow(value, values + t * padded, 1, values + value_cell() + t * SCALE);
    } else {
      char *to_key = share + offset * line(), *to_value = share + (call.block_size + offset) * line();
      narrow(key, to_key, 1, to_key + call.head_dim);
      narrow(value, to_value, 1, to_value + call.head_dim);
    }
    return 0;
  }

  // A key or value as whole numbers, each `step` bytes behind the one before, and their scale.
  template <class Wide>
  void narrow(const Wide* x, char* to, int64_t step, char* to_scale) const {
    const Scale scale = Scale::of(x, call.head_dim);
    memcpy(to_scale, &scale.factor, SCALE);
    for (int64_t d = 0; d < call.head_dim; d += LANES) {
      const int64_t count = smaller(LANES, call.head_dim - d);
      int8_t some[LANES];
      store_bytes(some, mul(get(x + d, count), all(scale.inverse)));
      for (int64_t i = 0; i < count; ++i) to[(d + i) * step] = (char)some[i];
    }
  }
};

}  // namespace
