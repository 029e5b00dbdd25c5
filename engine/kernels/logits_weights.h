// Weights: the probabilities of a row's tokens as integers, whose sums are the same in any order, on every instruction
// set and in torch.
#pragma once
#include <math.h>

#include "isa.h"

namespace {

const double ONE = 0x1p44;  // the weight of a row's most likely token
const int64_t SPAN = 256;   // weights that are summed as doubles: exact, because the sum is at most 2^53

const double EIGHTHS[] = {  // 2^(i / 8)
    0x1.0000000000000p+0, 0x1.172b83c7d517bp+0, 0x1.306fe0a31b715p+0, 0x1.4bfdad5362a27p+0,
    0x1.6a09e667f3bcdp+0, 0x1.8ace5422aa0dbp+0, 0x1.ae89f995ad3adp+0, 0x1.d5818dcfba487p+0,
};

// e^x to 2^-52, for x from -32 to 0. For each of the 3 * 10^8 floats in that range, the result rounded to float equals
// that of torch's exp of a double.
D exponential(D x) {
  const D shift = set1_doubles(0x1.8p52);
  const D n = fma(x, set1_doubles(0x1.71547652b82fep3), shift);
  const D whole = add(n, set1_doubles(-0x1.8p52));
  D r = fma(whole, set1_doubles(-0x1.62e42fefa0000p-4), x);  // exact: the constant and x have few bits
  r = fma(whole, set1_doubles(-0x1.cf79abc9e3b39p-43), r);
  D e = set1_doubles(1.0 / 40320);  // Taylor's series: the next term is below 2^-59
  e = fma(e, r, set1_doubles(1.0 / 5040));
  e = fma(e, r, set1_doubles(1.0 / 720));
  e = fma(e, r, set1_doubles(1.0 / 120));
  e = fma(e, r, set1_doubles(1.0 / 24));
  e = fma(e, r, set1_doubles(1.0 / 6));
  e = fma(e, r, set1_doubles(0.5));
  e = fma(e, r, set1_doubles(1.0));
  e = fma(e, r, set1_doubles(1.0));
  return times_power(e, EIGHTHS, n);
}

// floor(2^44 e^(coldness (x - top))) of each lane; x is at most top.
V weight(V x, V top, V coldness) {
  const V scaled = mul(sub(x, top), coldness);
  if (!bits_where_ge(scaled, set1(-31.0f))) return zero();  // e^-31 is below 2^-44
  const V clamped = max(scaled, set1(-32.0f));
  return floor(mul(to_floats(exponential(first_half(clamped)), exponential(second_half(clamped))), set1((float)ONE)));
}

int64_t whole_sum(D sum) {
  double lanes[LANES / 2], result = 0;
  store_doubles(lanes, sum);
  for (double lane : lanes) result += lane;
  return (int64_t)result;
}

// Write the weights of up to SPAN numbers; returns their sum.
int64_t weigh(const float* x, int64_t count, float top, float coldness, float* weights) {
  const V maximum = set1(top), scale = set1(coldness);
  D sum = set1_doubles(0.0);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const V w = weight(load(x + i), maximum, scale);
    store(weights + i, w);
    sum = add(sum, add(first_half(w), second_half(w)));
  }
  int64_t rest = 0;
  if (i < count) {
    float lanes[LANES];
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = i + lane < count ? x[i + lane] : -INFINITY;
    store(lanes, weight(load(lanes), maximum, scale));
    for (int lane = 0; i + lane < count; ++lane) {
      weights[i + lane] = lanes[lane];
      rest += (int64_t)lanes[lane];
    }
  }
  return whole_sum(sum) + rest;
}

}  // namespace
