// Attention over a paged cache (pages.h), for decode rows and prompt chunks in one call.
//
// Order. A query is summed by absolute position: online softmax over tiles of 64 keys, in splits of 1024 keys that are
// merged from the first to the last. A key that the query does not see has a weight of exactly 0, and an unchanged
// maximum rescales by exactly 1, so a query's bits do not depend on the tiles, splits and queries computed with it.
// Neither do they depend on chunks, pages or threads.
//
// Work. A task is some tokens of one row, some KV heads and some splits. Tasks are distributed by cost, and a thread
// without work takes tasks from the others. If a row's splits belong to several tasks, the one that ends last merges
// them.
#include "pages.h"
#include "work.h"

namespace {

const int TILE = 64, PAGES = TILE / PAGE, VECTORS = TILE / LANES;
const int64_t SPLIT = 1024;
const int TALL = 6;                    // queries of a group, which are computed together
const int WIDE = LANES == 16 ? 4 : 2;  // vectors that are computed together: 24 sums in 32 registers, or 12 in 16
const int64_t QUERIES = 96;            // of a task; their sums stay in the second-level cache
const int64_t FEW = 16;                // queries of a KV head up to which memory is the limit: a task has several heads
const int64_t SHORT = 1 << 13;         // new numbers up to which one thread writes faster than several
const int64_t SMALL = 1 << 17;         // multiply-adds below which waking other threads costs more than they save
const float LOG2E = 1.44269504f;

#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE inline __attribute__((always_inline))

// -- ways to multiply a unit ------------------------------------------------------------------------------------------
//
// step: sum[m][j] += x[m] * w[j] over one unit. Number `half` of query m's unit is x[m * A + half * B].

struct Floats {
  typedef float Number;
  typedef Number Held;
  static const int X_BYTES = 4;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at) {
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
  static const int X_BYTES = 8;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at) {
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
  static const int X_BYTES = 4;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at) {
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
struct Bytes {
  typedef Model Number;
  typedef int8_t Held;
  static const int X_BYTES = 4;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at) {
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

// sum[m][j] += x[m] * w[j] over all units. Prefetches the same offsets from `ahead` unless it is null: every EACH-th of
// its vectors starts a cache line, as do units at multiples of 64 bytes.
template <class Kind, int A, int B, int EACH, int M, int J>
INLINE void accumulate(V (&sum)[M][J], const char* x, int64_t x_bytes, const char* const (&w)[J], int64_t w_bytes,
                       int64_t units, const char* const* ahead) {
  for (int64_t u = 0, at = 0; u < units; ++u, at += w_bytes, x += x_bytes) {
    if (ahead && at % 64 == 0)
      UNROLLED for (int j = 0; j < J; j += EACH) __builtin_prefetch(ahead[j] + at, 0, 2);
    Kind::template step<A, B>(sum, x, w, at);
  }
}

// 2^x for x <= 0, to 2 units in the last place: x = n + r, and the result is a polynomial for 2^r times 2^n. Exactly 0
// from -126.5 down, exactly 1 at 0; NaN stays NaN.
INLINE V exp2(V x) {
  x = max(set1(-127.0f), x);
  const V n = round(x), r = fma(n, set1(-1.0f), x);
  V e = set1(1.52527338e-5f);
  e = fma(e, r, set1(1.54035304e-4f));
  e = fma(e, r, set1(1.33335581e-3f));
  e = fma(e, r, set1(9.61812911e-3f));
  e = fma(e, r, set1(5.55041087e-2f));
  e = fma(e, r, set1(2.40226507e-1f));
  e = fma(e, r, set1(6.93147181e-1f));
  e = fma(e, r, set1(1.0f));
  return mul(e, power_of_two(n));
}

INLINE float exp2(float x) { return first_lane(exp2(set1(x))); }

// tanh(x), to 2e-7 of the result. Uses a series near 0, where the quotient would cancel.
INLINE V hyperbolic_tangent(V x) {
  const V square = mul(x, x), size = max(x, mul(x, set1(-1.0f)));
  V series = set1(62.0f / 2835);
  series = fma(series, square, set1(-17.0f / 315));
  series = fma(series, square, set1(2.0f / 15));
  series = fma(series, square, set1(-1.0f / 3));
  series = fma(mul(series, square), x, x);
  const V e = exp2(mul(size, set1(-2 * LOG2E)));
  const V quotient = divide(add(set1(1.0f), mul(e, set1(-1.0f))), add(set1(1.0f), e));
  const V result = where_less(x, zero(), mul(quotient, set1(-1.0f)), quotient);
  return where_less(size, set1(0.25f), series, result);
}

// -- tasks ------------------------------------------------------------------------------------------------------------

struct Part {  // tokens and heads of a row whose splits belong to several tasks
  int64_t splits, left;
  char* states;
};

struct Task {
  int64_t row, first, count;  // `count` tokens of the row's new ones, from index `first` on
  int64_t head, heads;        // KV heads
  int64_t from, to;           // splits
  Part* part;
};

struct Tile {
  const char *k[PAGES], *v[PAGES];
  int pages;
};

struct Cursor {  // a thread's tasks, of which other threads may claim some; a cache line of its own
  int64_t next, end, unused[6];
};

struct Space {  // a thread's scratch memory
  char *queries, *total, *current, *cells;
  int64_t* positions;
};

template <class Kind>
struct Attention {
  typedef typename Kind::Number Number;
  typedef typename Kind::Held Held;
  typedef Pages<Number, Held> Cache;
  static const int UNIT = Cache::UNIT, PER_UNIT = Cache::PER_UNIT;

  const Call& call;
  const Number *q, *k, *v;
  const Cache cache;
  Number* out;
  const float* sinks;

  const int64_t group;    // query heads of a KV head
  const int64_t padded;   // head size, see Pages
  const int64_t queries;  // maximum of a task
  int threads;
  Parts stores;           // parts of the new tokens' keys and values
  int64_t tokens_of_store;
  Task* tasks;
  int64_t num_tasks;
  Cursor* cursors;
  Space* spaces;

  Attention(const Call& call, const Number* q, const Number* k, const Number* v, void* cache, Number* out,
            const float* sinks)
      : call(call), q(q), k(k), v(v), cache(call, cache), out(out), sinks(sinks), group(call.heads / call.kv_heads),
        padded(this->cache.padded), queries(max(QUERIES, group)) {}

  int64_t query_bytes() const { return cache.units * Kind::X_BYTES; }
  // A query's state: the sums of weight * value [padded], the sums of weights [LANES], and the maximum score.
  int64_t state_bytes() const { return (padded + 2 * LANES) * 4; }

  float* state(char* states, int64_t query) const { return (float*)(states + query * state_bytes()); }
  int64_t length(int64_t row) const { return call.query_start[row + 1] - call.query_start[row]; }
  int64_t position(const Task& task) const { return call.seq_lens[task.row] - length(task.row) + task.first; }
  int64_t end(const Task& task) const { return position(task) + task.count; }
  // The first position that a query sees.
  int64_t first_seen(int64_t position) const { return call.window ? max(0, position - call.window + 1) : 0; }

  // -- pages ----------------------------------------------------------------------------------------------------------

  // The addresses of a tile's keys and values. The last page may contain stale data after the task's last key.
  Tile locate(const Task& task, int64_t head, int64_t at) const {
    Tile tile;
    tile.pages = (int)min(PAGES, ceil_div(end(task) - at, PAGE));
    const int32_t* blocks = call.block_table + task.row * call.width;
    for (int j = 0; j < PAGES; ++j) {
      const int64_t from = at + (j < tile.pages ? j : tile.pages - 1) * PAGE;
      const int64_t block = cache.block_of(from);
      tile.k[j] = cache.address(blocks[block], head, from - block * call.block_size);
      tile.v[j] = tile.k[j] + cache.value_at();
    }
    return tile;
  }

  // A tile that is ready for use: stale data cannot affect the result.
  Tile fetch(const Task& task, int64_t head, int64_t at, char* cells) const {
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
      tile.v[tile.pages - 1] = cells;
    }
    return tile;
  }

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
    for (int64_t t = 0; t < keys; ++t) {
      const int64_t from = at + t, block = cache.block_of(from), offset = from - block * call.block_size;
      const char* share = cache.address(blocks[block], head, offset);
      char* cell = cells + t / PAGE * cache.page();
      cache.lay_key((const Held*)(share + offset * cache.line()), cell, t % PAGE);
      cache.lay_value((const Held*)(share + (call.block_size + offset) * cache.line()), cell + cache.value_at(), t % PAGE);
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
    for (int j = 0; j < VECTORS; ++j) {
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
    const float base = maximum == -INFINITY ? 0.0f : maximum, alpha = before == base ? 1.0f : exp2(before - base);
    V sum = mul(load(state + padded), set1(alpha));
    for (int j = 0; j < VECTORS; ++j) {
      const V e = exp2(add(x[j], set1(-base)));
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

  // -- a task ---------------------------------------------------------------------------------------------------------

  // Query i of a task belongs to token i % R / group, KV head i / R, and query head i % group of that KV head, where each
  // KV head has R queries.
  int64_t token(const Task& task, int64_t i) const {
    return call.query_start[task.row] + task.first + i % (task.count * group) / group;
  }
  int64_t head(const Task& task, int64_t i) const {
    return (task.head + i / (task.count * group)) * group + i % group;
  }

  // Copy the queries into groups of up to TALL queries of a KV head, each [unit][query].
  void load_queries(const Task& task, Space& space) const {
    const int64_t each = task.count * group;
    for (int64_t i = 0; i < task.heads * each; ++i) {
      const int64_t in_head = i % each, start = in_head / TALL * TALL, tall = min(TALL, each - start);
      char* x = space.queries + (i - in_head + start) * query_bytes();
      const Number* from = q + token(task, i) * call.q_token + head(task, i) * call.q_head;
      const int64_t whole = call.head_dim / PER_UNIT;
      uint32_t unit = 0;
      for (int64_t u = 0; u < whole; ++u) {
        memcpy(&unit, from + u * PER_UNIT, PER_UNIT * sizeof(Number));
        Kind::put(x, u, in_head - start, tall, unit);
      }
      if (whole < cache.units) {
        unit = 0;
        memcpy(&unit, from + whole * PER_UNIT, sizeof(Number));
        Kind::put(x, whole, in_head - start, tall, unit);
      }
      space.positions[i] = position(task) + in_head / group;
    }
  }

  void clear(char* states, int64_t count) const {
    memset(states, 0, (size_t)(count * state_bytes()));
    for (int64_t i = 0; i < count; ++i) state(states, i)[padded + LANES] = -INFINITY;
  }

  void compute(const Task& task, const Task* after, Space& space) const {
    const int64_t each = task.count * group, count = task.heads * each;
    const int64_t last = end(task), start = first_seen(position(task)) / TILE * TILE;
    load_queries(task, space);
    for (int64_t split = task.from; split < task.to; ++split) {
      char* states = task.part ? task.part->states + (split - first_split(task)) * count * state_bytes()
                     : split == task.from ? space.total
                                          : space.current;
      clear(states, count);
      const int64_t stop = min((split + 1) * SPLIT, last);
      for (int64_t at = max(split * SPLIT, start); at < stop; at += TILE)
        for (int64_t h = 0; h < task.heads; ++h) {
          const Tile tile = fetch(task, task.head + h, at, space.cells);
          Tile following;
          const Tile* next = nullptr;
          if (cache.packed) {
            const bool more = at + TILE < min(task.to * SPLIT, last);
            const bool same_tile = h + 1 < task.heads;
            if (same_tile || more) {
              following = same_tile ? locate(task, task.head + h + 1, at) : locate(task, task.head, at + TILE);
              next = &following;
            } else if (after) {
              const int64_t first = first_seen(position(*after)) / TILE * TILE;
              following = locate(*after, after->head, max(after->from * SPLIT, first));
              next = &following;
            }
          }
          for (int64_t i = h * each; i < (h + 1) * each; i += TALL) {
            const int tall = (int)min(TALL, (h + 1) * each - i);
            const int64_t* positions = space.positions + i;
            if (positions[tall - 1] < at || first_seen(positions[0]) >= at + TILE) continue;
            step_group(tall, space.queries + i * query_bytes(), states + i * state_bytes(), positions, at, tile, next);
            next = nullptr;  // only the first group prefetches
          }
        }
      if (states == space.current)
        for (int64_t i = 0; i < count; ++i) merge(state(space.total, i), state(space.current, i));
    }
    if (!task.part) finish(task, space.total);
    else if (__atomic_sub_fetch(&task.part->left, 1, __ATOMIC_ACQ_REL) == 0) join(task);
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

  // Merge state b into a, whose positions precede those of b.
  void merge(float* a, const float* b) const {
    float &maximum = a[padded + LANES], other = b[padded + LANES], before = maximum;
    maximum = before < other ? other : before;
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    const V left = set1(exp2(before - base)), right = set1(exp2(other - base));
    for (int64_t i = 0; i < padded + LANES; i += LANES) store(a + i, fma(load(b + i), right, mul(load(a + i), left)));
  }

  void join(const Task& task) const {
    const int64_t count = task.heads * task.count * group;
    char* states = task.part->states;
    for (int64_t split = 1; split < task.part->splits; ++split)
      for (int64_t i = 0; i < count; ++i) merge(state(states, i), state(states, split * count + i));
    finish(task, states);
  }

  void finish(const Task& task, char* states) const {
    Number row[1024 + PAGE];
    for (int64_t i = 0; i < task.heads * task.count * group; ++i) {
      const float* from = state(states, i);
      const float maximum = from[padded + LANES];
      float weight = sum_lanes(load(from + padded)), factor = 1.0f;
      if (sinks) {
        const float sink = sinks[head(task, i)] * LOG2E, base = maximum < sink ? sink : maximum;
        factor = exp2(maximum - base);
        weight = weight * factor + exp2(sink - base);
      }
      const V share = set1(factor / weight);
      Number* to = out + (token(task, i) * call.heads + head(task, i)) * call.head_dim;
      for (int64_t d = 0; d < padded; d += sizeof(row) / sizeof(Number) - PAGE) {
        const int64_t stop = min(padded, d + 1024);
        // + 0 turns -0 into 0, so that the sign does not depend on whether zeros of unseen keys were added.
        for (int64_t e = d; e < stop; e += LANES) write(row + e - d, add(mul(load(from + e), share), zero()));
        memcpy(to + d, row, (size_t)(min(call.head_dim, stop) - d) * sizeof(Number));
      }
    }
  }

  // -- distributing the work ------------------------------------------------------------------------------------------

  int64_t first_split(const Task& task) const { return first_seen(position(task)) / SPLIT; }
  int64_t num_splits(const Task& task) const { return ceil_div(end(task), SPLIT) - first_split(task); }

  // The approximate cost of a task: keys times groups of queries. Reading a tile takes as long as computing three
  // groups.
  int64_t cost(const Task& task) const {
    const int64_t from = max(first_seen(position(task)), task.from * SPLIT), to = min(end(task), task.to * SPLIT);
    return (to - from + TILE) * task.heads * max(3, ceil_div(task.count * group, TALL));
  }

  // Call `visit` with a task for each (row, tokens, KV heads) that covers all splits.
  template <class Visit>
  void divide_rows(Visit visit) const {
    int64_t runs = 0;
    for (int64_t row = 0; row < call.rows; ++row) runs += ceil_div(call.seq_lens[row], SPLIT);
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t tokens = length(row);
      int64_t heads = tokens * group <= FEW ? min(max(1, QUERIES / max(1, tokens * group)), 8) : 1;
      heads = min(heads, call.kv_heads);
      while (heads > 1 && runs * ceil_div(call.kv_heads, heads) < 2 * threads) heads = (heads + 1) / 2;
      const int64_t block = max(1, QUERIES / group);
      for (int64_t head = 0; head < call.kv_heads; head += heads)
        for (int64_t first = 0; first < tokens; first += block) {
          Task task = {row, first, min(block, tokens - first), head, min(heads, call.kv_heads - head), 0, 0, nullptr};
          task.from = first_split(task);
          task.to = task.from + num_splits(task);
          visit(task);
        }
    }
  }

  // The number of tasks to divide a task's splits among, so that none costs much more than `max_cost`.
  int64_t pieces(const Task& task, int64_t max_cost) const {
    return min(num_splits(task), ceil_div(cost(task), max_cost));
  }

  // Lay out tasks and buffers in scratch memory; returns false if out of memory.
  bool plan() {
    int64_t total_cost = 0, parts = 0, states = 0;
    divide_rows([&](const Task& task) { total_cost += cost(task); });
    const int64_t max_cost = threads == 1 ? INT64_MAX / 2 : total_cost / (4 * threads) + 1;
    num_tasks = 0;
    divide_rows([&](const Task& task) {
      const int64_t count = threads == 1 ? 1 : pieces(task, max_cost);
      num_tasks += ceil_div(num_splits(task), ceil_div(num_splits(task), count));
      if (count > 1) parts += 1, states += num_splits(task) * task.heads * task.count * group;
    });
    const int64_t sizes[] = {num_tasks * (int64_t)sizeof(Task), parts * (int64_t)sizeof(Part), states * state_bytes(),
                             threads * (int64_t)sizeof(Cursor), threads * (int64_t)sizeof(Space)};
    const int64_t thread_sizes[] = {queries * query_bytes(), queries * state_bytes(), queries * state_bytes(),
                           PAGES * cache.page(), queries * 8};
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += ceil_div(size, 64) * 64;
    for (int64_t size : thread_sizes) bytes += threads * ceil_div(size, 64) * 64;
    char* memory = (char*)scratch(bytes);
    if (!memory) return false;
    auto take = [&](int64_t size) {
      char* taken = memory;
      memory += ceil_div(size, 64) * 64;
      return taken;
    };
    tasks = (Task*)take(sizes[0]);
    Part* part = (Part*)take(sizes[1]);
    char* part_states = take(sizes[2]);
    cursors = (Cursor*)take(sizes[3]);
    spaces = (Space*)take(sizes[4]);
    for (int t = 0; t < threads; ++t) {
      Space& space = spaces[t];
      space.queries = take(thread_sizes[0]), space.total = take(thread_sizes[1]), space.current = take(thread_sizes[2]);
      space.cells = take(thread_sizes[3]), space.positions = (int64_t*)take(thread_sizes[4]);
    }

    int64_t next = 0, so_far = 0;
    int thread = 0;
    cursors[0].next = 0;
    auto add = [&](const Task& task) {
      // A thread's tasks start where the cost of those before reaches its fraction of the total.
      while (thread + 1 < threads && so_far * threads >= total_cost * (thread + 1)) {
        cursors[thread].end = next;
        cursors[++thread].next = next;
      }
      so_far += cost(task);
      tasks[next++] = task;
    };
    divide_rows([&](Task task) {
      const int64_t count = threads == 1 ? 1 : pieces(task, max_cost);
      const int64_t splits = num_splits(task), each = ceil_div(splits, count);
      if (count > 1) {
        *part = {splits, ceil_div(splits, each), part_states};
        part_states += splits * task.heads * task.count * group * state_bytes();
        task.part = part++;
      }
      const int64_t from = task.from, to = task.to;
      for (task.from = from; task.from < to; task.from = task.to) {
        task.to = min(to, task.from + each);
        add(task);
      }
    });
    cursors[thread].end = next;
    while (++thread < threads) cursors[thread].next = cursors[thread].end = next;
    return true;
  }

  void store_tokens(int64_t from, int64_t to) const {
    for (int64_t head = 0; head < call.kv_heads; ++head) cache.write(head, k, v, from, to);
  }

  void store_parts() {
    const int64_t tokens = call.query_start[call.rows];
    for (int64_t part; stores.take(part);)
      store_tokens(part * tokens_of_store, min(tokens, (part + 1) * tokens_of_store));
  }

  void attend(int thread) const {
    for (int i = 0; i < threads; ++i) {  // first its own tasks, then those of other threads
      Cursor& cursor = cursors[(thread + i) % threads];
      for (int64_t task; (task = __atomic_fetch_add(&cursor.next, 1, __ATOMIC_RELAXED)) < cursor.end;)
        compute(tasks[task], task + 1 < cursor.end ? &tasks[task + 1] : nullptr, spaces[thread]);
    }
  }

  static void store_share(void* attention, int) { ((Attention*)attention)->store_parts(); }
  static void attend_share(void* attention, int thread) { ((const Attention*)attention)->attend(thread); }

  // Returns 0, or 1 if out of memory.
  int32_t compute(int max_threads) {
    int64_t keys = 0;
    for (int64_t row = 0; row < call.rows; ++row) keys += length(row) * call.seq_lens[row];
    threads = max_threads < 1 || keys * 2 * call.heads * call.head_dim < SMALL ? 1 : max_threads;
    if (!plan()) return 1;
    if (k) {
      const int64_t tokens = call.query_start[call.rows];
      tokens_of_store = max(1, min(PAGE, ceil_div(tokens, threads)));
      stores = {ceil_div(tokens, tokens_of_store)};
      run(store_share, this, tokens * call.kv_heads * call.head_dim <= SHORT ? 1 : threads);
    }
    run(attend_share, this, threads);
    return 0;
  }
};

}  // namespace

// Write k and v to the cache, then compute attention. q: [tokens, heads, head_dim]; k and v: [tokens, kv_heads,
// head_dim], or null if the cache has them already; strides are in the call. out: [tokens, heads, head_dim],
// contiguous; sinks: [heads] or null. Each is named by the type of q, k and v, and by that of the cache if it is
// another. Returns 0, or 1 if out of memory.
#define ATTEND(name, Kind)                                                                                           \
  EXPORT int32_t NAMED(name)(const Call* call, const void* q, const void* k, const void* v, void* cache, void* out,  \
                             const float* sinks, int32_t threads) {                                                  \
    typedef Kind::Number Number;                                                                                     \
    const Timed timed(ATTENTION);                                                                                 \
    return Attention<Kind>(*call, (const Number*)q, (const Number*)k, (const Number*)v, cache, (Number*)out, sinks) \
        .compute(threads);                                                                                            \
  }

ATTEND(attend_float32, Floats)
ATTEND(attend_bfloat16, Halves)
ATTEND(attend_float32_int8, Bytes<float>)
ATTEND(attend_bfloat16_int8, Bytes<uint16_t>)
