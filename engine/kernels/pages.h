// The paged KV cache: its layout, and writing keys and values to it.
//
// Units. A unit is four bytes: one float, or two bfloat16 with the first in the lower half. In an int8 cache it is one
// byte. Keys are paired along the head dimension and values along the tokens, so that one vector instruction processes
// a unit of LANES tokens (scores) or of LANES dimensions (weighted values), and no sum runs across a vector's lanes.
//
// Layout. A block holds, for each KV head, consecutive pages of 16 tokens. A page is two cells: the keys as [unit of
// the dimension][16 tokens], then the values as [unit of the tokens][dimension]. A head's part of a block is therefore
// contiguous. If the block size or a head's size is not a multiple of 16, the layout is plain: for each KV head the
// keys as [token][dimension], then the values. Each tile is then copied into cells before use, once for all queries.
//
// int8. A key or a value is a vector of integers from -127 to 127 and a float scale, which is the largest magnitude /
// 127. The 16 scales of a page's keys follow the keys' cell, and those of its values follow the values' cell. In the
// plain layout each scale follows its key or value.
#pragma once
#include "structures.h"
#include "numbers.h"

#include <float.h>
#include <math.h>

namespace {

const int PAGE = 16;

// The factor from int8 to numbers, and its inverse. A vector too small for an exact scale is stored as zeros; one with
// a NaN or an infinity gets a scale of NaN.
struct Scale {
  float factor, inverse;
  template <class Number>
  static Scale of(const Number* x, int64_t size) {
    const auto read = [=](int64_t i) { return get(x + i * LANES, size - i * LANES); };
    const float top = max_magnitude(ceil_div(size, LANES), read);
    if (!(top <= FLT_MAX)) return {NAN, 0.0f};
    if (top < 127 * FLT_MIN) return {0.0f, 0.0f};
    return {top / 127, 127 / top};
  }
};

// One layer's cache. Number: the model's type; Held: the cache's type, Number or int8_t.
template <class Number, class Held>
struct Pages {
  static const bool SCALED = sizeof(Held) == 1;
  static const int UNIT = SCALED ? 1 : 4, PER_UNIT = UNIT / sizeof(Held);
  static const int SCALE = SCALED ? sizeof(float) : 0;  // bytes for each key or value

  const Call& call;
  char* const cache;
  int64_t units;   // of a key
  int64_t padded;  // numbers of a value, rounded up to whole vectors of every width
  int shift;       // log2 of the block size, or -1 if that is no power of two: a division would cost measurable time
  bool packed;

  Pages(const Call& call, void* cache) : call(call), cache((char*)cache) {
    units = ceil_div(call.head_dim, PER_UNIT);
    padded = ceil_div(call.v_head_dim, PAGE) * PAGE;
    const bool is_power = (call.block_size & (call.block_size - 1)) == 0;
    shift = is_power ? __builtin_ctzll((uint64_t)call.block_size) : -1;
    packed = call.block_size % PAGE == 0 && call.head_dim % PAGE == 0 && call.v_head_dim % PAGE == 0;
  }

  // Bytes of a page's keys and of its values, without the scales that follow each.
  int64_t key_cell() const { return units * PAGE * UNIT; }
  int64_t value_cell() const { return PAGE / PER_UNIT * padded * UNIT; }
  int64_t value_at() const { return key_cell() + PAGE * SCALE; }  // offset in a page
  int64_t page() const { return value_at() + value_cell() + PAGE * SCALE; }
  // Bytes of a token's key, and of its value, in the plain layout.
  int64_t key_line() const { return call.head_dim * sizeof(Held) + SCALE; }
  int64_t value_line() const { return call.v_head_dim * sizeof(Held) + SCALE; }

  int64_t block_of(int64_t position) const {
    return shift >= 0 ? position >> shift : (int64_t)((uint32_t)position / (uint32_t)call.block_size);
  }

  // The address of a KV head's part of a block: the page that holds `offset` in the packed layout, else the keys.
  char* address(int64_t block, int64_t head, int64_t offset) const {
    char* share = cache + block * call.block_bytes + head * call.block_size * (key_line() + value_line());
    return share + (packed ? offset / PAGE * page() : 0);
  }

  // Where a token's key and its value are in the plain layout; share: the address of the KV head's part of its block.
  char* plain_key(char* share, int64_t offset) const { return share + offset * key_line(); }
  char* plain_value(char* share, int64_t offset) const {
    return share + call.block_size * key_line() + offset * value_line();
  }

  // -- copying a key or value in the cache's type into cells; t: its index in the page --------------------------------

  void lay_key(const Held* key, char* cell, int64_t t) const {
    const int64_t whole = call.head_dim / PER_UNIT;
    for (int64_t u = 0; u < whole; ++u) memcpy(cell + (u * PAGE + t) * UNIT, key + u * PER_UNIT, UNIT);
    if (whole < units) memcpy(cell + (whole * PAGE + t) * UNIT, key + whole * PER_UNIT, sizeof(Held));
    if (SCALED) memcpy(cell + key_cell() + t * SCALE, key + call.head_dim, SCALE);
  }

  void lay_value(const Held* value, char* cell, int64_t t) const {
    Held* to = (Held*)cell + t / PER_UNIT * padded * PER_UNIT + t % PER_UNIT;
    for (int64_t d = 0; d < call.v_head_dim; ++d) to[d * PER_UNIT] = value[d];
    if (SCALED) memcpy(cell + value_cell() + t * SCALE, value + call.v_head_dim, SCALE);
  }

  // Two values that share units; t is even.
  void lay_values(const Held* first, const Held* second, char* cell, int64_t t) const {
    lay_pair(first, second, cell + t / PER_UNIT * padded * UNIT, call.v_head_dim);
  }
  static void lay_pair(const float* first, const float* second, char* to, int64_t dim) {
    memcpy(to, first, (size_t)dim * 4);
    memcpy(to + dim * 4, second, (size_t)dim * 4);
  }
  static void lay_pair(const uint16_t* first, const uint16_t* second, char* to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) {
      const U low = shift_right<16>(as_units(load_bf16(first + d))), high = as_units(load_bf16(second + d));
      store_units(to + d * 4, or_(low, high));
    }
  }

  // -- writing new tokens ---------------------------------------------------------------------------------------------

  // Write the keys and values of tokens [from, to) for one KV head. k and v point at the first token and head. Threads
  // may write different tokens at once: these share cache lines but no number.
  void write(int64_t head, const Number* k, const Number* v, int64_t from, int64_t to) const {
    for (int64_t i = from; i < to; ++i) {
      const int64_t block = call.slots[i] / call.block_size, offset = call.slots[i] % call.block_size;
      const Number *key = k + i * call.k_token + head * call.k_head, *value = v + i * call.v_token + head * call.v_head;
      const bool paired = offset % 2 == 0 && i + 1 < to && call.slots[i + 1] == call.slots[i] + 1;
      i += write_one(key, value, address(block, head, offset), offset, paired);
    }
  }

  // Write one token, and the next one too if `paired`. Returns the number of tokens written beyond the first.
  int64_t write_one(const Held* key, const Held* value, char* share, int64_t offset, bool paired) const {
    if (!packed) {
      memcpy(plain_key(share, offset), key, (size_t)key_line());
      memcpy(plain_value(share, offset), value, (size_t)value_line());
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
      narrow(key, call.head_dim, share + t, PAGE, share + key_cell() + t * SCALE);
      narrow(value, call.v_head_dim, values + t * padded, 1, values + value_cell() + t * SCALE);
    } else {
      char *to_key = plain_key(share, offset), *to_value = plain_value(share, offset);
      narrow(key, call.head_dim, to_key, 1, to_key + call.head_dim);
      narrow(value, call.v_head_dim, to_value, 1, to_value + call.v_head_dim);
    }
    return 0;
  }

  // Quantize a key or value of `size` numbers to int8, `step` bytes apart, and write its scale.
  template <class Wide>
  void narrow(const Wide* x, int64_t size, char* to, int64_t step, char* to_scale) const {
    const Scale scale = Scale::of(x, size);
    memcpy(to_scale, &scale.factor, SCALE);
    for (int64_t d = 0; d < size; d += LANES) {
      const int64_t count = min(LANES, size - d);
      int8_t bytes[LANES];
      store_bytes(bytes, mul(get(x + d, count), set1(scale.inverse)));
      for (int64_t i = 0; i < count; ++i) to[(d + i) * step] = (char)bytes[i];
    }
  }
};

}  // namespace
