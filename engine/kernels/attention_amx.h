// The computation of some queries by one tile of keys and values with the processor's tiles (tiles.h), for caches in
// bfloat16. Here a tile is 64 keys, and the processor's tiles are called registers.
//
// Order. That of attention_tile.h; a score is one chain of products along the head, 32 dimensions each, and values are
// added in two products of 32 keys each. A decode row is computed by the same products as a prompt, in registers of as
// many rows as there are queries: rows never meet. Products for keys that a query does not see do not change its sums,
// because the weights are exactly 0. A product flushes subnormal sums to zero, but such a query has none: its sums are
// zero or come from a product. Rescaling may make sums subnormal, but only for a query that sees the tile, in any
// batch.
//
// Layout. A page's keys are a register for each 32 dimensions as they lie; if the head size is no multiple of 32, the
// last dimensions are copied and padded with zeros. A register of values has 16 pairs of keys, those of two pages, so the
// values of a tile are copied, once for all queries of a task. Copying them costs less than products of one page each,
// which take as long as those of two.
#pragma once
#include "attention_tile.h"

#if defined(HAS_TILES)
#include "tiles.h"

namespace {

const int64_t REGISTER = TILE_ROWS * TILE_BYTES;  // bytes
static_assert(FEW <= TILE_ROWS, "the queries of each head of a task with several heads fit one register");

struct RegisterPairs {
  typedef uint16_t Number;
  typedef Number Held;
  static const int X_BYTES = 4;
  // Store softmax weights, rounded to nearest; returns the rounded weights. e * (2^16 + 1) - (e * (2^16 + 1) - e) leaves
  // the first 8 bits of e (T. J. Dekker, A floating-point technique for extending the available precision, 1971), in
  // fewer instructions than to_bf16_units: an eighth of the time of all but the products. Subnormal weights are an
  // exception, but a register takes them as zeros.
  static V store_weights(char* p, int lane, V e) {
    const V scaled = mul(e, set1(65537.0f)), rounded = sub(scaled, sub(scaled, e));
    store_halves((uint16_t*)p + lane, shift_right<16>(as_units(rounded)));
    return rounded;
  }
};

struct ReadyTile : Tile {
  const char* values;  // [two pages][16 dimensions][pair of keys][64 bytes]
  const char* rest;    // the last dimensions of the keys, [page][unit][64 bytes], if they are no whole register
};

// Groups of up to 32 queries, two registers of rows. If a KV head has more than 16 queries, registers have 16 rows, and
// the last rows may belong to no query. They read and write memory after the last query, which is why the memory of
// queries and states is rounded up to 16 (Grouping::rounded). What they compute is not used.
// T: Tiles, or the emulation, with which a trial compares them.
template <class T>
struct Registers : PagedTasks<RegisterPairs> {
  typedef PagedTasks<RegisterPairs> Base;
  static const int WEIGHT_BYTES = TILE * 2;  // of a query

  Registers(const Call& call, void* cache) : Base(call, cache, {2 * TILE_ROWS, 1, TILE_ROWS}) {}

  int64_t steps() const { return ceil_div(cache.units, TILE_ROWS); }  // products of a score
  int64_t query_bytes() const { return steps() * TILE_BYTES; }
  int64_t value_bytes() const { return padded / LANES * REGISTER; }  // of two pages
  int64_t ready_bytes() const { return PAGES / 2 * value_bytes() + PAGES * REGISTER; }
  int64_t cell_bytes() const { return ready_bytes() + (cache.packed ? 0 : PAGES * cache.page()); }

  // Registers 0 to 3 are sums, 4 and 5 queries or weights, 6 and 7 keys or values. `each`: the queries of a KV head.
  static void begin(int64_t each) {
    TileShapes shapes;
    for (int t = 0; t < 6; ++t) shapes.set(t, min(each, TILE_ROWS));
    shapes.set(6, TILE_ROWS), shapes.set(7, TILE_ROWS);
    T::configure(shapes);
  }
  static void end_task() { T::release(); }

  // Copy query m of a group of `tall`; the group is [step][query][64 bytes].
  void load_query(const uint16_t* from, char* x, int64_t m, int64_t tall) const {
    for (int64_t s = 0; s < steps(); ++s) {
      const int64_t bytes = min(TILE_BYTES, 2 * call.head_dim - s * TILE_BYTES);
      char* to = x + (s * tall + m) * TILE_BYTES;
      memcpy(to, (const char*)from + s * TILE_BYTES, (size_t)bytes);
      memset(to + bytes, 0, (size_t)(TILE_BYTES - bytes));
    }
  }

  static INLINE void prefetch(const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
  }

  // A tile that is ready for use, with zeros for the values of keys that do not exist or are not seen: they may be NaN,
  // and 0 * NaN is NaN. Prefetches the values of `next` unless it is null.
  ReadyTile fetch(const Task& task, int64_t head, int64_t at, char* cells, const Tile* next) const {
    ReadyTile tile;
    (Tile&)tile = cache.packed ? locate(task, head, at) : gather(task, head, at, cells + ready_bytes());
    char* rest = cells + PAGES / 2 * value_bytes();
    tile.values = cells, tile.rest = rest;
    const int first = first_page(task, at);
    for (int j = 0; j < PAGES; ++j) {
      const int64_t keys = j < first ? 0 : end(task) - at - j * PAGE;
      for (int64_t pair = 0; pair < PAGE / 2; ++pair) {
        const U some = set1_units(2 * pair + 1 < keys ? 0xffffffff : 2 * pair < keys ? 0xffff : 0);
        const char* from = tile.v[j] + pair * padded * UNIT;
        const char* ahead = next ? next->v[j] + pair * padded * UNIT : nullptr;
        char* to = cells + j / 2 * value_bytes() + (j % 2 * PAGE / 2 + pair) * TILE_BYTES;
        for (int64_t d = 0; d < padded; d += LANES) {
          if (ahead) __builtin_prefetch(ahead + d * UNIT, 0, 2);
          store_units(to + d / LANES * REGISTER, and_(load_units(from + d * UNIT), some));
        }
      }
      if (const int64_t units = cache.units % TILE_ROWS) {
        memcpy(rest + j * REGISTER, tile.k[j] + cache.units / TILE_ROWS * REGISTER, (size_t)(units * TILE_BYTES));
        memset(rest + j * REGISTER + units * TILE_BYTES, 0, (size_t)(REGISTER - units * TILE_BYTES));
      }
    }
    return tile;
  }

  // Scores for the keys of two pages, [query][TILE]. COUNT: registers of queries. Prefetches as many keys of `next`,
  // between the products, because the registers' own lines would wait for many prefetches at once.
  template <int COUNT>
  INLINE void multiply(const char* x, int64_t tall, float* scores, int page, const ReadyTile& tile,
                       const Tile* next) const {
    T::template zero<0>(), T::template zero<1>();
    if (COUNT == 2) T::template zero<2>(), T::template zero<3>();
    const int64_t whole = cache.units / TILE_ROWS;
    for (int64_t s = 0; s < steps(); ++s, x += tall * TILE_BYTES) {
      const auto keys = [&](int j) { return s < whole ? tile.k[j] + s * REGISTER : tile.rest + j * REGISTER; };
      T::template load<4>(x, TILE_BYTES);
      T::template load<6>(keys(page), TILE_BYTES);
      T::template dot<false, 0, 4, 6>();
      if (next) prefetch(next->k[page] + s * REGISTER, REGISTER);
      T::template load<7>(keys(page + 1), TILE_BYTES);
      T::template dot<false, 1, 4, 7>();
      if (next) prefetch(next->k[page + 1] + s * REGISTER, REGISTER);
      if (COUNT == 1) continue;
      T::template load<5>(x + REGISTER, TILE_BYTES);
      T::template dot<false, 2, 5, 6>();
      T::template dot<false, 3, 5, 7>();
    }
    const int64_t row = TILE * 4;
    char* to = (char*)(scores + page * PAGE);
    T::template store<0>(to, row), T::template store<1>(to + TILE_BYTES, row);
    if (COUNT == 1) return;
    to += TILE_ROWS * row;
    T::template store<2>(to, row), T::template store<3>(to + TILE_BYTES, row);
  }

  // Add the weighted values of WIDTH registers from dimension d on.
  template <int COUNT, int WIDTH>
  INLINE void mix(const char* weights, char* states, int64_t d, const ReadyTile& tile, int pages) const {
    const int64_t row = state_bytes();
    char *sums = states + d * 4, *second = sums + TILE_ROWS * row;
    T::template load<0>(sums, row);
    if (WIDTH == 2) T::template load<1>(sums + TILE_BYTES, row);
    if (COUNT == 2) T::template load<2>(second, row);
    if (COUNT == 2 && WIDTH == 2) T::template load<3>(second + TILE_BYTES, row);
    for (int page = 0; page < pages; page += 2, weights += TILE_BYTES) {
      const char* values = tile.values + page / 2 * value_bytes() + d / LANES * REGISTER;
      T::template load<4>(weights, WEIGHT_BYTES);
      T::template load<6>(values, TILE_BYTES);
      T::template dot<false, 0, 4, 6>();
      if (WIDTH == 2) T::template load<7>(values + REGISTER, TILE_BYTES), T::template dot<false, 1, 4, 7>();
      if (COUNT == 1) continue;
      T::template load<5>(weights + TILE_ROWS * WEIGHT_BYTES, WEIGHT_BYTES);
      T::template dot<false, 2, 5, 6>();
      if (WIDTH == 2) T::template dot<false, 3, 5, 7>();
    }
    T::template store<0>(sums, row);
    if (WIDTH == 2) T::template store<1>(sums + TILE_BYTES, row);
    if (COUNT == 2) T::template store<2>(second, row);
    if (COUNT == 2 && WIDTH == 2) T::template store<3>(second + TILE_BYTES, row);
  }

  // As Vectors::step.
  template <int COUNT>
  void step(int tall, const char* x, char* states, const int64_t* positions, int64_t at, const ReadyTile& tile,
            const Tile* next) const {
    alignas(64) float scores[COUNT * TILE_ROWS][TILE];
    alignas(64) char weights[COUNT * TILE_ROWS][WEIGHT_BYTES];
    const int pages = (int)min(tile.pages, (positions[tall - 1] - at) / PAGE + 1);
    int page = 0;
    for (; page < pages; page += 2) multiply<COUNT>(x, tall, scores[0], page, tile, next);
    for (; next && page < PAGES; ++page) prefetch(next->k[page], cache.key_cell());
    for (int m = 0; m < tall; ++m) {
      float* sums = state(states, m);
      const int64_t begin = first_seen(positions[m]) - at, end = positions[m] + 1 - at;
      const float alpha = weigh(scores[m], weights[m], sums, pages, tile, begin, end);
      if (alpha == 1.0f) continue;
      for (int64_t d = 0; d < padded; d += LANES) store(sums + d, mul(load(sums + d), set1(alpha)));
    }
    int64_t d = 0;
    for (; d + 2 * LANES <= padded; d += 2 * LANES) mix<COUNT, 2>(weights[0], states, d, tile, pages);
    if (d < padded) mix<COUNT, 1>(weights[0], states, d, tile, pages);
  }

  void step_group(int tall, const char* x, char* states, const int64_t* positions, int64_t at, const ReadyTile& tile,
                  const Tile* next) const {
    if (tall > TILE_ROWS) step<2>(tall, x, states, positions, at, tile, next);
    else step<1>(tall, x, states, positions, at, tile, next);
  }
};

}  // namespace
#endif
