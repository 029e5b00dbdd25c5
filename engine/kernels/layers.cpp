// All layers of a decoder in one call, and their work beside matmuls and attention: RMSNorm, and one pass that applies
// the optional query and key norms and the rotary embedding, and writes keys and values to the cache.
//
// Order. A row's sum of squares is four partial sums, added at the end; only the row's size determines the order. Each
// result is rounded where torch rounds it: after the norm, after its weight, and after each product of a rotation. A
// row is always computed by one thread.
#include "structures.h"
#include "pages.h"
#include "work.h"
#include "experts.h"

namespace {

const int64_t SHORT = 1 << 15;  // numbers below which waking other threads costs more than they save
const int64_t PART = 1 << 12;   // numbers of a norm that a thread claims at once, but at least a row

// -- norms ------------------------------------------------------------------------------------------------------------

// y = x / rms(x) * weight; y may be x. With a weight in float32 the result is rounded once, after the weight.
template <class Number, class Weight>
void normalize(const Number* x, const Weight* weight, float eps, int64_t size, Number* y) {
  V a = zero(), b = zero(), c = zero(), d = zero();
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES) {
    const V p = widen(x + i), q = widen(x + i + LANES), r = widen(x + i + 2 * LANES), s = widen(x + i + 3 * LANES);
    a = fma(p, p, a), b = fma(q, q, b), c = fma(r, r, c), d = fma(s, s, d);
  }
  for (; i < size; i += LANES) {
    const V p = get(x + i, size - i);
    a = fma(p, p, a);
  }
  const float mean = sum_lanes(add(add(a, b), add(c, d))) / (float)size;
  const V factor = set1(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps))));
  for (i = 0; i < size; i += LANES)
    put(y + i, mul(get(weight + i, size - i), round_to<Weight>(mul(get(x + i, size - i), factor))), size - i);
}

// y = (x - mean) / deviation * weight, rounded once; y may be x.
template <class Number>
void center(const Number* x, const float* weight, float eps, int64_t size, Number* y) {
  V a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) a = add(a, widen(x + i)), b = add(b, widen(x + i + LANES));
  for (; i < size; i += LANES) a = add(a, get(x + i, size - i));
  const V minus_mean = set1(-(sum_lanes(add(a, b)) / (float)size));
  a = zero(), b = zero();
  for (i = 0; i + 2 * LANES <= size; i += 2 * LANES) {
    const V p = add(widen(x + i), minus_mean), q = add(widen(x + i + LANES), minus_mean);
    a = fma(p, p, a), b = fma(q, q, b);
  }
  for (; i < size; i += LANES) {
    float lanes[LANES] = {};
    put(lanes, add(get(x + i, size - i), minus_mean), size - i);  // lanes beyond the row stay 0
    const V p = load(lanes);
    a = fma(p, p, a);
  }
  const float variance = sum_lanes(add(a, b)) / (float)size;
  const V factor = set1(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(variance + eps))));
  for (i = 0; i < size; i += LANES)
    put(y + i, mul(get(weight + i, size - i), mul(add(get(x + i, size - i), minus_mean), factor)), size - i);
}

template <class Number, class Weight, bool CENTERED = false>
struct Norm {
  const Number* x;
  const Weight* weight;
  Number* y;
  int64_t rows, size;
  float eps;
  Parts parts = {};

  int64_t rows_of_part() const { return max(1, PART / max(1, size)); }

  static void share(void* work, int) {
    Norm& norm = *(Norm*)work;
    const int64_t each = norm.rows_of_part();
    for (int64_t part; norm.parts.claim(part);)
      for (int64_t row = part * each; row < min(norm.rows, (part + 1) * each); ++row) {
        const Number* from = norm.x + row * norm.size;
        if constexpr (CENTERED) center(from, norm.weight, norm.eps, norm.size, norm.y + row * norm.size);
        else normalize(from, norm.weight, norm.eps, norm.size, norm.y + row * norm.size);
      }
  }
  void compute(int threads) {
    const Timed timed(OTHER);
    parts.count = ceil_div(rows, rows_of_part());
    run(share, this, rows * size < SHORT ? 1 : threads);
  }
};

// -- rotary embedding -------------------------------------------------------------------------------------------------

// Rotates the first `turned` numbers of queries and keys in place, [tokens, heads + 2 * kv_heads, head_dim], and writes
// keys and values to the cache.
template <class Number, class Held>
struct Rotation {
  Number* qkv;
  const Number *q_norm, *k_norm;  // [head_dim] or null
  const int64_t* positions;
  const float* angles;  // [positions, 2, turned / 2]: cosines, then sines; or null
  int64_t tokens, heads, kv_heads, head_dim, turned;
  float eps;
  Pages<Number, Held> cache;
  int64_t each = PAGE;  // tokens that a thread claims at once: few, so that a head's keys stay in the first-level cache
  Parts parts = {};

  void rotate(Number* head, const float* angle) const {
    const int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i += LANES) {
      const V a = get(head + i, half - i), b = get(head + half + i, half - i);
      const V cosine = get(angle + i, half - i), sine = get(angle + half + i, half - i);
      const V negated = mul(round_to<Number>(mul(b, sine)), set1(-1.0f));
      put(head + i, add(round_to<Number>(mul(a, cosine)), negated), half - i);
      put(head + half + i, add(round_to<Number>(mul(b, cosine)), round_to<Number>(mul(a, sine))), half - i);
    }
  }

  // Process tokens [from, to).
  void rotate(int64_t from, int64_t to) const {
    const int64_t width = (heads + 2 * kv_heads) * head_dim;
    const Number *k = qkv + heads * head_dim, *v = k + kv_heads * head_dim;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      const Number* weight = h < heads ? q_norm : k_norm;
      for (int64_t t = from; t < to; ++t) {
        Number* head = qkv + t * width + h * head_dim;
        if (weight) normalize(head, weight, eps, head_dim, head);
        if (angles) rotate(head, angles + positions[t] * turned);
      }
      if (h >= heads) cache.write(h - heads, k, v, from, to);
    }
  }

  static void share(void* work, int) {
    Rotation& rotation = *(Rotation*)work;
    for (int64_t part; rotation.parts.claim(part);)
      rotation.rotate(part * rotation.each, min(rotation.tokens, (part + 1) * rotation.each));
  }
  void compute(int threads) {
    const Timed timed(OTHER);
    if (tokens * (heads + kv_heads) * head_dim < SHORT) threads = 1;
    each = max(1, min(PAGE, ceil_div(tokens, threads)));
    parts.count = ceil_div(tokens, each);
    run(share, this, threads);
  }
};

// -- logits -----------------------------------------------------------------------------------------------------------

struct Softcap {
  float* x;
  int64_t size;
  float cap;
  Parts parts = {};

  static void share(void* work, int) {
    Softcap& s = *(Softcap*)work;
    const V cap = set1(s.cap), inverse = set1(1.0f / s.cap);
    for (int64_t part; s.parts.claim(part);)
      for (int64_t i = part * PART; i < min(s.size, (part + 1) * PART); i += LANES)
        put(s.x + i, mul(cap, hyperbolic_tangent(mul(get(s.x + i, s.size - i), inverse))), s.size - i);
  }
  void compute(int threads) {
    const Timed timed(OTHER);
    parts.count = ceil_div(size, PART);
    run(share, this, size < SHORT ? 1 : threads);
  }
};

// -- gates ------------------------------------------------------------------------------------------------------------

// y = activation(gate) * up for x: [rows, 2 * inner], gate before up.
template <class Number>
struct Gates {
  Gate how;
  const Number* x;
  Number* y;
  int64_t rows, inner;
  Parts parts = {};

  int64_t rows_of_part() const { return max(1, PART / max(1, inner)); }

  static void share(void* work, int) {
    Gates& g = *(Gates*)work;
    const int64_t each = g.rows_of_part();
    for (int64_t part; g.parts.claim(part);)
      for (int64_t row = part * each; row < min(g.rows, (part + 1) * each); ++row) {
        const Number *gate = g.x + row * 2 * g.inner, *up = gate + g.inner;
        for (int64_t i = 0; i < g.inner; i += LANES)
          put(g.y + row * g.inner + i, gated(g.how, get(gate + i, g.inner - i), get(up + i, g.inner - i)), g.inner - i);
      }
  }
  void compute(int threads) {
    const Timed timed(OTHER);
    parts.count = ceil_div(rows, rows_of_part());
    run(share, this, rows * inner < SHORT ? 1 : threads);
  }
};

// -- all layers -------------------------------------------------------------------------------------------------------

template <class Number, class Held>
int32_t compute(const Stack& s) {
  for (int64_t t = 0; t < s.tokens; ++t)
    if (s.positions[t] < 0 || s.positions[t] >= s.num_angles) return 2;
  for (int64_t i = 0; i < s.num_layers; ++i) {
    const Layer& layer = s.layers[i];
    auto norm = [&](const void* weight) {
      Norm<Number, Number>{(const Number*)s.x, (const Number*)weight, (Number*)s.normed, s.tokens, s.hidden, s.eps}
          .compute(s.threads);
    };
    norm(layer.attention_norm);
    int32_t failed = layer.qkv.apply(s.normed, nullptr, s.line, s.tokens, s.threads);
    const Call& call = *s.calls[layer.call];
    Rotation<Number, Held>{(Number*)s.line, (const Number*)layer.q_norm, (const Number*)layer.k_norm, s.positions,
                           layer.turn < 0 ? nullptr : s.angles[layer.turn], s.tokens, s.heads, s.kv_heads, s.head_dim,
                           s.turned, s.eps, Pages<Number, Held>(call, s.caches[i])}
        .compute(s.threads);
    failed |= s.attend(&call, s.line, nullptr, nullptr, s.caches[i], s.seen, nullptr, s.threads);
    failed |= layer.output.apply(s.seen, s.x, s.x, s.tokens, s.threads);
    norm(layer.mlp_norm);
    if (layer.experts) {
      Mix<Number> mix{*layer.experts, (const Number*)s.normed, (Number*)s.x, s.tokens, s.hidden, s.threads};
      failed |= mix.compute();
    } else {
      failed |= layer.gate_up.apply(s.normed, nullptr, s.inner, s.tokens, s.threads);
      failed |= layer.down.apply(s.inner, s.x, s.x, s.tokens, s.threads);
    }
    if (failed) return 1;
  }
  return 0;
}

// The products of each head's rows with a weight of its own.
struct Heads {
  const Multiplied* weights;
  int64_t count;
  const char* x;
  char* y;
  int64_t x_step, y_step, rows;
  int32_t failed = 0;
  Parts parts = {};

  int32_t apply(int64_t head, int32_t threads) const {
    return weights[head].apply(x + head * x_step, nullptr, y + head * y_step, rows, threads);
  }

  static void share(void* work, int) {
    Heads& heads = *(Heads*)work;
    for (int64_t head; heads.parts.claim(head);)
      if (heads.apply(head, 1)) __atomic_store_n(&heads.failed, 1, __ATOMIC_RELAXED);
  }

  int32_t compute(int32_t threads) {
    if (count >= threads) {  // waking threads once costs less than for each product
      parts.count = count;
      run(share, this, threads);
    } else {
      for (int64_t head = 0; head < count; ++head) failed |= apply(head, threads);
    }
    return failed;
  }
};

}  // namespace

EXPORT void NAMED(norm_float32)(const float* x, const float* weight, float* y, int64_t rows, int64_t size, float eps,
                                int32_t threads) {
  Norm<float, float>{x, weight, y, rows, size, eps}.compute(threads);
}

EXPORT void NAMED(norm_bfloat16)(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t rows, int64_t size,
                                 float eps, int32_t threads) {
  Norm<uint16_t, uint16_t>{x, weight, y, rows, size, eps}.compute(threads);
}

EXPORT void NAMED(norm_wide_bfloat16)(const uint16_t* x, const float* weight, uint16_t* y, int64_t rows, int64_t size,
                                      float eps, int32_t threads) {
  Norm<uint16_t, float>{x, weight, y, rows, size, eps}.compute(threads);
}

EXPORT void NAMED(norm_centered_float32)(const float* x, const float* weight, float* y, int64_t rows, int64_t size,
                                         float eps, int32_t threads) {
  Norm<float, float, true>{x, weight, y, rows, size, eps}.compute(threads);
}

EXPORT void NAMED(norm_centered_bfloat16)(const uint16_t* x, const float* weight, uint16_t* y, int64_t rows,
                                          int64_t size, float eps, int32_t threads) {
  Norm<uint16_t, float, true>{x, weight, y, rows, size, eps}.compute(threads);
}

// x = cap * tanh(x / cap)
EXPORT void NAMED(softcap)(float* x, int64_t size, float cap, int32_t threads) {
  Softcap{x, size, cap}.compute(threads);
}

// x = 1 / (1 + e^-x)
EXPORT void NAMED(sigmoid)(float* x, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) {
    const V e = exponential(mul(get(x + i, size - i), set1(-1.0f)));
    put(x + i, divide(set1(1.0f), add(set1(1.0f), e)), size - i);
  }
}

// x = log(1 + e^x)
EXPORT void NAMED(softplus)(float* x, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) put(x + i, softplus(get(x + i, size - i)), size - i);
}

EXPORT void NAMED(gates_float32)(const Gate* how, const float* x, float* y, int64_t rows, int64_t inner, int32_t threads) {
  Gates<float>{*how, x, y, rows, inner}.compute(threads);
}

EXPORT void NAMED(gates_bfloat16)(const Gate* how, const uint16_t* x, uint16_t* y, int64_t rows, int64_t inner,
                                  int32_t threads) {
  Gates<uint16_t>{*how, x, y, rows, inner}.compute(threads);
}

// x += the mixture of experts of `normed`, both [tokens, hidden]. Returns 0, or 1 if out of memory.
EXPORT int32_t NAMED(experts_float32)(const Mixture* m, const float* normed, float* x, int64_t tokens, int64_t hidden,
                                      int32_t threads) {
  return Mix<float>{*m, normed, x, tokens, hidden, threads}.compute();
}
EXPORT int32_t NAMED(experts_bfloat16)(const Mixture* m, const uint16_t* normed, uint16_t* x, int64_t tokens,
                                       int64_t hidden, int32_t threads) {
  return Mix<uint16_t>{*m, normed, x, tokens, hidden, threads}.compute();
}

// y[h] = x[h] @ weight h, of `count` heads that follow each other in x and in y, in steps of so many bytes. Returns 0,
// or 1 if out of memory.
EXPORT int32_t NAMED(head_products)(const Multiplied* weights, int64_t count, const char* x, char* y, int64_t x_step,
                                    int64_t y_step, int64_t rows, int32_t threads) {
  return Heads{weights, count, x, y, x_step, y_step, rows}.compute(threads);
}

// Returns 0, 1 if out of memory, or 2 if a position has no angles. Each is named like the `attend` that it calls.
EXPORT int32_t NAMED(layers_float32)(const Stack* stack) { return compute<float, float>(*stack); }
EXPORT int32_t NAMED(layers_bfloat16)(const Stack* stack) { return compute<uint16_t, uint16_t>(*stack); }
EXPORT int32_t NAMED(layers_float32_int8)(const Stack* stack) { return compute<float, int8_t>(*stack); }
EXPORT int32_t NAMED(layers_bfloat16_int8)(const Stack* stack) { return compute<uint16_t, int8_t>(*stack); }
