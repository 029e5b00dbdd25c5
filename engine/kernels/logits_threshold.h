// Thresholds: the smallest of a row's top k numbers, or of the largest weights that sum to top p.
#pragma once
#include <algorithm>

#include "logits_weights.h"

namespace {

// A Measure of a set of numbers: how many there are, or, for weights, their sum.
struct Count {
  int64_t count = 0;
  void add_lanes(V, uint32_t bits) { count += __builtin_popcount(bits); }
  static int64_t of(float) { return 1; }
  int64_t sum() { return count; }
};
struct Mass {
  D mass = set1_doubles(0.0);
  void add_lanes(V v, uint32_t bits) {
    v = where_bits(bits, v, zero());
    mass = add(mass, add(first_half(v), second_half(v)));
  }
  static int64_t of(float x) { return (int64_t)x; }
  int64_t sum() { return whole_sum(mass); }
};

struct Part {
  int64_t count;    // of numbers
  int64_t measure;  // of all of them
};

// Select the numbers in [low, high), and copy them to `out` unless it is null; `out` may be `v`.
template <class Measure>
Part select(const float* v, int64_t count, float low, float high, float* out) {
  Part selected = {0, 0};
  const V low_lanes = set1(low), high_lanes = set1(high);
  for (int64_t start = 0; start < count; start += SPAN) {
    const int64_t end = start + SPAN < count ? start + SPAN : count;
    Measure measure;
    int64_t i = start;
    for (; i + LANES <= end; i += LANES) {
      const V x = load(v + i);
      const uint32_t bits = bits_where_ge(x, low_lanes) & ~bits_where_ge(x, high_lanes);
      measure.add_lanes(x, bits);
      if (out) store_selected(out + selected.count, x, bits);
      selected.count += __builtin_popcount(bits);
    }
    selected.measure += measure.sum();
    for (; i < end; ++i) {
      const float x = v[i];
      if (!(x >= low) || x >= high) continue;
      selected.measure += Measure::of(x);
      if (out) out[selected.count] = x;
      ++selected.count;
    }
  }
  return selected;
}

// Measure the numbers that are at least `low`, and those that are at least `high`.
template <class Measure>
void measure(const float* v, int64_t count, float low, float high, int64_t& from_low, int64_t& from_high) {
  const V low_lanes = set1(low), high_lanes = set1(high);
  from_low = from_high = 0;
  for (int64_t start = 0; start < count; start += SPAN) {
    const int64_t end = start + SPAN < count ? start + SPAN : count;
    Measure low_measure, high_measure;
    int64_t i = start;
    for (; i + LANES <= end; i += LANES) {
      const V x = load(v + i);
      low_measure.add_lanes(x, bits_where_ge(x, low_lanes));
      high_measure.add_lanes(x, bits_where_ge(x, high_lanes));
    }
    from_low += low_measure.sum(), from_high += high_measure.sum();
    for (; i < end; ++i) {
      if (v[i] >= low) from_low += Measure::of(v[i]);
      if (v[i] >= high) from_high += Measure::of(v[i]);
    }
  }
}

const int64_t FEW = 256;    // numbers that are sorted: all that are left, or a sample of them
const int64_t MARGIN = 24;  // error of an index in the sample that is allowed for: three times the usual one

// The largest number t in v such that the numbers >= t measure at least `need`, which is from 1 to `total`, the measure
// of all of v. v has no NaN and no positive infinity. buffer: [count + LANES].
template <class Measure>
float threshold(const float* v, int64_t count, int64_t need, int64_t total, float* buffer) {
  while (count > FEW) {
    float sample[FEW];
    int64_t measured = 0;
    for (int64_t i = 0; i < FEW; ++i) measured += Measure::of(sample[i] = v[i * count / FEW]);
    std::sort(sample, sample + FEW, [](float a, float b) { return a > b; });
    const double share = (double)need / (double)total * (double)measured;
    int64_t index = 0;
    for (double upto = (double)Measure::of(sample[0]); upto < share && index < FEW - 1;)
      upto += (double)Measure::of(sample[++index]);
    // Keep the range that holds the threshold: above `high`, between `low` and `high`, or below `low`.
    const float high = index >= MARGIN ? sample[index - MARGIN] : INFINITY;
    const float low = index + MARGIN < FEW ? sample[index + MARGIN] : -INFINITY;
    int64_t from_low, from_high;
    measure<Measure>(v, count, low, high, from_low, from_high);
    float from = -INFINITY, to = low;
    int64_t above = from_low;
    if (need <= from_high)
      from = high, to = INFINITY, above = 0;
    else if (need <= from_low)
      from = low, to = high, above = from_high;
    Part kept = select<Measure>(v, count, from, to, buffer);
    if (kept.count == count) {  // nothing was dropped: the smallest number is the threshold, or can be dropped
      from = *std::min_element(buffer, buffer + count);
      const float next = nextafterf(from, INFINITY);
      kept = select<Measure>(buffer, count, next, INFINITY, buffer);
      if (kept.measure < need - above) return from;
    }
    v = buffer, count = kept.count, need -= above, total = kept.measure;
  }
  if (v != buffer) std::copy(v, v + count, buffer);
  std::sort(buffer, buffer + count, [](float a, float b) { return a > b; });
  int64_t index = 0;
  for (int64_t upto = Measure::of(buffer[0]); upto < need; ++index) upto += Measure::of(buffer[index + 1]);
  return buffer[index];
}

// Write the indices of the numbers that are at least `low`, in ascending order; returns how many there are.
int64_t indices_from(const float* v, int64_t count, float low, int32_t* indices) {
  const V low_lanes = set1(low);
  int64_t num_found = 0, i = 0;
  for (; i + LANES <= count; i += LANES)
    for (uint32_t bits = bits_where_ge(load(v + i), low_lanes); bits; bits &= bits - 1)
      indices[num_found++] = (int32_t)(i + __builtin_ctz(bits));
  for (; i < count; ++i)
    if (v[i] >= low) indices[num_found++] = (int32_t)i;
  return num_found;
}

}  // namespace
