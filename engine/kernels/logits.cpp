// Operations on rows of logits: argmax, sampling, the distribution that is sampled, the top log-probabilities, and
// masking.
//
// The lowest index wins among equals, and NaN wins over all numbers. Results are the same on every instruction set and
// in torch (engine/runner/logits.py).
#include <math.h>

#include <algorithm>

#include "logits_threshold.h"
#include "work.h"

namespace {

const int64_t SMALL = 1 << 15;  // numbers below which waking other threads costs more than they save

struct Best {
  float value;
  int64_t index;
};

bool not_nan(float x) { return x == x; }
bool any_nan(V v) {
  float lanes[LANES];
  store(lanes, v);
  for (float lane : lanes)
    if (!not_nan(lane)) return true;
  return false;
}

// The largest number. Finds its value first and then its index, which is faster than tracking both.
Best argmax(const float* from, int64_t count) {
  V largest_lanes = set1(from[0]), nan_lanes = zero();
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const V v = load(from + i);
    largest_lanes = max(v, largest_lanes);
    nan_lanes = where_not_nan(v, nan_lanes, v);
  }
  float top = max_lane(largest_lanes);
  bool has_nan = any_nan(nan_lanes);
  for (; i < count; ++i) {
    has_nan |= !not_nan(from[i]);
    if (from[i] > top) top = from[i];
  }
  int64_t index = 0;
  if (has_nan)
    while (not_nan(from[index])) ++index;
  else
    while (from[index] != top) ++index;
  return {from[index], index};
}

// -- rows -------------------------------------------------------------------------------------------------------------

// A thread's scratch memory for one row.
struct Scratch {
  float *weights, *buffer;  // [size + LANES]
  int32_t* indices;         // [size]
  int64_t* sums;            // [spans] of the weights
};

// Rows of logits, which threads claim one at a time: a row stays in one core's cache, no thread waits for one that
// lacks a processor, and a single row takes a fifth of a millisecond, too little to share.
struct Rows {
  const float* x;  // [rows, size]
  int64_t rows, size, spans;
  char* memory;
  int64_t scratch_size;
  Parts parts = {};

  bool allocate(const float* logits, int64_t num_rows, int64_t row_size, int threads) {
    x = logits, rows = num_rows, size = row_size, spans = (size + SPAN - 1) / SPAN;
    scratch_size = (8 * spans + 4 * 3 * (size + LANES) + 63) / 64 * 64;
    parts = {rows};
    memory = (char*)scratch(scratch_size * threads);
    return memory != nullptr;
  }

  const float* row(int64_t r) const { return x + r * size; }

  Scratch scratch_of(int thread) const {
    int64_t* sums = (int64_t*)(memory + thread * scratch_size);
    float* weights = (float*)(sums + spans);
    return {weights, weights + size + LANES, (int32_t*)(weights + 2 * (size + LANES)), sums};
  }

  bool claim(int64_t& r) { return parts.claim(r); }

  // Compute the weights of a row and their sums by span.
  void weigh_all(const float* from, int64_t count, float top, double temperature, const Scratch& scratch) const {
    const float coldness = (float)(1.0 / temperature);
    for (int64_t i = 0; i < count; i += SPAN)
      scratch.sums[i / SPAN] = weigh(from + i, count - i < SPAN ? count - i : SPAN, top, coldness, scratch.weights + i);
  }
};

int threads_for(int64_t rows, int64_t size, int32_t threads) {
  return rows * size < SMALL || rows < 2 ? 1 : rows < threads ? (int)rows : threads;
}

int64_t sum_of(const int64_t* sums, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += sums[i];
  return total;
}

struct Argmax : Rows {
  float* values;
  int64_t* indices;

  static void share(void* work, int) {
    Argmax& s = *(Argmax*)work;
    for (int64_t r; s.claim(r);) {
      const Best best = argmax(s.row(r), s.size);
      s.values[r] = best.value, s.indices[r] = isfinite(best.value) ? best.index : -1;
    }
  }
};

// -- sampling ---------------------------------------------------------------------------------------------------------

// A row's sampling parameters. The sampler's numpy type has the same fields in the same order.
struct Params {
  double temperature;  // 0: greedy
  double top_p, min_p;
  double u;       // the random number, uniform in [0, 1)
  int64_t top_k;  // off if it is at least the row's size
};

struct Sampling : Rows {
  const Params* params;
  float* values;
  int64_t* indices;

  // The smallest weight that top_p and min_p keep of `count` weights, whose sums by span are in `scratch`.
  float lowest(const Params& p, const Scratch& scratch, int64_t count) const {
    double min_weight = fmax(ceil(p.min_p * ONE), 1.0);
    if (p.top_p < 1.0) {
      const int64_t total = sum_of(scratch.sums, (count + SPAN - 1) / SPAN);
      const double mass = ceil(p.top_p * (double)total);
      int64_t need = mass < (double)total ? (int64_t)mass : total;
      need = need < 1 ? 1 : need < total ? need : total;
      min_weight = fmax(min_weight, (double)threshold<Mass>(scratch.weights, count, need, total, scratch.buffer));
    }
    // The smallest float that is not below it, because weights are floats.
    float low = (float)min_weight;
    if ((double)low < min_weight) low = nextafterf(low, INFINITY);
    return low;
  }

  // Sample an index among `count` weights, whose sums by span are in `scratch`.
  int64_t pick(const Params& p, const Scratch& scratch, int64_t count) const {
    const int64_t num_spans = (count + SPAN - 1) / SPAN;
    int64_t total = sum_of(scratch.sums, num_spans);
    const float low = lowest(p, scratch, count);
    if (low > 1.0f) {
      for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t left = count - i * SPAN;
        const float* weights = scratch.weights + i * SPAN;
        scratch.sums[i] = select<Mass>(weights, left < SPAN ? left : SPAN, low, INFINITY, nullptr).measure;
      }
      total = sum_of(scratch.sums, num_spans);
    }
    int64_t target = (int64_t)(p.u * (double)total);
    target = target < total - 1 ? target : total - 1;
    int64_t span = 0;
    while (target >= scratch.sums[span]) target -= scratch.sums[span++];
    int64_t index = span * SPAN;
    for (;; ++index) {
      const float w = scratch.weights[index];
      const int64_t mass = w >= low ? (int64_t)w : 0;
      if (target < mass) return index;
      target -= mass;
    }
  }

  int64_t sample(int64_t r, float top, const Scratch& scratch) const {
    const Params& p = params[r];
    const float* from = row(r);
    if (p.top_k >= size) {
      weigh_all(from, size, top, p.temperature, scratch);
      return pick(p, scratch, size);
    }
    return scratch.indices[pick(p, scratch, weigh_top(p, from, top, scratch))];
  }

  // Write the indices of the tokens that top_k keeps, and their weights; returns how many there are.
  int64_t weigh_top(const Params& p, const float* from, float top, const Scratch& scratch) const {
    const float low = p.top_k < size ? threshold<Count>(from, size, p.top_k, size, scratch.buffer) : -INFINITY;
    const int64_t kept = indices_from(from, size, low, scratch.indices);
    for (int64_t i = 0; i < kept; ++i) scratch.buffer[i] = from[scratch.indices[i]];
    weigh_all(scratch.buffer, kept, top, p.temperature, scratch);
    return kept;
  }

  static void share(void* work, int thread) {
    Sampling& d = *(Sampling*)work;
    const Scratch scratch = d.scratch_of(thread);
    for (int64_t r; d.claim(r);) {
      const Best best = argmax(d.row(r), d.size);
      d.values[r] = best.value, d.indices[r] = best.index;
      if (!isfinite(best.value))
        d.indices[r] = -1;
      else if (d.params[r].temperature > 0)
        d.indices[r] = d.sample(r, best.value, scratch);
    }
  }
};

// The logits of the distribution that Sampling samples from.
struct Processing : Sampling {
  float* out;  // [rows, size]

  void process(int64_t r, float top, const Scratch& scratch) const {
    const Params& p = params[r];
    const float* from = row(r);
    const float coldness = (float)(1.0 / p.temperature);
    const int64_t kept = weigh_top(p, from, top, scratch);
    // Without these filters unlikely tokens stay, although their weight is 0.
    const float low = p.top_p < 1.0 || p.min_p > 0.0 ? lowest(p, scratch, kept) : 0.0f;
    std::fill(out + r * size, out + (r + 1) * size, -INFINITY);
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t index = scratch.indices[i];
      if (scratch.weights[i] >= low) out[r * size + index] = (from[index] - top) * coldness;
    }
  }

  static void share(void* work, int thread) {
    Processing& s = *(Processing*)work;
    const Scratch scratch = s.scratch_of(thread);
    for (int64_t r; s.claim(r);) {
      const float top = argmax(s.row(r), s.size).value;
      if (isfinite(top) && s.params[r].temperature > 0)
        s.process(r, top, scratch);
      else
        std::copy(s.row(r), s.row(r) + s.size, s.out + r * s.size);
    }
  }
};

// -- top log-probabilities --------------------------------------------------------------------------------------------

struct TopLogits : Rows {
  int64_t count;
  double* logs;      // [rows], log(sum(e^x))
  float* values;     // [rows, count]
  int64_t* indices;  // [rows, count]

  void list(int64_t r, const Scratch& scratch) const {
    const float* from = row(r);
    const float low = threshold<Count>(from, size, count, size, scratch.buffer);
    const int64_t kept = indices_from(from, size, low, scratch.indices);
    // Partially, because nearly all numbers of a filtered row are equal: negative infinity.
    std::partial_sort(scratch.indices, scratch.indices + count, scratch.indices + kept, [from](int32_t a, int32_t b) {
      return from[a] > from[b] || (from[a] == from[b] && a < b);
    });
    for (int64_t i = 0; i < count; ++i) {
      values[r * count + i] = from[scratch.indices[i]];
      indices[r * count + i] = scratch.indices[i];
    }
  }

  static void share(void* work, int thread) {
    TopLogits& l = *(TopLogits*)work;
    const Scratch scratch = l.scratch_of(thread);
    for (int64_t r; l.claim(r);) {
      const float top = argmax(l.row(r), l.size).value;
      l.logs[r] = NAN;
      if (!isfinite(top)) continue;
      l.weigh_all(l.row(r), l.size, top, 1.0, scratch);
      l.logs[r] = top + log((double)sum_of(scratch.sums, l.spans) / ONE);
      if (l.count) l.list(r, scratch);
    }
  }
};

}  // namespace

// The largest number of each row of x: [rows, size] and its index: [rows]. The index is -1 if the number is infinite or
// NaN. `size` is at least 1.
EXPORT void NAMED(best)(const float* x, int64_t rows, int64_t size, float* values, int64_t* indices, int32_t threads) {
  const Timed timed(OTHER);
  Argmax argmax;
  argmax.x = x, argmax.rows = rows, argmax.size = size;
  argmax.values = values, argmax.indices = indices, argmax.parts = {rows};
  run(Argmax::share, &argmax, threads_for(rows, size, threads));
}

// Sample an index of each row: [rows], and report its largest number in `values`. The index is -1 if that is infinite
// or NaN. Returns 0, or 1 if out of memory.
EXPORT int32_t NAMED(sample)(const float* x, int64_t rows, int64_t size, const void* params, float* values,
                             int64_t* indices, int32_t threads) {
  const Timed timed(OTHER);
  Sampling sampling;
  threads = threads_for(rows, size, threads);
  if (!sampling.allocate(x, rows, size, threads) && rows) return 1;
  sampling.params = (const Params*)params, sampling.values = values, sampling.indices = indices;
  run(Sampling::share, &sampling, threads);
  return 0;
}

// Write the logits of the distribution that `sample` samples from to `out`: [rows, size]. They are divided by the
// temperature, and those of tokens that the filters remove are negative infinity. A row without a temperature, or whose
// largest number is infinite or NaN, is copied. Returns 0, or 1 if out of memory.
EXPORT int32_t NAMED(process)(const float* x, int64_t rows, int64_t size, const void* params, float* out,
                              int32_t threads) {
  const Timed timed(OTHER);
  Processing processing;
  threads = threads_for(rows, size, threads);
  if (!processing.allocate(x, rows, size, threads) && rows) return 1;
  processing.params = (const Params*)params, processing.out = out;
  run(Processing::share, &processing, threads);
  return 0;
}

// Compute log(sum(e^x)) of each row: [rows], and its `count` largest numbers, equals by ascending index: [rows, count].
// If a row's largest number is infinite or NaN, its log is NaN and nothing else is written. Returns 0, or 1 if out of
// memory.
EXPORT int32_t NAMED(top_logits)(const float* x, int64_t rows, int64_t size, int64_t count, double* logs, float* values,
                                int64_t* indices, int32_t threads) {
  const Timed timed(OTHER);
  TopLogits top;
  threads = threads_for(rows, size, threads);
  if (!top.allocate(x, rows, size, threads) && rows) return 1;
  top.count = count, top.logs = logs, top.values = values, top.indices = indices;
  run(TopLogits::share, &top, threads);
  return 0;
}

// Set forbidden logits to negative infinity, in place. chosen: [rows], row numbers of x; bits: [rows, words], 1:
// allowed.
EXPORT void NAMED(forbid)(float* x, int64_t size, const int64_t* chosen, const uint32_t* bits, int64_t rows,
                          int64_t words) {
  const Timed timed(OTHER);
  const V forbidden = set1(-INFINITY);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x + chosen[r] * size;
    const uint32_t* row_bits = bits + r * words;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const uint32_t allowed = row_bits[i / 32] >> i % 32;
      store(row + i, where_bits(allowed, load(row + i), forbidden));
    }
    for (; i < size; ++i)
      if (!(row_bits[i / 32] >> i % 32 & 1)) row[i] = -INFINITY;
  }
}
