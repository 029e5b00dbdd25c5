// Gated DeltaNet and Mamba2, see models/mixers/delta.py and models/mixers/mamba2.py: layers whose state is a matrix that each token
// corrects, or adds to. The queries, keys and values of Mamba2 are its C, B and x.
//
// A task is the tokens of a row and some value heads that share a head of queries and keys. It processes the tokens in
// chunks: it convolves their channels, and then corrects each head's matrix token by token, one block of columns after
// another, so that a block stays in the first-level cache. One pass over a block corrects it for a token, reads the
// token's result, and in Gated DeltaNet reads the value that the next token's key has. In Mamba2 the norm is over the
// heads of several tasks, so it follows when all of them are done.
//
// Order. A number that is read from a matrix is one chain of fused multiply-adds along the keys. The order of a norm's
// sum depends on the head's size alone. Results are rounded where models/mixers/delta.py and models/mixers/mamba2.py do. So a sequence has the same bits
// however its tokens are divided into steps, segments and chunks, and whatever other rows a step has.
#include "numbers.h"
#include "work.h"

namespace {

const int64_t CHUNK = 32;       // tokens, whose numbers fit the second-level cache beside the matrices of a task
const int WIDE = 4;             // vectors of a block's row: 8 chains hide the latency of multiply-adds
const int64_t BLOCK = WIDE * LANES;
const int64_t AHEAD = 8;        // tokens between the one that is read and the one that is prefetched
const int64_t SMALL = 1 << 17;  // multiply-adds below which waking other threads costs more than they save
const int64_t EVEN = 4;         // tasks of a thread that are enough for all threads to end at about the same time
const int64_t HEADS = 8;        // of a task at most: their matrices fit the second-level cache
const float L2_EPS = 1e-6f;     // as in models/mixers/delta.py

enum Rule { DELTA, MAMBA2 };

int64_t padded(int64_t size, int64_t multiple = LANES) { return ceil_div(size, multiple) * multiple; }

// While it exists, this thread treats subnormal numbers as zero: matrices that decay contain them, and many processors
// compute with them a hundred times slower.
struct WithoutSubnormals {
  const uint32_t before = _mm_getcsr();
  WithoutSubnormals() { _mm_setcsr(before | 0x8040); }
  ~WithoutSubnormals() { _mm_setcsr(before); }
};

// -- a block of columns -----------------------------------------------------------------------------------------------

// Rows of a block, in a state or in scratch memory.
struct Rows {
  float* at;
  int64_t stride;
};

// What a block needs of some tokens, the first one's.
struct Tokens {
  const float *q, *k;  // [key_dim]
  const float* v;
  float* read;  // the result
  const float *beta, *decay;
  int64_t key_dim, keys, values;  // the size of a key, and the distances from a token to the next
  float skip;                     // Mamba2: how much of its value is added to the result
};

// The products of the columns and a key.
template <int W>
INLINE void find(Rows from, const float* k, int64_t key_dim, V (&found)[W]) {
  UNROLLED for (int w = 0; w < W; ++w) found[w] = zero();
  for (int64_t i = 0; i < key_dim; ++i) {
    const V a = set1(k[i]);
    UNROLLED for (int w = 0; w < W; ++w) found[w] = fma(a, load(from.at + i * from.stride + w * LANES), found[w]);
  }
}

// Write matrix * decay + the outer product of k and `change`, and return its products with q, and with the next token's
// key if there is one.
template <int W, bool NEXT>
INLINE void correct(Rows from, Rows to, const float* k, const float* q, const float* next, int64_t key_dim, V decay,
                    const V (&change)[W], V (&read)[W], V (&found)[W]) {
  UNROLLED for (int w = 0; w < W; ++w) read[w] = found[w] = zero();
  for (int64_t i = 0; i < key_dim; ++i) {
    const V a = set1(k[i]), b = set1(q[i]), c = NEXT ? set1(next[i]) : zero();
    UNROLLED for (int w = 0; w < W; ++w) {
      const V s = fma(a, change[w], mul(load(from.at + i * from.stride + w * LANES), decay));
      store(to.at + i * to.stride + w * LANES, s);
      read[w] = fma(b, s, read[w]);
      if (NEXT) found[w] = fma(c, s, found[w]);
    }
  }
}

// Process tokens in order. The matrix is read from `from` and written to `to`; between tokens it is in `between`, which
// a single token does not use.
template <Rule RULE, int W>
__attribute__((noinline)) void block(Rows from, Rows between, Rows to, const Tokens& tokens, int64_t count) {
  V found[W], read[W], change[W];
  if (RULE == DELTA) find<W>(from, tokens.k, tokens.key_dim, found);
  for (int64_t t = 0; t < count; ++t) {
    const V decay = set1(tokens.decay[t]), beta = set1(tokens.beta[t]);
    const float *k = tokens.k + t * tokens.keys, *q = tokens.q + t * tokens.keys, *v = tokens.v + t * tokens.values;
    const bool is_last = t + 1 == count;
    UNROLLED for (int w = 0; w < W; ++w) {
      const V value = load(v + w * LANES);
      change[w] = mul(RULE == DELTA ? sub(value, mul(found[w], decay)) : value, beta);
    }
    if (RULE == DELTA && !is_last)
      correct<W, true>(from, between, k, q, k + tokens.keys, tokens.key_dim, decay, change, read, found);
    else
      correct<W, false>(from, is_last ? to : between, k, q, nullptr, tokens.key_dim, decay, change, read, found);
    from = between;
    if (RULE == MAMBA2)
      UNROLLED for (int w = 0; w < W; ++w) read[w] = fma(set1(tokens.skip), load(v + w * LANES), read[w]);
    UNROLLED for (int w = 0; w < W; ++w) store(tokens.read + t * tokens.values + w * LANES, read[w]);
  }
}

// -- a step -----------------------------------------------------------------------------------------------------------

template <class Number, Rule RULE>
struct Step {
  const Delta& d;
  const Number *qkvz, *gates, *z;  // of Mamba2 `qkvz` is x, B and C
  Number* out;
  int32_t threads;

  const int64_t keys = d.key_heads * d.key_dim, values = d.value_heads * d.value_dim;
  const int64_t channels = 2 * keys + values;
  // The first channels of queries, keys and values
  const int64_t q_at = RULE == DELTA ? 0 : values + keys, k_at = RULE == DELTA ? keys : values;
  const int64_t v_at = RULE == DELTA ? 2 * keys : 0;
  const int64_t group = d.value_heads / d.key_heads;       // value heads of a key head
  const int64_t context = d.taps - 1;                      // tokens before one that its convolution sees
  const int64_t key_size = padded(d.key_dim);              // of a token in scratch memory
  const int64_t value_size = padded(d.value_dim, BLOCK);   // the same
  const int64_t matrix_size = d.key_dim * value_size;      // of a matrix there: [blocks, key_dim, BLOCK]
  const bool whole = d.value_dim % LANES == 0;             // vectors of a state's matrix end where its rows do
  const int64_t apart = d.is_tiled ? d.key_heads : 1;      // from a value head of a key head to the next
  int64_t heads = group;                                   // value heads of a task
  char* memory = nullptr;                                  // each thread's scratch memory
  int64_t memory_bytes = 0;
  Parts tasks = {}, groups = {}, normed = {};

  struct Space {
    float *line, *taps, *q, *k, *v, *read, *beta, *decay, *matrices, *gated;
    Number* window;
  };

  // Lay out a thread's scratch memory from `at` on; returns the end.
  char* arrange(char* at, Space& space) const {
    auto take = [&](auto& array, int64_t size) {
      array = (decltype(+array))at;
      at += padded(size * (int64_t)sizeof(*array), 64);
    };
    const int64_t larger = max(key_size, value_size);
    take(space.line, (context + CHUNK) * larger), take(space.taps, (d.taps + 1) * LANES);
    take(space.q, CHUNK * key_size), take(space.k, CHUNK * key_size);
    take(space.v, CHUNK * value_size), take(space.read, CHUNK * value_size);
    take(space.beta, padded(CHUNK)), take(space.decay, padded(CHUNK));
    take(space.matrices, heads * matrix_size), take(space.window, context * larger);
    take(space.gated, RULE == MAMBA2 ? padded(values / d.key_heads) : 0);
    return at;
  }
  Space space(int thread) const {
    Space space;
    arrange(memory + thread * memory_bytes, space);
    return space;
  }

  // -- rows and segments

  bool is_empty(int64_t row) const { return d.row_start[row] == d.row_start[row + 1]; }  // has no segments
  int64_t first(int64_t row) const { return d.begin[d.row_start[row]]; }
  const Number* x(int64_t token) const { return qkvz + token * d.qkvz_stride; }
  const Number* gate(int64_t token) const { return z + token * d.qkvz_stride; }
  Number* window(int64_t state, int64_t channel) const {
    return (Number*)d.windows + state * d.window_stride + channel;
  }

  bool is_valid() const {
    if (d.row_start[0] != 0 || d.row_start[d.rows] != d.segments) return false;
    if (d.begin[0] != 0 || d.begin[d.segments] != d.tokens) return false;
    for (int64_t row = 0; row < d.rows; ++row)
      if (d.row_start[row + 1] < d.row_start[row]) return false;
    for (int64_t i = 0; i < d.segments; ++i) {
      if (d.begin[i + 1] < d.begin[i] || d.source[i] < -1 || d.source[i] >= d.states) return false;
      if (d.target[i] < 0 || d.target[i] >= d.states) return false;
    }
    return true;
  }

  // -- the convolution

  // Copy LANES channels' weights, the first tap's first, and in Mamba2 after them the bias.
  void load_taps(int64_t channel, int64_t size, float* taps) const {
    if (RULE == MAMBA2)
      store(taps + d.taps * LANES, d.conv_bias ? get((const Number*)d.conv_bias + channel, size) : zero());
    const Number* from = (const Number*)d.weights + channel * d.taps;
    if (d.taps == 4) {
      U rows[4];
      UNROLLED for (int i = 0; i < 4; ++i) rows[i] = as_units(get(from + i * LANES, max(0, size * 4 - i * LANES)));
      transpose(rows);
      UNROLLED for (int i = 0; i < 4; ++i) store(taps + i * LANES, as_floats(rows[i]));
      return;
    }
    for (int64_t tap = 0; tap < d.taps; ++tap)
      for (int64_t lane = 0; lane < LANES; ++lane)
        taps[tap * LANES + lane] = lane < size ? to_number(from[lane * d.taps + tap]) : 0.0f;
  }
  static float to_number(float x) { return x; }
  static float to_number(uint16_t x) { return to_float(x); }

  // Convolve LANES channels. TAPS: the number of taps, if the compiler knows it.
  template <int TAPS>
  void sum_taps(const float* line, int64_t width, const float* taps, int64_t count, float* out, int64_t stride) const {
    for (int64_t t = 0; t < count; ++t) {
      V total = zero();
      UNROLLED for (int64_t tap = 0; tap < (TAPS ? TAPS : d.taps); ++tap)
        total = add(total, mul(load(line + (t + tap) * width), load(taps + tap * LANES)));
      if (RULE == MAMBA2) total = add(total, load(taps + d.taps * LANES));
      store(out + t * stride, round_to<Number>(total));
    }
  }

  // The numbers of a row's line: the window that the row continues from, then its tokens. Null: zeros.
  const Number* in_line(int64_t row, int64_t index, int64_t channel) const {
    const int64_t source = d.source[d.row_start[row]];
    if (index >= context) return x(first(row) + index - context) + channel;
    return source < 0 ? nullptr : window(source, 0) + index * channels + channel;
  }

  static void fetch(const Number* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / (int64_t)sizeof(Number)) __builtin_prefetch(from + i, 0, 2);
  }

  // out: [count, stride], of tokens from the row's token `begin` on. Numbers from `size` to a whole vector become 0.
  void convolve(int64_t row, int64_t begin, int64_t count, int64_t channel, int64_t size, const Space& space,
                float* out, int64_t stride) const {
    const int64_t width = padded(size), end = d.begin[d.row_start[row + 1]] - first(row) + context;
    for (int64_t j = 0; j < context + count; ++j) {
      if (const int64_t later = begin + j + AHEAD; later < end && later >= context)
        fetch(in_line(row, later, channel), size);
      const Number* from = in_line(row, begin + j, channel);
      for (int64_t i = 0; i < size; i += LANES)
        store(space.line + j * width + i, from ? get(from + i, size - i) : zero());
    }
    for (int64_t i = 0; i < size; i += LANES) {
      load_taps(channel + i, size - i, space.taps);
      if (d.taps == 4) sum_taps<4>(space.line + i, width, space.taps, count, out + i, stride);
      else sum_taps<0>(space.line + i, width, space.taps, count, out + i, stride);
    }
    // Not in the loop above: a loop with a shorter chain of operations has more iterations in flight.
    for (int64_t t = 0; t < count; ++t)
      for (float *x = out + t * stride, *last = x + width; x < last; x += LANES)
        store(x, round_to<Number>(silu(load(x))));
  }

  // Write the windows of a row's targets.
  void write_windows(int64_t row, int64_t channel, int64_t size, const Space& space) const {
    if (is_empty(row)) return;
    const size_t bytes = (size_t)size * sizeof(Number);
    // A target may be the source.
    for (int64_t j = 0; j < context; ++j) {
      const Number* from = in_line(row, j, channel);
      from ? memcpy(space.window + j * size, from, bytes) : memset(space.window + j * size, 0, bytes);
    }
    for (int64_t i = d.row_start[row]; i < d.row_start[row + 1]; ++i) {
      const int64_t end = d.begin[i + 1] - first(row);
      for (int64_t j = 0; j < context; ++j) {
        const int64_t index = end + j;
        const Number* from = index < context ? space.window + index * size : in_line(row, index, channel);
        memcpy(window(d.target[i], channel) + j * channels, from, bytes);
      }
    }
  }
  void write_shared_windows(int64_t row, int64_t key_head, const Space& space) const {
    write_windows(row, q_at + key_head * d.key_dim, d.key_dim, space);
    write_windows(row, k_at + key_head * d.key_dim, d.key_dim, space);
  }

  // The sum of the squares of `size` numbers, a multiple of LANES.
  static float squares(const float* x, int64_t size) {
    V a = zero(), b = zero();
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
      const V p = load(x + i), q = load(x + i + LANES);
      a = fma(p, p, a), b = fma(q, q, b);
    }
    if (i < size) a = fma(load(x + i), load(x + i), a);
    return sum_lanes(add(a, b));
  }

  // Divide each of `count` queries or keys by its length, and multiply it by `scale`.
  void normalize(float* vectors, int64_t count, float scale) const {
    for (float* x = vectors; x < vectors + count * key_size; x += key_size) {
      const V factor = set1(scale / root(squares(x, key_size) + L2_EPS));
      for (int64_t i = 0; i < key_size; i += LANES) store(x + i, mul(load(x + i), factor));
    }
  }
  static float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

  // -- the matrix

  // A head's matrix: of a state, or of scratch memory if `state` is negative.
  Rows matrix(int64_t state, int64_t head, int64_t in_task, int64_t block, const Space& space) const {
    if (state < 0) return {space.matrices + in_task * matrix_size + block * d.key_dim * BLOCK, BLOCK};
    return {d.matrices + state * d.matrix_stride + head * d.key_dim * d.value_dim + block * BLOCK, d.value_dim};
  }

  void copy_matrix(int64_t from, int64_t to, int64_t head, int64_t in_task, const Space& space) const {
    if (from == to) return;
    for (int64_t b = 0; b * BLOCK < d.value_dim; ++b) {
      const Rows source = matrix(from, head, in_task, b, space), target = matrix(to, head, in_task, b, space);
      const size_t bytes = (size_t)min(BLOCK, d.value_dim - b * BLOCK) * sizeof(float);
      for (int64_t i = 0; i < d.key_dim; ++i)
        memcpy(target.at + i * target.stride, source.at + i * source.stride, bytes);
    }
  }

  // Of Mamba2, whose gates set the time steps (dt), `beta` is a token's, on which the decay depends.
  void load_gates(int64_t token, int64_t count, int64_t head, const Space& space) const {
    for (int64_t t = 0; t < padded(count); ++t) {
      const Number* own = gates + (token + min(t, count - 1)) * d.gates_stride + head;
      space.beta[t] = to_number(own[0]);
      if (RULE == DELTA) space.decay[t] = to_number(own[d.value_heads]);
    }
    const V minus_rate = mul(exponential(set1(d.decay[head])), set1(-1.0f)), bias = set1(d.bias[head]);
    for (int64_t t = 0; RULE == MAMBA2 && t < count; t += LANES) {
      // In this order NaN stays NaN.
      const V step = min(set1(d.most), max(set1(d.least), softplus(add(load(space.beta + t), bias))));
      store(space.beta + t, step), store(space.decay + t, exponential(mul(minus_rate, step)));
    }
    for (int64_t t = 0; RULE == DELTA && t < count; t += LANES) {
      store(space.beta + t, round_to<Number>(sigmoid(load(space.beta + t))));
      store(space.decay + t, exponential(mul(minus_rate, softplus(add(load(space.decay + t), bias)))));
    }
  }

  void recur(int64_t from, int64_t to, int64_t head, int64_t in_task, int64_t count, const Space& space) const {
    Tokens tokens{space.q,     space.k,   space.v,  space.read, space.beta,
                  space.decay, d.key_dim, key_size, value_size, RULE == MAMBA2 ? d.skip[head] : 0.0f};
    // A single token's matrices come from memory, which is read faster in longer pieces.
    const bool is_in_memory = count == 1 && from >= 0 && to >= 0;
    for (int64_t b = 0, blocks = 1; b * BLOCK < d.value_dim; b += blocks) {
      const Rows source = matrix(from, head, in_task, b, space), target = matrix(to, head, in_task, b, space);
      const Rows between = matrix(-1, head, in_task, b, space);
      const int64_t left = ceil_div(d.value_dim - b * BLOCK, LANES);
      blocks = is_in_memory && left >= 2 * WIDE ? 2 : 1;
      switch (min(blocks * WIDE, left)) {
        case 1: block<RULE, 1>(source, between, target, tokens, count); break;
        case 2: block<RULE, 2>(source, between, target, tokens, count); break;
        case 3: block<RULE, 3>(source, between, target, tokens, count); break;
        case WIDE: block<RULE, WIDE>(source, between, target, tokens, count); break;
        default: block<RULE, 2 * WIDE>(source, between, target, tokens, count);
      }
      tokens.v += blocks * BLOCK, tokens.read += blocks * BLOCK;
    }
  }

  // The gated norm of what a head has read for a token. In Mamba2 it follows when all heads have been read.
  void write_out(int64_t token, int64_t head, float* read) const {
    const int64_t size = d.value_dim;
    if (RULE == MAMBA2) {
      for (int64_t i = 0; i < size; i += LANES) put(out + token * values + head * size + i, load(read + i), size - i);
      return;
    }
    const Number *z = gate(token) + head * size, *weight = (const Number*)d.norm;
    for (int64_t i = 0; i < size; i += LANES) store(read + i, round_to<Number>(load(read + i)));
    const V factor = set1(1.0f / root(squares(read, padded(size)) / (float)size + d.eps));
    for (int64_t i = 0; i < size; i += LANES) {
      const V normed = round_to<Number>(mul(load(read + i), factor));
      const V weighted = round_to<Number>(mul(get(weight + i, size - i), normed));
      put(out + token * values + head * size + i, mul(weighted, silu(get(z + i, size - i))), size - i);
    }
  }

  // Mamba2: the norm of what the value heads of each key head have read for a token, times the gates.
  void norm(int64_t token, const Space& space) const {
    const int64_t size = values / d.key_heads;
    for (int64_t begin = 0; begin < values; begin += size) {
      Number* own = out + token * values + begin;
      const Number *z = gate(token) + begin, *weight = (const Number*)d.norm + begin;
      for (int64_t i = 0; i < size; i += LANES)
        store(space.gated + i, mul(get(own + i, size - i), silu(get(z + i, size - i))));
      const V factor = set1(1.0f / root(squares(space.gated, padded(size)) / (float)size + d.eps));
      for (int64_t i = 0; i < size; i += LANES) {
        const V normed = round_to<Number>(mul(load(space.gated + i), factor));
        put(own + i, mul(get(weight + i, size - i), normed), size - i);
      }
    }
  }

  // -- tasks

  // The i-th value head of a task, whose first one is `head`.
  int64_t value_head(int64_t head, int64_t i) const { return head + i * apart; }

  // Process a chunk of a row: tokens [begin, begin + count) of it.
  void chunk(int64_t row, int64_t begin, int64_t count, int64_t key_head, int64_t head, int64_t from, int64_t to,
             const Space& space) const {
    const int64_t token = first(row) + begin, channel = key_head * d.key_dim;
    convolve(row, begin, count, q_at + channel, d.key_dim, space, space.q, key_size);
    convolve(row, begin, count, k_at + channel, d.key_dim, space, space.k, key_size);
    if (RULE == DELTA) normalize(space.q, count, 1.0f / root((float)d.key_dim)), normalize(space.k, count, 1.0f);
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t own = value_head(head, i);
      convolve(row, begin, count, v_at + own * d.value_dim, d.value_dim, space, space.v, value_size);
      load_gates(token, count, own, space);
      if (RULE == DELTA)
        for (int64_t t = token; t < token + count; ++t) fetch(gate(t) + own * d.value_dim, d.value_dim);
      recur(from, to, own, i, count, space);
      for (int64_t t = 0; t < count; ++t) write_out(token + t, own, space.read + t * value_size);
    }
  }

  // Process a row's value heads of a task, whose first one is `head`.
  __attribute__((noinline)) void task(int64_t row, int64_t head, const Space& space) const {
    if (is_empty(row)) return;
    const int64_t key_head = d.is_tiled ? head % d.key_heads : head / group;
    const int64_t start = d.row_start[row], end = d.row_start[row + 1];
    auto copy = [&](int64_t from, int64_t to) {
      for (int64_t i = 0; i < heads; ++i) copy_matrix(from, to, value_head(head, i), i, space);
    };
    int64_t now = d.source[start];  // the state that has the matrices, or -1: scratch memory
    if (now < 0 || !whole) memset(space.matrices, 0, (size_t)(heads * matrix_size) * sizeof(float));
    if (!whole && now >= 0) copy(now, -1), now = -1;
    for (int64_t i = start; i < end; ++i) {
      const int64_t from = d.begin[i] - first(row), to = d.begin[i + 1] - first(row);
      for (int64_t t = from; t < to; t += CHUNK) {
        const int64_t count = min(CHUNK, to - t), written = whole && t + count == to ? d.target[i] : -1;
        chunk(row, t, count, key_head, head, now, written, space);
        now = written;
      }
      copy(now, d.target[i]);
    }
    for (int64_t i = 0; i < heads; ++i)
      write_windows(row, v_at + value_head(head, i) * d.value_dim, d.value_dim, space);
    if (heads == group) write_shared_windows(row, key_head, space);
  }

  static void share_tasks(void* work, int thread) {
    Step& step = *(Step*)work;
    const WithoutSubnormals without;
    const int64_t each = step.d.value_heads / step.heads;
    for (int64_t part; step.tasks.claim(part);)
      step.task(part / each, step.first_head(part % each), step.space(thread));
  }
  // The first value head of the i-th task of a row.
  int64_t first_head(int64_t i) const {
    return d.is_tiled ? i % d.key_heads + i / d.key_heads * heads * d.key_heads : i * heads;
  }
  // What follows the tasks of all heads.
  static void share_rest(void* work, int thread) {
    Step& step = *(Step*)work;
    const WithoutSubnormals without;
    const int64_t each = step.d.key_heads;
    for (int64_t part; step.groups.claim(part);)
      step.write_shared_windows(part / each, part % each, step.space(thread));
    for (int64_t part; step.normed.claim(part);)
      for (int64_t token = part * CHUNK; token < min(step.d.tokens, (part + 1) * CHUNK); ++token)
        step.norm(token, step.space(thread));
  }

  // Returns 0, 1 if out of memory, or 2 if the segments are invalid.
  int32_t compute() {
    const Timed timed(OTHER);
    if (!is_valid()) return 2;
    if (d.tokens * d.value_heads * d.key_dim * d.value_dim * 3 < SMALL) threads = 1;
    threads = (int32_t)max(1, min(threads, d.rows * d.value_heads));
    heads = min(group, HEADS);
    while (group % heads || (heads > 1 && d.rows * (d.value_heads / heads) < EVEN * threads)) --heads;
    Space unused;
    memory_bytes = padded(arrange(nullptr, unused) - (char*)nullptr, 4096);
    memory = (char*)scratch(threads * memory_bytes);
    if (!memory) return 1;
    tasks.count = d.rows * (d.value_heads / heads);
    run(share_tasks, this, threads);
    // Several tasks have read the windows of their queries and keys.
    if (heads != group) groups.count = d.rows * d.key_heads;
    if (RULE == MAMBA2) normed.count = ceil_div(d.tokens, CHUNK);
    if (groups.count || normed.count) run(share_rest, this, threads);
    return 0;
  }
};

int64_t channels(const Delta& d) { return 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim; }

template <Rule RULE, class Number>
int32_t step(const Delta* d, const Number* qkvz, const Number* gates, const Number* z, Number* out, int32_t threads) {
  return Step<Number, RULE>{*d, qkvz, gates, z, out, threads}.compute();
}

}  // namespace

// out: [tokens, value_heads * value_dim]. Returns 0, 1 if out of memory, or 2 if the segments are invalid.
EXPORT int32_t NAMED(delta_float32)(const Delta* d, const float* qkvz, const float* gates, float* out,
                                    int32_t threads) {
  return step<DELTA>(d, qkvz, gates, qkvz + channels(*d), out, threads);
}
EXPORT int32_t NAMED(delta_bfloat16)(const Delta* d, const uint16_t* qkvz, const uint16_t* gates, uint16_t* out,
                                     int32_t threads) {
  return step<DELTA>(d, qkvz, gates, qkvz + channels(*d), out, threads);
}

// The same of Mamba2. xbc: [tokens, channels]; steps, of time: [tokens, value_heads]; z: [tokens, value_heads *
// value_dim]. The distance from a token to the next is the same in all of them.
EXPORT int32_t NAMED(mamba2_float32)(const Delta* d, const float* xbc, const float* steps, const float* z, float* out,
                                     int32_t threads) {
  return step<MAMBA2>(d, xbc, steps, z, out, threads);
}
EXPORT int32_t NAMED(mamba2_bfloat16)(const Delta* d, const uint16_t* xbc, const uint16_t* steps, const uint16_t* z,
                                      uint16_t* out, int32_t threads) {
  return step<MAMBA2>(d, xbc, steps, z, out, threads);
}
