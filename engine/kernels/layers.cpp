// All layers of a decoder in one call, and what they do beside products and attention: RMSNorm, and, in one pass, the
// turning of queries and keys by their positions, with the norms that some models have there, and the writing of keys
// and values into the cache.
//
// Order. A row's sum of squares has four sums side by side, joined at the end; its size alone says how. Each result is
// rounded where torch rounds it: behind the norm, behind its weight, and behind each product of a rotation. Rows are
// shared out among the threads whole.
#include "structures.h"
#include "pages.h"
#include "work.h"

namespace {

const int64_t SHORT = 1 << 15;  // numbers below which waking other threads costs more than they save
const int64_t PART = 1 << 12;   // numbers of a norm that a thread takes at once, or one row

// As a Number would hold it.
template <class Number>
V as(V v) {
  return sizeof(Number) == 4 ? v : lower(rounded(v));
}

// -- the norm ----------------------------------------------------------------------------------------------------------

// y = x / rms(x) * weight; y may be x.
template <class Number>
void normalize(const Number* x, const Number* weight, float eps, int64_t size, Number* y) {
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
  const float mean = total(add(add(a, b), add(c, d))) / (float)size;
  const V factor = all(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps))));
  for (i = 0; i < size; i += LANES)
    put(y + i, mul(get(weight + i, size - i), as<Number>(mul(get(x + i, size - i), factor))), size - i);
}

template <class Number>
struct Norm {
  const Number *x, *weight;
  Number* y;
  int64_t rows, size;
  float eps;
  Parts parts = {};

  int64_t rows_of_part() const { return larger(1, PART / larger(1, size)); }

  static void share(void* work, int) {
    Norm& norm = *(Norm*)work;
    const int64_t each = norm.rows_of_part();
    for (int64_t part; norm.parts.take(part);)
      for (int64_t row = part * each; row < smaller(norm.rows, (part + 1) * each); ++row)
        normalize(norm.x + row * norm.size, norm.weight, norm.eps, norm.size, norm.y + row * norm.size);
  }
  void compute(int threads) {
    const Timed timed(IN_OTHERS);
    parts.count = up(rows, rows_of_part());
    run(share, this, rows * size < SHORT ? 1 : threads);
  }
};

// -- the turn ----------------------------------------------------------------------------------------------------------

// Queries of a line of tokens, [tokens, heads + 2 * kv_heads heads], in place; keys and values go to the cache.
template <class Number, class Held>
struct Turn {
  Number* line;
  const Number *q_norm, *k_norm;  // [head_dim] or null
  const int64_t* positions;
  const float* angles;  // [positions, 2, head_dim / 2]: cosines, then sines
  int64_t tokens, heads, kv_heads, head_dim;
  float eps;
  Pages<Number, Held> cache;
  int64_t each = PAGE;  // tokens that a thread takes at once: so few that a head's keys stay in the first cache
  Parts parts = {};

  void turn(Number* head, const float* angle) const {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
      const V a = get(head + i, half - i), b = get(head + half + i, half - i);
      const V cosine = get(angle + i, half - i), sine = get(angle + half + i, half - i);
      const V back = mul(as<Number>(mul(b, sine)), all(-1.0f));
      put(head + i, add(as<Number>(mul(a, cosine)), back), half - i);
      put(head + half + i, add(as<Number>(mul(b, cosine)), as<Number>(mul(a, sine))), half - i);
    }
  }

  // Tokens [from, to).
  void turn(int64_t from, int64_t to) const {
    const int64_t width = (heads + 2 * kv_heads) * head_dim;
    const Number *k = line + heads * head_dim, *v = k + kv_heads * head_dim;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      const Number* weight = h < heads ? q_norm : k_norm;
      for (int64_t t = from; t < to; ++t) {
        Number* head = line + t * width + h * head_dim;
        if (weight) normalize(head, weight, eps, head_dim, head);
        turn(head, angles + positions[t] * head_dim);
      }
      if (h >= heads) cache.write(h - heads, k, v, from, to);
    }
  }

  static void share(void* work, int) {
    Turn& turn = *(Turn*)work;
    for (int64_t part; turn.parts.take(part);)
      turn.turn(part * turn.each, smaller(turn.tokens, (part + 1) * turn.each));
  }
  void compute(int threads) {
    const Timed timed(IN_OTHERS);
    if (tokens * (heads + kv_heads) * head_dim < SHORT) threads = 1;
    each = larger(1, smaller(PAGE, up(tokens, threads)));
    parts.count = up(tokens, each);
    run(share, this, threads);
  }
};

// -- all layers --------------------------------------------------------------------------------------------------------

template <class Number, class Held>
int32_t compute(const Stack& s) {
  for (int64_t t = 0; t < s.tokens; ++t)
    if (s.positions[t] < 0 || s.positions[t] >= s.num_angles) return 2;
  for (int64_t i = 0; i < s.num_layers; ++i) {
    const Layer& layer = s.layers[i];
    auto norm = [&](const void* weight) {
      Norm<Number>{(const Number*)s.x, (const Number*)weight, (Number*)s.normed, s.tokens, s.hidden, s.eps}.compute(s.threads);
    };
    norm(layer.attention_norm);
    int32_t failed = layer.qkv.apply(s.normed, nullptr, s.line, s.tokens, s.threads);
    const Call& call = *s.calls[layer.call];
    Turn<Number, Held>{(Number*)s.line, (const Number*)layer.q_norm, (const Number*)layer.k_norm, s.positions, s.angles,
                       s.tokens, s.heads, s.kv_heads, s.head_dim, s.eps, Pages<Number, Held>(call, s.caches[i])}
        .compute(s.threads);
    failed |= s.attend(&call, s.line, nullptr, nullptr, s.caches[i], s.seen, nullptr, s.threads);
    failed |= layer.output.apply(s.seen, s.x, s.x, s.tokens, s.threads);
    norm(layer.mlp_norm);
    failed |= layer.gate_up.apply(s.normed, nullptr, s.inner, s.tokens, s.threads);
    failed |= layer.down.apply(s.inner, s.x, s.x, s.tokens, s.threads);
    if (failed) return 1;
  }
  return 0;
}

}  // namespace

EXPORT void NAMED(norm_float32)(const float* x, const float* weight, float* y, int64_t rows, int64_t size, float eps,
                                int32_t threads) {
  Norm<float>{x, weight, y, rows, size, eps}.compute(threads);
}

EXPORT void NAMED(norm_bfloat16)(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t rows, int64_t size,
                                 float eps, int32_t threads) {
  Norm<uint16_t>{x, weight, y, rows, size, eps}.compute(threads);
}

// 0, 1 where memory is short, 2 where a position has no angles. Named as what `attend` must be.
EXPORT int32_t NAMED(layers_float32)(const Stack* stack) { return compute<float, float>(*stack); }
EXPORT int32_t NAMED(layers_bfloat16)(const Stack* stack) { return compute<uint16_t, uint16_t>(*stack); }
EXPORT int32_t NAMED(layers_float32_int8)(const Stack* stack) { return compute<float, int8_t>(*stack); }
EXPORT int32_t NAMED(layers_bfloat16_int8)(const Stack* stack) { return compute<uint16_t, int8_t>(*stack); }
