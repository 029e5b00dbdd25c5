// Attention over a paged cache (pages.h), for decode rows and prompt chunks in one call. attention_tasks.h divides the
// work; attention_tile.h computes, or attention_amx.h where there are tiles for it.
#include "attention_amx.h"

namespace {

const int64_t SHORT = 1 << 13;  // new numbers up to which one thread writes faster than several
const int64_t SMALL = 1 << 17;  // multiply-adds below which waking other threads costs more than they save

// Base: Vectors, or Registers.
template <class Base>
struct Attention : Base {
  typedef typename Base::Number Number;
  using Base::call, Base::cache, Base::group, Base::grouping, Base::padded, Base::threads, Base::tasks, Base::cursors;
  using Base::spaces, Base::state, Base::state_bytes, Base::num_states, Base::length, Base::position, Base::end;
  using Base::first_seen, Base::first_split, Base::query_bytes, Base::cell_bytes, Base::fetch, Base::locate;
  using Base::step_group, Base::merge, Base::plan;

  const Number *q, *k, *v;
  Number* out;
  const float* sinks;
  Parts stores;  // parts of the new tokens' keys and values
  int64_t tokens_of_store;

  Attention(const Call& call, const Number* q, const Number* k, const Number* v, void* cache, Number* out,
            const float* sinks)
      : Base(call, cache), q(q), k(k), v(v), out(out), sinks(sinks) {}

  // -- a task ---------------------------------------------------------------------------------------------------------

  // Query i of a task belongs to token i % R / group, KV head i / R, and query head i % group of that KV head, where each
  // KV head has R queries.
  int64_t token(const Task& task, int64_t i) const {
    return call.query_start[task.row] + task.first + i % (task.count * group) / group;
  }
  int64_t head(const Task& task, int64_t i) const {
    return (task.head + i / (task.count * group)) * group + i % group;
  }

  // Copy the queries into groups of up to `tall` queries of a KV head.
  void load_queries(const Task& task, Space& space) const {
    const int64_t each = task.count * group;
    for (int64_t i = 0; i < task.heads * each; ++i) {
      const int64_t in_head = i % each, start = in_head / grouping.tall * grouping.tall;
      const Number* from = q + token(task, i) * call.q_token + head(task, i) * call.q_head;
      char* x = space.queries + (i - in_head + start) * query_bytes();
      Base::load_query(from, x, in_head - start, min(grouping.tall, each - start));
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
    Base::begin(each);
    for (int64_t split = task.from; split < task.to; ++split) {
      char* states = task.part ? task.part->states + (split - first_split(task)) * num_states(task) * state_bytes()
                     : split == task.from ? space.total
                                          : space.current;
      clear(states, count);
      const int64_t stop = min((split + 1) * SPLIT, last);
      for (int64_t at = max(split * SPLIT, start); at < stop; at += TILE)
        for (int64_t h = 0; h < task.heads; ++h) {
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
          const auto tile = fetch(task, task.head + h, at, space.cells, next);
          for (int64_t i = h * each; i < (h + 1) * each; i += grouping.tall) {
            const int tall = (int)min(grouping.tall, (h + 1) * each - i);
            const int64_t* positions = space.positions + i;
            if (positions[tall - 1] < at || first_seen(positions[0]) >= at + TILE) continue;
            step_group(tall, space.queries + i * query_bytes(), states + i * state_bytes(), positions, at, tile, next);
            next = nullptr;  // only the first group prefetches
          }
        }
      if (states == space.current)
        for (int64_t i = 0; i < count; ++i) merge(state(space.total, i), state(space.current, i));
    }
    Base::end_task();
    if (!task.part) finish(task, space.total);
    else if (__atomic_sub_fetch(&task.part->left, 1, __ATOMIC_ACQ_REL) == 0) join(task);
  }

  void join(const Task& task) const {
    const int64_t count = task.heads * task.count * group;
    char* states = task.part->states;
    for (int64_t split = 1; split < task.part->splits; ++split)
      for (int64_t i = 0; i < count; ++i) merge(state(states, i), state(states, split * num_states(task) + i));
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
        factor = exponential2(maximum - base);
        weight = weight * factor + exponential2(sink - base);
      }
      const V share = set1(factor / weight);
      Number* to = out + (token(task, i) * call.heads + head(task, i)) * call.v_head_dim;
      for (int64_t d = 0; d < padded; d += sizeof(row) / sizeof(Number) - PAGE) {
        const int64_t stop = min(padded, d + 1024);
        // + 0 turns -0 into 0, so that the sign does not depend on whether zeros of unseen keys were added.
        for (int64_t e = d; e < stop; e += LANES) write(row + e - d, add(mul(load(from + e), share), zero()));
        memcpy(to + d, row, (size_t)(min(call.v_head_dim, stop) - d) * sizeof(Number));
      }
    }
  }

  void store_tokens(int64_t from, int64_t to) const {
    for (int64_t head = 0; head < call.kv_heads; ++head) cache.write(head, k, v, from, to);
  }

  void store_parts() {
    const int64_t tokens = call.query_start[call.rows];
    for (int64_t part; stores.claim(part);)
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
    if (!plan(query_bytes(), cell_bytes())) return 1;
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

// Write k and v to the cache, then compute attention. q: [tokens, heads, head_dim]; k: [tokens, kv_heads, head_dim] and
// v: [tokens, kv_heads, v_head_dim], or null if the cache has them already; strides are in the call. out: [tokens,
// heads, v_head_dim], contiguous; sinks: [heads] or null. Each is named by the type of q, k and v, and by that of the
// cache if it is another. Returns 0, or 1 if out of memory.
#define ATTEND(name, Base)                                                                                           \
  EXPORT int32_t NAMED(name)(const Call* call, const void* q, const void* k, const void* v, void* cache, void* out,  \
                             const float* sinks, int32_t threads) {                                                  \
    typedef Base::Number Number;                                                                                     \
    const Timed timed(ATTENTION);                                                                                    \
    return Attention<Base>(*call, (const Number*)q, (const Number*)k, (const Number*)v, cache, (Number*)out, sinks)  \
        .compute(threads);                                                                                           \
  }

#if defined(HAS_TILES)
ATTEND(attend_bfloat16, Registers<Tiles>)
ATTEND(attend_emulated, Registers<EmulatedAmx>)  // for the trial
#else
ATTEND(attend_float32, Vectors<Floats>)
ATTEND(attend_bfloat16, Vectors<Halves>)
ATTEND(attend_float32_int8, Vectors<Bytes<float>>)
ATTEND(attend_bfloat16_int8, Vectors<Bytes<uint16_t>>)
#endif
