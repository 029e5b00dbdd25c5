// The computation of some queries by one tile of keys and values, and merging the results: what all variants share, and
// products by vectors. attention_amx.h has those by the processor's tiles.
//
// Order. A query is summed by absolute position: online softmax over tiles of 64 keys, in splits of 1024 keys that are
// merged from the first to the last. A key that the query does not see has a weight of exactly 0, and an unchanged
// maximum rescales by exactly 1, so a query's bits do not depend on the tiles, splits and queries computed with it.
// Neither do they depend on chunks, pages or threads.
#pragma once
#include "attention_tasks.h"
#include "attention_units.h"

namespace {

const int PAGES = TILE / PAGE, VECTORS = TILE / LANES;
const int WIDE = LANES == 16 ? 4 : 2;  // vectors that are computed together: 24 sums in 32 registers, or 12 in 16

struct Tile {
  const char *k[PAGES], *v[PAGES];
  int pages;
};

// Tasks on a cache: where a tile is, and what its scores do to a query's state.
template <class Kind>
struct PagedTasks : Tasks {
  typedef typename Kind::Number Number;
  typedef typename Kind::Held Held;
  typedef Pages<Number, Held> Cache;
  static const int UNIT = Cache::UNIT, PER_UNIT = Cache::PER_UNIT;

  const Cache cache;

  PagedTasks(const Call& call, void* cache, Grouping grouping)
      : Tasks(call, Cache(call, cache).padded, grouping), cache(call, cache) {}

  // -- pages ----------------------------------------------------------------------------------------------------------

  // The addresses of a tile's keys and values. The last page may contain stale data after the task's last key. A page
  // that no query of the task sees may be in a block of another sequence: its address is that of the first one seen.
  Tile locate(const Task& task, int64_t head, int64_t at) const {
    Tile tile;
    tile.pages = (int)min(PAGES, ceil_div(end(task) - at, PAGE));
    const int first = first_page(task, at);
    const int32_t* blocks = call.block_table + task.row * call.width;
    for (int j = 0; j < PAGES; ++j) {
      const int64_t from = at + max(first, min(j, tile.pages - 1)) * PAGE;
      const int64_t block = cache.block_of(from);
      tile.k[j] = cache.address(blocks[block], head, from - block * call.block_size);
      tile.v[j] = tile.k[j] + cache.value_at();
    }
    return tile;
  }

  int first_page(const Task& task, int64_t at) const { return (int)max(0, (first_seen(position(task)) - at) / PAGE); }

  // A tile of the plain layout, copied into cells.
  Tile gather(const Task& task, int64_t head, int64_t at, char* cells) const {
    Tile tile;
    const int64_t keys = min(TILE, end(task) - at);
    tile.pages = (int)ceil_div(keys, PAGE);
    memset(cells, 0, (size_t)(PAGES * cache.page()));
    for (int j = 0; j < PAGES; ++j) {
      tile.k[j] = cells + j * cache.page();
      tile.v[j] = tile.k[j] + cache.value_at();
    }
    const int32_t* blocks = call.block_table + task.row * call.width;
    for (int64_t t = max(0, first_seen(position(task)) - at); t < keys; ++t) {
      const int64_t from = at + t, block = cache.block_of(from), offset = from - block * call.block_size;
      char *share = cache.address(blocks[block], head, offset), *cell = cells + t / PAGE * cache.page();
      cache.lay_key((const Held*)cache.plain_key(share, offset), cell, t % PAGE);
      cache.lay_value((const Held*)cache.plain_value(share, offset), cell + cache.value_at(), t % PAGE);
    }
    return tile;
  }

  // -- scores and states ----------------------------------------------------------------------------------------------

  // The scales of keys or values, from token t of a tile on.
  static const float* scales(const char* const (&cells)[PAGES], int64_t cell, int t) {
    return (const float*)(cells[t / PAGE] + cell) + t % PAGE;
  }

  // One step of the online softmax: compute weights from a query's scores, of which it sees [begin, end). Returns the
  // factor that rescales the sums so far.
  float weigh(const float* scores, char* weights, float* state, int vectors, const Tile& tile, int64_t begin,
              int64_t end) const {
    static const float COUNT[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float& maximum = state[padded + LANES];
    const float before = maximum;
    const bool edge = begin > 0 || end < TILE;
    const V first = set1((float)max(begin, 0)), last = set1((float)min(end, TILE));
    V x[VECTORS], top = set1(before);
    UNROLLED for (int j = 0; j < VECTORS; ++j) {
      x[j] = set1(-INFINITY);
      if (j >= vectors) continue;
      const V score = load(scores + j * LANES);
      V scaled = mul(score, set1(call.scale * LOG2E));
      if (call.softcap != 0)
        scaled = mul(hyperbolic_tangent(mul(score, set1(call.scale / call.softcap))), set1(call.softcap * LOG2E));
      if (edge) {
        const V index = add(load(COUNT), set1((float)(j * LANES)));
        scaled = where_less(index, first, x[j], where_less(index, last, scaled, x[j]));
      }
      x[j] = scaled;
      top = max(scaled, top);
    }
    maximum = max_lane(top);
    // While all scores are -inf, all weights are 0 for any finite base.
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    const float alpha = before == base ? 1.0f : exponential2(before - base);
    V sum = mul(load(state + padded), set1(alpha));
    UNROLLED for (int j = 0; j < VECTORS; ++j) {
      const V e = exponential2(add(x[j], set1(-base)));
      if (Cache::SCALED) {
        V scale = j < vectors ? load(scales(tile.v, cache.value_cell(), j * LANES)) : zero();
        if (edge) {  // a stale scale may be NaN, and 0 * NaN is NaN
          const V index = add(load(COUNT), set1((float)(j * LANES)));
          scale = where_less(index, first, zero(), where_less(index, last, scale, zero()));
        }
        Kind::store_weights(weights, j * LANES, mul(e, scale));
        sum = add(sum, e);
      } else {
        sum = add(sum, Kind::store_weights(weights, j * LANES, e));
      }
    }
    store(state + padded, sum);
    return alpha;
  }

  // Merge state b into a, whose positions precede those of b.
  void merge(float* a, const float* b) const {
    float &maximum = a[padded + LANES], other = b[padded + LANES], before = maximum;
    maximum = before < other ? other : before;
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    const V left = set1(exponential2(before - base)), right = set1(exponential2(other - base));
    for (int64_t i = 0; i < padded + LANES; i += LANES) store(a + i, fma(load(b + i), right, mul(load(a + i), left)));
  }
};

// Products by vectors, of up to TALL queries at a time.
template <class Kind>
struct Vectors : PagedTasks<Kind> {
  typedef PagedTasks<Kind> Base;
  typedef typename Base::Cache Cache;
  typedef typename Base::Number Number;
  using Base::UNIT, Base::PER_UNIT;
  using Base::call, Base::cache, Base::padded;
  using Base::state, Base::state_bytes, Base::end, Base::first_seen, Base::first_page, Base::locate, Base::gather;
  using Base::scales, Base::weigh;
  static const int TALL = 6;

  Vectors(const Call& call, void* cache) : Base(call, cache, {TALL, 3, 1}) {}

  int64_t query_bytes() const { return ceil_div(cache.units, Kind::AT_ONCE) * Kind::AT_ONCE * Kind::X_BYTES; }
  int64_t cell_bytes() const { return PAGES * cache.page(); }  // of a thread's cells
  static void begin(int64_t) {}
  static void end_task() {}

  // Copy query m of a group of `tall`; the group is [unit][query].
  void load_query(const Number* from, char* x, int64_t m, int64_t tall) const {
    const int64_t whole = call.head_dim / PER_UNIT;
    uint32_t unit = 0;
    for (int64_t u = 0; u < whole; ++u) {
      memcpy(&unit, from + u * PER_UNIT, PER_UNIT * sizeof(Number));
      Kind::put(x, u, m, tall, unit);
    }
    if (whole < cache.units) {
      unit = 0;
      memcpy(&unit, from + whole * PER_UNIT, sizeof(Number));
      Kind::put(x, whole, m, tall, unit);
    }
  }

  // A tile that is ready for use: stale data cannot affect the result.
  Tile fetch(const Task& task, int64_t head, int64_t at, char* cells, const Tile*) const {
    if (!cache.packed) return gather(task, head, at, cells);
    Tile tile = locate(task, head, at);
    const int64_t keys = end(task) - at - (tile.pages - 1) * PAGE;
    if (!Cache::SCALED && keys < PAGE) {  // stale int8 values are finite, and `weigh` ignores stale scales
      // Stale values may be NaN, and 0 * NaN is NaN, so copy the values and pad them with zeros. Stale keys do no harm:
      // their scores are ignored.
      const char* from = tile.v[tile.pages - 1];
      const int64_t row_bytes = padded * 4, whole = keys / PER_UNIT;
      memcpy(cells, from, (size_t)(whole * row_bytes));
      memset(cells + whole * row_bytes, 0, (size_t)(cache.value_cell() - whole * row_bytes));
      if (keys % PER_UNIT)
        for (int64_t d = 0, rest = whole * row_bytes; d < padded; ++d) memcpy(cells + rest + 4 * d, from + rest + 4 * d, 2);
      for (int j = first_page(task, at) == tile.pages - 1 ? 0 : tile.pages - 1; j < tile.pages; ++j) tile.v[j] = cells;
    }
    return tile;
  }

  // -- M queries by one tile ------------------------------------------------------------------------------------------

  // `positions`: the queries' positions, ascending; each sees the keys up to its own. Prefetches `next` unless it is
  // null.
  template <int M>
  void step(const char* x, char* states, const int64_t* positions, int64_t at, const Tile& tile, const Tile* next) const {
    float scores[M][TILE], alpha[M];
    char weights[M * TILE / PER_UNIT * Kind::X_BYTES] __attribute__((aligned(64)));
    const int pages = (int)min(tile.pages, (positions[M - 1] - at) / PAGE + 1), vectors = pages * PAGE / LANES;
    int done = 0;
    for (; done + WIDE <= vectors; done += WIDE) multiply<M, WIDE>(x, scores, done, tile, next);
    for (; done < vectors; ++done) multiply<M, 1>(x, scores, done, tile, next);
    if (next)
      for (int j = 0; j < PAGES; ++j) {  // prefetch what the matmuls below do not
        for (int64_t at = j < pages ? cache.key_cell() : 0; at < cache.value_at(); at += 64) {
          __builtin_prefetch(next->k[j] + at, 0, 2);
          __builtin_prefetch(next->v[j] + at, 0, 2);
        }
      }
    for (int m = 0; m < M; ++m)
      alpha[m] = weigh(scores[m], weights + m * (TILE / PER_UNIT * Kind::X_BYTES), state(states, m), vectors, tile,
                       first_seen(positions[m]) - at, positions[m] + 1 - at);
    int64_t d = 0;
    for (; d + WIDE * LANES <= padded; d += WIDE * LANES) mix<M, WIDE>(weights, alpha, states, d, tile, pages, next);
    for (; d < padded; d += LANES) mix<M, 1>(weights, alpha, states, d, tile, pages, next);
  }

  // Scores of the tile's vectors [first, first + J).
  template <int M, int J>
  INLINE void multiply(const char* x, float (&scores)[M][TILE], int first, const Tile& tile, const Tile* next) const {
    V sum[M][J];
    const char *w[J], *ahead[J];
    UNROLLED for (int j = 0; j < J; ++j) {
      const int page = (first + j) * LANES / PAGE, in_page = (first + j) * LANES % PAGE * UNIT;
      w[j] = tile.k[page] + in_page;
      ahead[j] = next ? next->k[page] + in_page : nullptr;
      UNROLLED for (int m = 0; m < M; ++m) sum[m][j] = zero();
    }
    accumulate<Kind, 1, M, PAGE / LANES>(sum, x, M * Kind::X_BYTES, w, PAGE * UNIT, cache.units, next ? ahead : nullptr);
    if (Cache::SCALED)
      UNROLLED for (int j = 0; j < J; ++j) {
        const V scale = load(scales(tile.k, cache.key_cell(), (first + j) * LANES));
        UNROLLED for (int m = 0; m < M; ++m) sum[m][j] = mul(sum[m][j], scale);
      }
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < J; ++j) store(scores[m] + (first + j) * LANES, sum[m][j]);
  }

  // Rescale the sums of J vectors from dimension d on, and add the weighted values.
  template <int M, int J>
  INLINE void mix(const char* weights, const float* alpha, char* states, int64_t d, const Tile& tile, int pages,
                  const Tile* next) const {
    V sum[M][J];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < J; ++j)
        sum[m][j] = mul(load(state(states, m) + d + j * LANES), set1(alpha[m]));
    const int64_t per_page = PAGE / PER_UNIT;
    for (int page = 0; page < pages; ++page) {
      const char *w[J], *ahead[J];
      UNROLLED for (int j = 0; j < J; ++j) {
        w[j] = tile.v[page] + (d + j * LANES) * UNIT;
        ahead[j] = next ? next->v[page] + (d + j * LANES) * UNIT : nullptr;
      }
      accumulate<Kind, TILE, 1, 64 / (LANES * UNIT)>(sum, weights + page * per_page * Kind::X_BYTES,
                                                                   Kind::X_BYTES, w, padded * UNIT, per_page,
                                                                   next ? ahead : nullptr);
    }
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < J; ++j) store(state(states, m) + d + j * LANES, sum[m][j]);
  }

  void step_group(int tall, const char* x, char* states, const int64_t* positions, int64_t at, const Tile& tile,
           const Tile* next) const {
    switch (tall) {
      case 1: return step<1>(x, states, positions, at, tile, next);
      case 2: return step<2>(x, states, positions, at, tile, next);
      case 3: return step<3>(x, states, positions, at, tile, next);
      case 4: return step<4>(x, states, positions, at, tile, next);
      case 5: return step<5>(x, states, positions, at, tile, next);
      case 6: return step<6>(x, states, positions, at, tile, next);
    }
  }
};

}  // namespace
