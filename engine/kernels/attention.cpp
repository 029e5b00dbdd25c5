// Attention over a paged cache (pages.h), decode rows and chunks of prompts in one call.
//
// Order. A query's sums run over absolute positions: online softmax over tiles of 64 keys, in splits of 1024 that are
// merged from the first to the last. Keys that a query does not see weigh exactly 0 and a maximum that stays rescales
// by exactly 1, so tiles, splits and queries beside it change no bit of it. Neither do chunks, pages or threads.
//
// Work. A task is some tokens of one row, some KV heads and some splits. Tasks are shared out by cost; a thread that is
// done takes from the others. Of a row whose splits went to several tasks, whoever ends last merges them all.
#include "pages.h"
#include "work.h"

namespace {

const int TILE = 64, PAGES = TILE / PAGE, VECTORS = TILE / LANES;
const int64_t SPLIT = 1024;
const int TALL = 6;                       // queries side by side
const int WIDE = LANES == 16 ? 4 : 2;     // vectors side by side: 24 sums of 32 registers, or 12 of 16
const int64_t QUERIES = 96;               // of a task: their sums stay in the second cache
const int64_t FEW = 16;                   // queries of one KV head up to which memory is what costs: heads go together
const int64_t SHORT = 1 << 13;            // new numbers that one thread writes faster than several agree on it
const int64_t SMALL = 1 << 17;            // multiply-adds below which waking other threads costs more than they save
const float LOG2E = 1.44269504f;

#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE inline __attribute__((always_inline))

// -- the three ways to multiply a unit ---------------------------------------------------------------------------------
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
      const V a = all(((const float*)x)[m * A]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
  }
  // Unit u of query m among `tall`.
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) { ((uint32_t*)x)[u * tall + m] = unit; }
  // Weights as a factor of the values; gives what they are after rounding.
  static V keep(char* p, int lane, V e) {
    store((float*)p + lane, e);
    return e;
  }
};

// bfloat16 widened to float by shifts: exact, and each product and sum is a float's.
struct Widened {
  typedef uint16_t Number;
  typedef Number Held;
  static const int X_BYTES = 8;
  template <int A, int B, int M, int J>
  static INLINE void step(V (&sum)[M][J], const char* x, const char* const (&w)[J], int64_t at) {
    V b[J];
    UNROLLED for (int j = 0; j < J; ++j) b[j] = lower(load_units(w[j] + at));
    UNROLLED for (int m = 0; m < M; ++m) {
      const V a = all(((const float*)x)[m * A]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
    UNROLLED for (int j = 0; j < J; ++j) b[j] = upper(load_units(w[j] + at));
    UNROLLED for (int m = 0; m < M; ++m) {
      const V a = all(((const float*)x)[m * A + B]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
  }
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) {
    ((uint32_t*)x)[2 * u * tall + m] = unit << 16;
    ((uint32_t*)x)[(2 * u + 1) * tall + m] = unit & 0xffff0000;
  }
  static V keep(char* p, int lane, V e) { return Floats::keep(p, lane, e); }
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
      const U a = all_units(pair);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = dot(sum[m][j], a, b[j]);
    }
  }
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) { Floats::put(x, u, m, tall, unit); }
  // The sum of the weights adds them rounded, so that they still sum to 1.
  static V keep(char* p, int lane, V e) {
    const U halves = rounded(e);
    store_halves((uint16_t*)p + lane, halves);
    return lower(halves);
  }
};
typedef Dotted Halves;
#else
typedef Widened Halves;
#endif

// int8 widened to float, which is exact; queries and weights are floats.
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
      const V a = all(((const float*)x)[m * A]);
      UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, b[j], sum[m][j]);
    }
  }
  static void put(char* x, int64_t u, int64_t m, int64_t tall, uint32_t unit) {
    Floats::put(x, u, m, tall, sizeof(Number) == 2 ? unit << 16 : unit);
  }
  static V keep(char* p, int lane, V e) { return Floats::keep(p, lane, e); }
};

// sum[m][j] += over units of x[m] * w[j]. What lies at the same places from `ahead` is fetched meanwhile, if it is given:
// every EACH-th of its vectors begins a cache line, as do units at multiples of 64 bytes.
template <class Kind, int A, int B, int EACH, int M, int J>
INLINE void accumulate(V (&sum)[M][J], const char* x, int64_t x_bytes, const char* const (&w)[J], int64_t w_bytes,
                       int64_t units, const char* const* ahead) {
  for (int64_t u = 0, at = 0; u < units; ++u, at += w_bytes, x += x_bytes) {
    if (ahead && at % 64 == 0)
      UNROLLED for (int j = 0; j < J; j += EACH) __builtin_prefetch(ahead[j] + at, 0, 2);
    Kind::template step<A, B>(sum, x, w, at);
  }
}

// 2^x for x <= 0, to a unit or two in the last place: x = n + r, a polynomial for 2^r, times 2^n. Exactly 0 from
// -126.5 down, exactly 1 at 0; no number stays none.
INLINE V exp2(V x) {
  x = greatest(all(-127.0f), x);
  const V n = nearest(x), r = fma(n, all(-1.0f), x);
  V e = all(1.52527338e-5f);
  e = fma(e, r, all(1.54035304e-4f));
  e = fma(e, r, all(1.33335581e-3f));
  e = fma(e, r, all(9.61812911e-3f));
  e = fma(e, r, all(5.55041087e-2f));
  e = fma(e, r, all(2.40226507e-1f));
  e = fma(e, r, all(6.93147181e-1f));
  e = fma(e, r, all(1.0f));
  return mul(e, power_of_two(n));
}

INLINE float exp2(float x) { return lowest_lane(exp2(all(x))); }

// To 2e-7 of the result: a series near 0, where the quotient would cancel.
INLINE V hyperbolic_tangent(V x) {
  const V square = mul(x, x), size = greatest(x, mul(x, all(-1.0f)));
  V series = all(62.0f / 2835);
  series = fma(series, square, all(-17.0f / 315));
  series = fma(series, square, all(2.0f / 15));
  series = fma(series, square, all(-1.0f / 3));
  series = fma(mul(series, square), x, x);
  const V e = exp2(mul(size, all(-2 * LOG2E)));
  const V quotient = divide(add(all(1.0f), mul(e, all(-1.0f))), add(all(1.0f), e));
  const V result = where_less(x, zero(), mul(quotient, all(-1.0f)), quotient);
  return where_less(size, all(0.25f), series, result);
}

// -- what is computed --------------------------------------------------------------------------------------------------

struct Part {  // a row's tokens and heads whose splits went to several tasks
  int64_t splits, left;
  char* states;
};

struct Task {
  int64_t row, first, count;  // tokens, the first of them as a place in the row
  int64_t head, heads;        // KV heads
  int64_t from, to;           // splits
  Part* part;
};

struct Tile {
  const char *k[PAGES], *v[PAGES];
  int pages;
};

struct Cursor {  // a thread's share of the tasks, from which others may take; a cache line of its own
  int64_t next, end, unused[6];
};

struct Space {  // a thread's
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
  const int64_t padded;   // the cache's
  const int64_t queries;  // the most of a task
  int threads;
  Parts stores;           // of the new tokens' keys and values
  int64_t tokens_of_store;
  Task* tasks;
  int64_t num_tasks;
  Cursor* cursors;
  Space* spaces;

  Attention(const Call& call, const Number* q, const Number* k, const Number* v, void* cache, Number* out,
            const float* sinks)
      : call(call), q(q), k(k), v(v), cache(call, cache), out(out), sinks(sinks), group(call.heads / call.kv_heads),
        padded(this->cache.padded), queries(larger(QUERIES, group)) {}

  int64_t query_bytes() const { return cache.units * Kind::X_BYTES; }
  // A query's state: sums of weight * value [padded], of the weights [LANES], and the largest score.
  int64_t state_bytes() const { return (padded + 2 * LANES) * 4; }

  float* state(char* states, int64_t query) const { return (float*)(states + query * state_bytes()); }
  int64_t length(int64_t row) const { return call.query_start[row + 1] - call.query_start[row]; }
  int64_t position(const Task& task) const { return call.seq_lens[task.row] - length(task.row) + task.first; }
  int64_t end(const Task& task) const { return position(task) + task.count; }
  // The first position that a query sees.
  int64_t low(int64_t position) const { return call.window ? larger(0, position - call.window + 1) : 0; }

  // -- pages -----------------------------------------------------------------------------------------------------------

  // Where the keys and values of a tile are; for the task's last keys as they are, what lies behind them included.
  Tile find(const Task& task, int64_t head, int64_t at) const {
    Tile tile;
    tile.pages = (int)smaller(PAGES, up(end(task) - at, PAGE));
    const int32_t* blocks = call.block_table + task.row * call.width;
    for (int j = 0; j < PAGES; ++j) {
      const int64_t from = at + (j < tile.pages ? j : tile.pages - 1) * PAGE;
      const int64_t block = cache.block_of(from);
      tile.k[j] = cache.place(blocks[block], head, from - block * call.block_size);
      tile.v[j] = tile.k[j] + cache.value_at();
    }
    return tile;
  }

  // The same, ready for use: nothing that is no key or value of the task's has a part in it.
  Tile fetch(const Task& task, int64_t head, int64_t at, char* cells) const {
    if (!cache.packed) return collect(task, head, at, cells);
    Tile tile = find(task, head, at);
    const int64_t keys = end(task) - at - (tile.pages - 1) * PAGE;
    if (!Cache::SCALED && keys < PAGE) {  // whole numbers are numbers, and for scales `weigh` sees to it
      // 0 * NaN: what lies behind the last value may hold anything, so a copy has zeros there. Of the keys it is enough
      // that their scores are not looked at.
      const char* from = tile.v[tile.pages - 1];
      const int64_t row_bytes = padded * 4, whole = keys / PER_UNIT;
      memcpy(cells, from, (size_t)(whole * row_bytes));
      memset(cells + whole * row_bytes, 0, (size_t)(cache.value_cell() - whole * row_bytes));
      if (keys % PER_UNIT)
        for (int64_t d = 0; d < padded; ++d) memcpy(cells + whole * row_bytes + 4 * d, from + whole * row_bytes + 4 * d, 2);
      tile.v[tile.pages - 1] = cells;
    }
    return tile;
  }

  // A tile of the plain layout in the form of cells.
  Tile collect(const Task& task, int64_t head, int64_t at, char* cells) const {
    Tile tile;
    const int64_t keys = smaller(TILE, end(task) - at);
    tile.pages = (int)up(keys, PAGE);
    memset(cells, 0, (size_t)(PAGES * cache.page()));
    for (int j = 0; j < PAGES; ++j) {
      tile.k[j] = cells + j * cache.page();
      tile.v[j] = tile.k[j] + cache.value_at();
    }
    const int32_t* blocks = call.block_table + task.row * call.width;
    for (int64_t t = 0; t < keys; ++t) {
      const int64_t from = at + t, block = cache.block_of(from), offset = from - block * call.block_size;
      const char* share = cache.place(blocks[block], head, offset);
      char* cell = cells + t / PAGE * cache.page();
      cache.lay_key((const Held*)(share + offset * cache.line()), cell, t % PAGE);
      cache.lay_value((const Held*)(share + (call.block_size + offset) * cache.line()), cell + cache.value_at(), t % PAGE);
    }
    return tile;
  }

  // -- M queries and a tile --------------------------------------------------------------------------------------------

  // `positions` are the last ones that the queries see, rising. `next` is fetched meanwhile, if it is given.
  template <int M>
  void step(const char* x, char* states, const int64_t* positions, int64_t at, const Tile& tile, const Tile* next) const {
    float scores[M][TILE], alpha[M];
    char weights[M * TILE / PER_UNIT * Kind::X_BYTES] __attribute__((aligned(64)));
    const int pages = (int)smaller(tile.pages, (positions[M - 1] - at) / PAGE + 1), vectors = pages * PAGE / LANES;
    int done = 0;
    for (; done + WIDE <= vectors; done += WIDE) multiply<M, WIDE>(x, scores, done, tile, next);
    for (; done < vectors; ++done) multiply<M, 1>(x, scores, done, tile, next);
    if (next)
      for (int j = 0; j < PAGES; ++j) {  // what the products below do not fetch
        for (int64_t at = j < pages ? cache.key_cell() : 0; at < cache.value_at(); at += 64) {
          __builtin_prefetch(next->k[j] + at, 0, 2);
          __builtin_prefetch(next->v[j] + at, 0, 2);
        }
      }
    for (int m = 0; m < M; ++m)
      alpha[m] = weigh(scores[m], weights + m * (TILE / PER_UNIT * Kind::X_BYTES), state(states, m), vectors, tile,
                       low(positions[m]) - at, positions[m] + 1 - at);
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

  // Those of keys or values from token t of a tile on.
  static const float* scales(const char* const (&cells)[PAGES], int64_t cell, int t) {
    return (const float*)(cells[t / PAGE] + cell) + t % PAGE;
  }

  // From a query's scores, of which it sees [begin, end), to weights; gives the factor for all that was before.
  float weigh(const float* scores, char* weights, float* state, int vectors, const Tile& tile, int64_t begin,
              int64_t end) const {
    static const float COUNT[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float& most = state[padded + LANES];
    const float before = most;
    const bool edge = begin > 0 || end < TILE;
    const V first = all((float)larger(begin, 0)), last = all((float)smaller(end, TILE));
    V x[VECTORS], top = all(before);
    for (int j = 0; j < VECTORS; ++j) {
      x[j] = all(-INFINITY);
      if (j >= vectors) continue;
      const V score = load(scores + j * LANES);
      V scaled = mul(score, all(call.scale * LOG2E));
      if (call.softcap != 0)
        scaled = mul(hyperbolic_tangent(mul(score, all(call.scale / call.softcap))), all(call.softcap * LOG2E));
      if (edge) {
        const V place = add(load(COUNT), all((float)(j * LANES)));
        scaled = where_less(place, first, x[j], where_less(place, last, scaled, x[j]));
      }
      x[j] = scaled;
      top = greatest(scaled, top);
    }
    most = largest(top);
    // While nothing but -inf was seen, all weights are 0: any number will do.
    const float base = most == -INFINITY ? 0.0f : most, alpha = before == base ? 1.0f : exp2(before - base);
    V sum = mul(load(state + padded), all(alpha));
    for (int j = 0; j < VECTORS; ++j) {
      const V e = exp2(add(x[j], all(-base)));
      if (Cache::SCALED) {
        V scale = j < vectors ? load(scales(tile.v, cache.value_cell(), j * LANES)) : zero();
        if (edge) {  // 0 * NaN: the scale of what it does not see may be anything
          const V place = add(load(COUNT), all((float)(j * LANES)));
          scale = where_less(place, first, zero(), where_less(place, last, scale, zero()));
        }
        Kind::keep(weights, j * LANES, mul(e, scale));
        sum = add(sum, e);
      } else {
        sum = add(sum, Kind::keep(weights, j * LANES, e));
      }
    }
    store(state + padded, sum);
    return alpha;
  }

  // Add the weighted values of J vectors from dimension d on.
  template <int M, int J>
  INLINE void mix(const char* weights, const float* alpha, char* states, int64_t d, const Tile& tile, int pages,
                  const Tile* next) const {
    V sum[M][J];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < J; ++j)
        sum[m][j] = mul(load(state(states, m) + d + j * LANES), all(alpha[m]));
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

  // -- a task ----------------------------------------------------------------------------------------------------------

  // Query i of a task: token i % R / group, KV head i / R of the task's, query head i % group of that; R of a KV head.
  int64_t token(const Task& task, int64_t i) const {
    return call.query_start[task.row] + task.first + i % (task.count * group) / group;
  }
  int64_t head(const Task& task, int64_t i) const {
    return (task.head + i / (task.count * group)) * group + i % group;
  }

  // Groups of up to TALL queries of a KV head, [unit][query] each.
  void load_queries(const Task& task, Space& space) const {
    const int64_t each = task.count * group;
    for (int64_t i = 0; i < task.heads * each; ++i) {
      const int64_t in_head = i % each, start = in_head / TALL * TALL, tall = smaller(TALL, each - start);
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
    const int64_t last = end(task), start = low(position(task)) / TILE * TILE;
    load_queries(task, space);
    for (int64_t split = task.from; split < task.to; ++split) {
      char* states = task.part ? task.part->states + (split - first_split(task)) * count * state_bytes()
                     : split == task.from ? space.total
                                          : space.current;
      clear(states, count);
      const int64_t stop = smaller((split + 1) * SPLIT, last);
      for (int64_t at = larger(split * SPLIT, start); at < stop; at += TILE)
        for (int64_t h = 0; h < task.heads; ++h) {
          const Tile tile = fetch(task, task.head + h, at, space.cells);
          Tile coming;
          const Tile* next = nullptr;
          if (cache.packed) {
            const bool more = at + TILE < smaller(task.to * SPLIT, last);
            const bool same_tile = h + 1 < task.heads;
            if (same_tile || more) {
              coming = same_tile ? find(task, task.head + h + 1, at) : find(task, task.head, at + TILE);
              next = &coming;
            } else if (after) {
              coming = find(*after, after->head, larger(after->from * SPLIT, low(position(*after)) / TILE * TILE));
              next = &coming;
            }
          }
          for (int64_t i = h * each; i < (h + 1) * each; i += TALL) {
            const int tall = (int)smaller(TALL, (h + 1) * each - i);
            const int64_t* positions = space.positions + i;
            if (positions[tall - 1] < at || low(positions[0]) >= at + TILE) continue;
            any(tall, space.queries + i * query_bytes(), states + i * state_bytes(), positions, at, tile, next);
            next = nullptr;  // the first group fetches what comes next
          }
        }
      if (states == space.current)
        for (int64_t i = 0; i < count; ++i) merge(state(space.total, i), state(space.current, i));
    }
    if (!task.part) finish(task, space.total);
    else if (__atomic_sub_fetch(&task.part->left, 1, __ATOMIC_ACQ_REL) == 0) join(task);
  }

  void any(int tall, const char* x, char* states, const int64_t* positions, int64_t at, const Tile& tile,
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

  // a = a then b, in the order of positions.
  void merge(float* a, const float* b) const {
    float &most = a[padded + LANES], other = b[padded + LANES], before = most;
    most = before < other ? other : before;
    const float base = most == -INFINITY ? 0.0f : most;
    const V left = all(exp2(before - base)), right = all(exp2(other - base));
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
      const float most = from[padded + LANES];
      float weight = total(load(from + padded)), factor = 1.0f;
      if (sinks) {
        const float sink = sinks[head(task, i)] * LOG2E, base = most < sink ? sink : most;
        factor = exp2(most - base);
        weight = weight * factor + exp2(sink - base);
      }
      const V share = all(factor / weight);
      Number* to = out + (token(task, i) * call.heads + head(task, i)) * call.head_dim;
      for (int64_t d = 0; d < padded; d += sizeof(row) / sizeof(Number) - PAGE) {
        const int64_t stop = smaller(padded, d + 1024);
        // + 0: whether zeros of unseen keys were added to a -0 must not show.
        for (int64_t e = d; e < stop; e += LANES) write(row + e - d, add(mul(load(from + e), share), zero()));
        memcpy(to + d, row, (size_t)(smaller(call.head_dim, stop) - d) * sizeof(Number));
      }
    }
  }

  // -- sharing the work ------------------------------------------------------------------------------------------------

  int64_t first_split(const Task& task) const { return low(position(task)) / SPLIT; }
  int64_t num_splits(const Task& task) const { return up(end(task), SPLIT) - first_split(task); }

  // Roughly: keys times the groups of queries; a tile's memory takes as long as three of them.
  int64_t cost(const Task& task) const {
    const int64_t from = larger(low(position(task)), task.from * SPLIT), to = smaller(end(task), task.to * SPLIT);
    return (to - from + TILE) * task.heads * larger(3, up(task.count * group, TALL));
  }

  // Calls visit for each (row, tokens, KV heads), all splits together.
  template <class Visit>
  void divide_rows(Visit visit) const {
    int64_t runs = 0;
    for (int64_t row = 0; row < call.rows; ++row) runs += up(call.seq_lens[row], SPLIT);
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t tokens = length(row);
      int64_t heads = tokens * group <= FEW ? smaller(larger(1, QUERIES / larger(1, tokens * group)), 8) : 1;
      heads = smaller(heads, call.kv_heads);
      while (heads > 1 && runs * up(call.kv_heads, heads) < 2 * threads) heads = (heads + 1) / 2;
      const int64_t block = larger(1, QUERIES / group);
      for (int64_t head = 0; head < call.kv_heads; head += heads)
        for (int64_t first = 0; first < tokens; first += block) {
          Task task = {row, first, smaller(block, tokens - first), head, smaller(heads, call.kv_heads - head), 0, 0, nullptr};
          task.from = first_split(task);
          task.to = task.from + num_splits(task);
          visit(task);
        }
    }
  }

  // Where one thread would be left with much of the work alone, a task's splits are divided.
  int64_t pieces(const Task& task, int64_t most) const { return smaller(num_splits(task), up(cost(task), most)); }

  // Lays everything out in scratch memory; false where that is short.
  bool plan() {
    int64_t all_cost = 0, parts = 0, states = 0;
    divide_rows([&](const Task& task) { all_cost += cost(task); });
    const int64_t most = threads == 1 ? INT64_MAX / 2 : all_cost / (4 * threads) + 1;
    num_tasks = 0;
    divide_rows([&](const Task& task) {
      const int64_t count = threads == 1 ? 1 : pieces(task, most);
      num_tasks += up(num_splits(task), up(num_splits(task), count));
      if (count > 1) parts += 1, states += num_splits(task) * task.heads * task.count * group;
    });
    const int64_t sizes[] = {num_tasks * (int64_t)sizeof(Task), parts * (int64_t)sizeof(Part), states * state_bytes(),
                             threads * (int64_t)sizeof(Cursor), threads * (int64_t)sizeof(Space)};
    const int64_t own[] = {queries * query_bytes(), queries * state_bytes(), queries * state_bytes(),
                           PAGES * cache.page(), queries * 8};
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += up(size, 64) * 64;
    for (int64_t size : own) bytes += threads * up(size, 64) * 64;
    char* memory = (char*)scratch(bytes);
    if (!memory) return false;
    auto take = [&](int64_t size) {
      char* taken = memory;
      memory += up(size, 64) * 64;
      return taken;
    };
    tasks = (Task*)take(sizes[0]);
    Part* part = (Part*)take(sizes[1]);
    char* place = take(sizes[2]);
    cursors = (Cursor*)take(sizes[3]);
    spaces = (Space*)take(sizes[4]);
    for (int t = 0; t < threads; ++t) {
      Space& space = spaces[t];
      space.queries = take(own[0]), space.total = take(own[1]), space.current = take(own[2]);
      space.cells = take(own[3]), space.positions = (int64_t*)take(own[4]);
    }

    int64_t next = 0, so_far = 0;
    int thread = 0;
    cursors[0].next = 0;
    auto add = [&](const Task& task) {
      // A thread's share begins where the cost before it reaches its fraction of the whole.
      while (thread + 1 < threads && so_far * threads >= all_cost * (thread + 1)) {
        cursors[thread].end = next;
        cursors[++thread].next = next;
      }
      so_far += cost(task);
      tasks[next++] = task;
    };
    divide_rows([&](Task task) {
      const int64_t count = threads == 1 ? 1 : pieces(task, most), splits = num_splits(task), each = up(splits, count);
      if (count > 1) {
        *part = {splits, up(splits, each), place};
        place += splits * task.heads * task.count * group * state_bytes();
        task.part = part++;
      }
      const int64_t from = task.from, to = task.to;
      for (task.from = from; task.from < to; task.from = task.to) {
        task.to = smaller(to, task.from + each);
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
      store_tokens(part * tokens_of_store, smaller(tokens, (part + 1) * tokens_of_store));
  }

  void attend(int thread) const {
    for (int i = 0; i < threads; ++i) {  // its own first, then what others have left
      Cursor& cursor = cursors[(thread + i) % threads];
      for (int64_t task; (task = __atomic_fetch_add(&cursor.next, 1, __ATOMIC_RELAXED)) < cursor.end;)
        compute(tasks[task], task + 1 < cursor.end ? &tasks[task + 1] : nullptr, spaces[thread]);
    }
  }

  static void store_share(void* attention, int) { ((Attention*)attention)->store_parts(); }
  static void attend_share(void* attention, int thread) { ((const Attention*)attention)->attend(thread); }

  // 0, or 1 where memory is short.
  int32_t compute(int most_threads) {
    int64_t keys = 0;
    for (int64_t row = 0; row < call.rows; ++row) keys += length(row) * call.seq_lens[row];
    threads = most_threads < 1 || keys * 2 * call.heads * call.head_dim < SMALL ? 1 : most_threads;
    if (!plan()) return 1;
    if (k) {
      const int64_t tokens = call.query_start[call.rows];
      tokens_of_store = larger(1, smaller(PAGE, up(tokens, threads)));
      stores = {up(tokens, tokens_of_store)};
      run(store_share, this, tokens * call.kv_heads * call.head_dim <= SHORT ? 1 : threads);
    }
    run(attend_share, this, threads);
    return 0;
  }
};

}  // namespace

// Stores k and v, then attends. q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim] with the strides of
// the call, or null where they lie in the cache already; out: [tokens, heads, head_dim] without gaps; sinks: [heads] or
// null. Named by what q, k and v are, then, where it is another, by what the cache holds.
#define ATTEND(name, Kind)                                                                                           \
  EXPORT int32_t NAMED(name)(const Call* call, const void* q, const void* k, const void* v, void* cache, void* out,  \
                             const float* sinks, int32_t threads) {                                                  \
    typedef Kind::Number Number;                                                                                     \
    const Timed timed(IN_ATTENTION);                                                                                 \
    return Attention<Kind>(*call, (const Number*)q, (const Number*)k, (const Number*)v, cache, (Number*)out, sinks) \
        .compute(threads);                                                                                            \
  }

ATTEND(attend_float32, Floats)
ATTEND(attend_bfloat16, Halves)
ATTEND(attend_float32_int8, Bytes<float>)
ATTEND(attend_bfloat16_int8, Bytes<uint16_t>)
