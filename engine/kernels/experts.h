// A mixture of experts: for each token a router chooses a few of many MLPs, whose results are added with its weights.
//
// Order. A token's weights depend on its logits alone. Tokens of one expert are multiplied together, and each row of a
// product has one order of sums; a token's results are added in float32 in the order of its weights, the largest first,
// and rounded once. So they do not depend on the other tokens.
#pragma once
#include "structures.h"
#include "work.h"

#include <string.h>

namespace {

template <class Number>
struct Mix {
  const Mixture& m;
  const Number* normed;  // [tokens, hidden]
  Number* x;             // [tokens, hidden]; the results are added to it
  int64_t tokens, hidden;
  int32_t threads;
  // In the room:
  float* logits = nullptr;     // [tokens, count]
  float* weights = nullptr;    // [tokens, active]
  float* gates = nullptr;      // [tokens], of what is shared, if it has a gate
  float* widened = nullptr;    // [tokens, hidden], of a router in float32: `normed`
  float* group_scores = nullptr;  // [tokens, groups], if there are several
  int32_t* chosen = nullptr;   // [tokens, active]
  int32_t* places = nullptr;   // [tokens, active]: where a token's results are
  int32_t* sources = nullptr;  // [tokens * active]: the token of each result; those of an expert follow each other
  int32_t* firsts = nullptr;   // [count + 1]: the first result of each expert
  Number *gathered = nullptr, *inner = nullptr, *shared = nullptr;  // [tokens, ...]
  Number* results = nullptr;                                        // [tokens * active, hidden]
  Parts parts = {};

  static const int64_t TOKENS = 16;  // that a thread claims at once

  // Give the arrays their places from `at` on; returns the end.
  char* arrange(char* at) {
    auto take = [&](auto& array, int64_t size) {
      array = (std::decay_t<decltype(array)>)at;
      at += ceil_div(size * (int64_t)sizeof(*array), 64) * 64;
    };
    take(logits, tokens * m.count), take(weights, tokens * m.active), take(chosen, tokens * m.active);
    take(places, tokens * m.active), take(sources, tokens * m.active), take(firsts, m.count + 1);
    take(gathered, tokens * hidden), take(inner, tokens * (m.inner > m.shared ? m.inner : m.shared));
    take(gates, m.shared_gate.multiply ? tokens : 0), take(shared, m.shared ? tokens * hidden : 0);
    take(group_scores, m.groups > 1 ? tokens * m.groups : 0), take(widened, m.wide_router ? tokens * hidden : 0);
    take(results, tokens * m.active * hidden);
    return at;
  }

  void widen_row(int64_t token) const {
    for (int64_t i = token * hidden, end = i + hidden; i < end; i += LANES)
      put(widened + i, get(normed + i, end - i), end - i);
  }

  float rank(const float* scores, int64_t e) const { return m.correction ? scores[e] + m.correction[e] : scores[e]; }

  // Exclude the experts outside of the best groups: those with the largest rank, or with sigmoids the largest sum of two.
  void exclude(int64_t token) const {
    float *scores = logits + token * m.count, *sum = group_scores + token * m.groups;
    const int64_t size = m.count / m.groups;
    for (int64_t g = 0; g < m.groups; ++g) {
      float first = -__builtin_inff(), second = first;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        const float own = rank(scores, e);
        if (own > first) second = first, first = own;
        else if (own > second) second = own;
      }
      sum[g] = m.sigmoid ? first + second : first;
    }
    for (int64_t g = 0; g < m.groups; ++g) {
      int64_t better = 0;
      for (int64_t other = 0; other < m.groups; ++other)
        better += sum[other] > sum[g] || (sum[other] == sum[g] && other < g);
      for (int64_t e = g * size; e < (g + 1) * size && better >= m.kept; ++e) scores[e] = -__builtin_inff();
    }
  }

  // Choose a token's experts, the best first; among equals the first one is better.
  void choose(int64_t token) const {
    float *scores = logits + token * m.count, *weight = weights + token * m.active, sum = 0;
    int32_t* own = chosen + token * m.active;
    float top = scores[0];
    for (int64_t e = 1; e < m.count; ++e) top = scores[e] > top ? scores[e] : top;
    for (int64_t e = 0; e < m.count; e += LANES) {
      const int64_t rest = m.count - e;
      const V logit = get(scores + e, rest);
      if (m.sigmoid) put(scores + e, divide(set1(1.0f), add(set1(1.0f), exponential(mul(logit, set1(-1.0f))))), rest);
      else put(scores + e, exponential(add(logit, set1(-top))), rest);
    }
    for (int64_t e = 0; e < m.count && !m.sigmoid; ++e) sum += scores[e];
    if (m.correction && !m.sigmoid) {  // which is added to the softmax itself
      for (int64_t e = 0; e < m.count; e += LANES)
        put(scores + e, divide(get(scores + e, m.count - e), set1(sum)), m.count - e);
      sum = 1.0f;
    }
    if (m.groups > 1) exclude(token);
    for (int64_t k = 0; k < m.active; ++k) {
      int64_t best = -1;
      float most = 0;
      for (int64_t e = 0; e < m.count; ++e) {
        bool is_taken = false;
        for (int64_t j = 0; j < k; ++j) is_taken |= own[j] == e;
        const float own_rank = rank(scores, e);
        if (!is_taken && (best < 0 || own_rank > most)) best = e, most = own_rank;
      }
      own[k] = (int32_t)best;
      weight[k] = m.sigmoid ? scores[best] : scores[best] / sum;
    }
    float total = m.epsilon;
    for (int64_t k = 0; k < m.active; ++k) total += weight[k];
    for (int64_t k = 0; k < m.active; ++k) weight[k] = (m.normalized ? weight[k] / total : weight[k]) * m.scale;
  }

  void sort() const {
    memset(firsts, 0, (size_t)(m.count + 1) * sizeof(int32_t));
    const int64_t pairs = tokens * m.active;
    for (int64_t i = 0; i < pairs; ++i) ++firsts[chosen[i] + 1];
    for (int64_t e = 0; e < m.count; ++e) firsts[e + 1] += firsts[e];
    for (int64_t i = 0; i < pairs; ++i) {
      const int32_t place = firsts[chosen[i]]++;  // the first of the next expert, when all have been placed
      places[i] = place, sources[place] = (int32_t)(i / m.active);
    }
    for (int64_t e = m.count; e > 0; --e) firsts[e] = firsts[e - 1];
    firsts[0] = 0;
  }

  void combine(int64_t token) const {
    Number* row = x + token * hidden;
    const V gate = m.shared_gate.multiply ? sigmoid(set1(gates[token])) : set1(1.0f);
    for (int64_t i = 0; i < hidden; i += LANES) {
      const int64_t rest = hidden - i;
      V total = get(row + i, rest);
      if (m.shared) total = add(total, mul(get(shared + token * hidden + i, rest), gate));
      for (int64_t pair = token * m.active; pair < (token + 1) * m.active; ++pair)
        total = add(total, mul(get(results + places[pair] * hidden + i, rest), set1(weights[pair])));
      put(row + i, total, rest);
    }
  }

  template <void (Mix::*EACH)(int64_t) const>
  static void share(void* work, int) {
    Mix& mix = *(Mix*)work;
    for (int64_t part; mix.parts.claim(part);)
      for (int64_t t = part * TOKENS; t < (part + 1) * TOKENS && t < mix.tokens; ++t) (mix.*EACH)(t);
  }
  template <void (Mix::*EACH)(int64_t) const>
  void each_token() {
    const Timed timed(OTHER);
    parts.count = ceil_div(tokens, TOKENS), parts.next = 0;
    run(share<EACH>, this, tokens <= TOKENS ? 1 : threads);
  }

  // Returns 0, or 1 if out of memory.
  int32_t compute() {
    char* memory = (char*)room(arrange(nullptr) - (char*)nullptr);
    if (!memory) return 1;
    arrange(memory);
    if (m.wide_router) each_token<&Mix::widen_row>();
    int32_t failed = m.router.apply(m.wide_router ? (const void*)widened : normed, nullptr, logits, tokens, threads);
    each_token<&Mix::choose>();
    sort();
    for (int64_t e = 0; e < m.count; ++e) {
      const int64_t first = firsts[e], rows = firsts[e + 1] - first;
      if (!rows) continue;
      const Number* from = normed;
      if (rows < tokens) {  // else its tokens are all, in their order
        from = gathered;
        for (int64_t i = 0; i < rows; ++i)
          memcpy(gathered + i * hidden, normed + sources[first + i] * hidden, (size_t)hidden * sizeof(Number));
      }
      failed |= m.gate_ups[e].apply(from, nullptr, inner, rows, threads);
      failed |= m.downs[e].apply(inner, nullptr, results + first * hidden, rows, threads);
    }
    if (m.shared) {
      failed |= m.shared_gate_up.apply(normed, nullptr, inner, tokens, threads);
      failed |= m.shared_down.apply(inner, nullptr, shared, tokens, threads);
      if (m.shared_gate.multiply) failed |= m.shared_gate.apply(normed, nullptr, gates, tokens, threads);
    }
    each_token<&Mix::combine>();
    return failed;
  }
};

}  // namespace
