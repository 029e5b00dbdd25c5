// What a step wants of its logits: each row's largest number, a token drawn by chance, the likeliest tokens.
//
// The lowest place wins among equals, and what is no number wins over all. Probabilities are whole numbers, whose sums
// are the same in any order, and the same for every instruction set and in torch (engine/runner/vocabulary.py).
#include <math.h>

#include <algorithm>

#include "isa.h"
#include "work.h"

namespace {

const int64_t SMALL = 1 << 15;  // numbers below which waking other threads costs more than they save
const double ONE = 0x1p44;      // the weight of a row's likeliest token
// Weights are added as doubles in so many at once: up to 2^53 that is exact.
const int64_t SPAN = 256;

struct Best {
  float value;
  int64_t place;
};

bool is_number(float x) { return x == x; }
bool any_none(V v) {
  float lanes[LANES];
  store(lanes, v);
  for (float lane : lanes)
    if (!is_number(lane)) return true;
  return false;
}

// A first pass without places: they would cost more than to look for the one that counts.
Best look(const float* from, int64_t count) {
  V most = all(from[0]), none = zero();
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const V v = load(from + i);
    most = greatest(v, most);
    none = where_number(v, none, v);
  }
  float top = largest(most);
  bool odd = any_none(none);
  for (; i < count; ++i) {
    odd |= !is_number(from[i]);
    if (from[i] > top) top = from[i];
  }
  int64_t place = 0;
  if (odd)
    while (is_number(from[place])) ++place;
  else
    while (from[place] != top) ++place;
  return {from[place], place};
}

// -- weights ---------------------------------------------------------------------------------------------------------

const double EIGHTHS[] = {  // 2^(i / 8)
    0x1.0000000000000p+0, 0x1.172b83c7d517bp+0, 0x1.306fe0a31b715p+0, 0x1.4bfdad5362a27p+0,
    0x1.6a09e667f3bcdp+0, 0x1.8ace5422aa0dbp+0, 0x1.ae89f995ad3adp+0, 0x1.d5818dcfba487p+0,
};

// e^x to 2^-52, for x from -32 to 0. Of the 3 * 10^8 floats there, each gives what torch's exp of a double gives, once
// both are rounded to floats.
D exponential(D x) {
  const D shift = all_doubles(0x1.8p52);
  const D n = fma(x, all_doubles(0x1.71547652b82fep3), shift);
  const D whole = add(n, all_doubles(-0x1.8p52));
  D r = fma(whole, all_doubles(-0x1.62e42fefa0000p-4), x);  // exact: the constant is short, and so is x
  r = fma(whole, all_doubles(-0x1.cf79abc9e3b39p-43), r);
  D e = all_doubles(1.0 / 40320);  // Taylor's series: the next term is below 2^-59
  e = fma(e, r, all_doubles(1.0 / 5040));
  e = fma(e, r, all_doubles(1.0 / 720));
  e = fma(e, r, all_doubles(1.0 / 120));
  e = fma(e, r, all_doubles(1.0 / 24));
  e = fma(e, r, all_doubles(1.0 / 6));
  e = fma(e, r, all_doubles(0.5));
  e = fma(e, r, all_doubles(1.0));
  e = fma(e, r, all_doubles(1.0));
  return times_power(e, EIGHTHS, n);
}

// floor(2^44 e^(coldness (x - top))) of each lane; x is at most top.
V weight(V x, V top, V coldness) {
  const V scaled = mul(minus(x, top), coldness);
  if (!bits_at_least(scaled, all(-31.0f))) return zero();  // e^-31 is below 2^-44
  const V near = greatest(scaled, all(-32.0f));
  return down(mul(as_floats(exponential(first_half(near)), exponential(second_half(near))), all((float)ONE)));
}

int64_t whole_sum(D sum) {
  double lanes[LANES / 2], result = 0;
  store_doubles(lanes, sum);
  for (double lane : lanes) result += lane;
  return (int64_t)result;
}

// Weights of up to SPAN numbers, and their sum.
int64_t weigh(const float* x, int64_t count, float top, float coldness, float* weights) {
  const V most = all(top), scale = all(coldness);
  D sum = all_doubles(0.0);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const V w = weight(load(x + i), most, scale);
    store(weights + i, w);
    sum = add(sum, add(first_half(w), second_half(w)));
  }
  int64_t rest = 0;
  if (i < count) {
    float lanes[LANES];
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = i + lane < count ? x[i + lane] : -INFINITY;
    store(lanes, weight(load(lanes), most, scale));
    for (int lane = 0; i + lane < count; ++lane) {
      weights[i + lane] = lanes[lane];
      rest += (int64_t)lanes[lane];
    }
  }
  return whole_sum(sum) + rest;
}

// -- thresholds ------------------------------------------------------------------------------------------------------

// How much numbers count for: one each, or, where they are weights, what they are.
struct Count {
  int64_t found = 0;
  void take(V, uint32_t bits) { found += __builtin_popcount(bits); }
  static int64_t of(float) { return 1; }
  int64_t sum() { return found; }
};
struct Mass {
  D found = all_doubles(0.0);
  void take(V v, uint32_t bits) {
    v = where_bits(bits, v, zero());
    found = add(found, add(first_half(v), second_half(v)));
  }
  static int64_t of(float x) { return (int64_t)x; }
  int64_t sum() { return whole_sum(found); }
};

struct Part {
  int64_t count;    // of its numbers
  int64_t measure;  // what they count for together
};

// The numbers from `low` up to below `high`; put together at `room`, which may be `v`, or null.
template <class Measure>
Part part(const float* v, int64_t count, float low, float high, float* room) {
  Part found = {0, 0};
  const V least = all(low), limit = all(high);
  for (int64_t start = 0; start < count; start += SPAN) {
    const int64_t end = start + SPAN < count ? start + SPAN : count;
    Measure measure;
    int64_t i = start;
    for (; i + LANES <= end; i += LANES) {
      const V x = load(v + i);
      const uint32_t bits = bits_at_least(x, least) & ~bits_at_least(x, limit);
      measure.take(x, bits);
      if (room) store_some(room + found.count, x, bits);
      found.count += __builtin_popcount(bits);
    }
    found.measure += measure.sum();
    for (; i < end; ++i) {
      const float x = v[i];
      if (!(x >= low) || x >= high) continue;
      found.measure += Measure::of(x);
      if (room) room[found.count] = x;
      ++found.count;
    }
  }
  return found;
}

// What the numbers count for that are at least `low`, and those that are at least `high`.
template <class Measure>
void measure(const float* v, int64_t count, float low, float high, int64_t& from_low, int64_t& from_high) {
  const V least = all(low), limit = all(high);
  from_low = from_high = 0;
  for (int64_t start = 0; start < count; start += SPAN) {
    const int64_t end = start + SPAN < count ? start + SPAN : count;
    Measure more, most;
    int64_t i = start;
    for (; i + LANES <= end; i += LANES) {
      const V x = load(v + i);
      more.take(x, bits_at_least(x, least));
      most.take(x, bits_at_least(x, limit));
    }
    from_low += more.sum(), from_high += most.sum();
    for (; i < end; ++i) {
      if (v[i] >= low) from_low += Measure::of(v[i]);
      if (v[i] >= high) from_high += Measure::of(v[i]);
    }
  }
}

const int64_t FEW = 256;    // numbers that are sorted: to have the answer, or to see about where it is
const int64_t MARGIN = 24;  // places in a sample by which it may be wrong: three times what is usual

// The largest number of v such that those at least as large measure `need`, which is from 1 to `total`, what all of
// them measure. No number of v is NaN or positive infinity. room: [count + LANES].
template <class Measure>
float threshold(const float* v, int64_t count, int64_t need, int64_t total, float* room) {
  while (count > FEW) {
    float sample[FEW];
    int64_t measured = 0;
    for (int64_t i = 0; i < FEW; ++i) measured += Measure::of(sample[i] = v[i * count / FEW]);
    std::sort(sample, sample + FEW, [](float a, float b) { return a > b; });
    const double share = (double)need / (double)total * (double)measured;
    int64_t place = 0;
    for (double upto = (double)Measure::of(sample[0]); upto < share && place < FEW - 1;)
      upto += (double)Measure::of(sample[++place]);
    // Of what is above, between and below, keep the part that holds the answer.
    const float high = place >= MARGIN ? sample[place - MARGIN] : INFINITY;
    const float low = place + MARGIN < FEW ? sample[place + MARGIN] : -INFINITY;
    int64_t from_low, from_high;
    measure<Measure>(v, count, low, high, from_low, from_high);
    float from = -INFINITY, to = low;
    int64_t above = from_low;
    if (need <= from_high)
      from = high, to = INFINITY, above = 0;
    else if (need <= from_low)
      from = low, to = high, above = from_high;
    Part kept = part<Measure>(v, count, from, to, room);
    if (kept.count == count) {  // the least of them was the edge: it is the answer, or can go
      from = *std::min_element(room, room + count);
      const float next = nextafterf(from, INFINITY);
      kept = part<Measure>(room, count, next, INFINITY, room);
      if (kept.measure < need - above) return from;
    }
    v = room, count = kept.count, need -= above, total = kept.measure;
  }
  if (v != room) std::copy(v, v + count, room);
  std::sort(room, room + count, [](float a, float b) { return a > b; });
  int64_t place = 0;
  for (int64_t upto = Measure::of(room[0]); upto < need; ++place) upto += Measure::of(room[place + 1]);
  return room[place];
}

// The places of the numbers that are at least `low`, ascending; how many.
int64_t places_of(const float* v, int64_t count, float low, int32_t* places) {
  const V least = all(low);
  int64_t found = 0, i = 0;
  for (; i + LANES <= count; i += LANES)
    for (uint32_t bits = bits_at_least(load(v + i), least); bits; bits &= bits - 1)
      places[found++] = (int32_t)(i + __builtin_ctz(bits));
  for (; i < count; ++i)
    if (v[i] >= low) places[found++] = (int32_t)i;
  return found;
}

// -- rows ------------------------------------------------------------------------------------------------------------

// Room of a thread for its row.
struct Room {
  float *weights, *more;  // [size + LANES]
  int32_t* places;        // [size]
  int64_t* sums;          // [spans] of the weights
};

// Rows, of which each thread takes the next one: a row stays in one core's cache, nobody waits for a thread that other
// work holds up, and a fifth of a millisecond for a row alone is not worth waking one.
struct Rows {
  const float* x;  // [rows, size]
  int64_t rows, size, spans;
  char* memory;
  int64_t room_size;
  Parts parts = {};

  bool make(const float* given, int64_t num_rows, int64_t row_size, int threads) {
    x = given, rows = num_rows, size = row_size, spans = (size + SPAN - 1) / SPAN;
    room_size = (8 * spans + 4 * 3 * (size + LANES) + 63) / 64 * 64;
    parts = {rows};
    memory = (char*)scratch(room_size * threads);
    return memory != nullptr;
  }

  const float* row(int64_t r) const { return x + r * size; }

  Room room(int thread) const {
    int64_t* sums = (int64_t*)(memory + thread * room_size);
    float* weights = (float*)(sums + spans);
    return {weights, weights + size + LANES, (int32_t*)(weights + 2 * (size + LANES)), sums};
  }

  bool take(int64_t& r) { return parts.take(r); }

  // Weights of a row of numbers, and their sums by span.
  void weigh_all(const float* from, int64_t count, float top, double temperature, const Room& room) const {
    const float coldness = (float)(1.0 / temperature);
    for (int64_t i = 0; i < count; i += SPAN)
      room.sums[i / SPAN] = weigh(from + i, count - i < SPAN ? count - i : SPAN, top, coldness, room.weights + i);
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

struct Search : Rows {
  float* values;
  int64_t* places;

  static void share(void* work, int) {
    Search& s = *(Search*)work;
    for (int64_t r; s.take(r);) {
      const Best best = look(s.row(r), s.size);
      s.values[r] = best.value, s.places[r] = isfinite(best.value) ? best.place : -1;
    }
  }
};

// -- the draw --------------------------------------------------------------------------------------------------------

// How a row is drawn. The sampler's numpy type has the same fields in the same order.
struct Asked {
  double temperature;  // 0: the largest number
  double top_p, min_p;
  double u;       // the uniform number
  int64_t top_k;  // from the row's size on: off
};

struct Draws : Rows {
  const Asked* asked;
  float* values;
  int64_t* places;

  // The place among `count` weights with these sums by span.
  int64_t pick(const Asked& ask, const Room& room, int64_t count) const {
    const int64_t num_spans = (count + SPAN - 1) / SPAN;
    int64_t total = sum_of(room.sums, num_spans);
    double floor = fmax(ceil(ask.min_p * ONE), 1.0);
    if (ask.top_p < 1.0) {
      const double mass = ceil(ask.top_p * (double)total);
      int64_t need = mass < (double)total ? (int64_t)mass : total;
      need = need < 1 ? 1 : need < total ? need : total;
      floor = fmax(floor, (double)threshold<Mass>(room.weights, count, need, total, room.more));
    }
    // The least float that is not below: weights are floats themselves.
    float least = (float)floor;
    if ((double)least < floor) least = nextafterf(least, INFINITY);
    if (least > 1.0f) {
      for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t left = count - i * SPAN;
        const float* weights = room.weights + i * SPAN;
        room.sums[i] = part<Mass>(weights, left < SPAN ? left : SPAN, least, INFINITY, nullptr).measure;
      }
      total = sum_of(room.sums, num_spans);
    }
    int64_t target = (int64_t)(ask.u * (double)total);
    target = target < total - 1 ? target : total - 1;
    int64_t span = 0;
    while (target >= room.sums[span]) target -= room.sums[span++];
    int64_t place = span * SPAN;
    for (;; ++place) {
      const float w = room.weights[place];
      const int64_t each = w >= least ? (int64_t)w : 0;
      if (target < each) return place;
      target -= each;
    }
  }

  int64_t draw(int64_t r, float top, const Room& room) const {
    const Asked& ask = asked[r];
    const float* from = row(r);
    if (ask.top_k >= size) {
      weigh_all(from, size, top, ask.temperature, room);
      return pick(ask, room, size);
    }
    const int64_t kept = places_of(from, size, threshold<Count>(from, size, ask.top_k, size, room.more), room.places);
    for (int64_t i = 0; i < kept; ++i) room.more[i] = from[room.places[i]];
    weigh_all(room.more, kept, top, ask.temperature, room);
    return room.places[pick(ask, room, kept)];
  }

  static void share(void* work, int thread) {
    Draws& d = *(Draws*)work;
    const Room room = d.room(thread);
    for (int64_t r; d.take(r);) {
      const Best best = look(d.row(r), d.size);
      d.values[r] = best.value, d.places[r] = best.place;
      if (!isfinite(best.value))
        d.places[r] = -1;
      else if (d.asked[r].temperature > 0)
        d.places[r] = d.draw(r, best.value, room);
    }
  }
};

// -- the likeliest ---------------------------------------------------------------------------------------------------

struct Likeliest : Rows {
  int64_t count;
  double* logs;     // [rows]
  float* values;    // [rows, count]
  int64_t* places;  // [rows, count]

  void list(int64_t r, const Room& room) const {
    const float* from = row(r);
    const float least = threshold<Count>(from, size, count, size, room.more);
    const int64_t kept = places_of(from, size, least, room.places);
    std::sort(room.places, room.places + kept,
              [from](int32_t a, int32_t b) { return from[a] > from[b] || (from[a] == from[b] && a < b); });
    for (int64_t i = 0; i < count; ++i) {
      values[r * count + i] = from[room.places[i]];
      places[r * count + i] = room.places[i];
    }
  }

  static void share(void* work, int thread) {
    Likeliest& l = *(Likeliest*)work;
    const Room room = l.room(thread);
    for (int64_t r; l.take(r);) {
      const float top = look(l.row(r), l.size).value;
      l.logs[r] = NAN;
      if (!isfinite(top)) continue;
      l.weigh_all(l.row(r), l.size, top, 1.0, room);
      l.logs[r] = top + log((double)sum_of(room.sums, l.spans) / ONE);
      if (l.count) l.list(r, room);
    }
  }
};

}  // namespace

// values and places: [rows] of x: [rows, size]; size is at least 1. Where the value is infinite or no number the place
// is -1.
EXPORT void NAMED(best)(const float* x, int64_t rows, int64_t size, float* values, int64_t* places, int32_t threads) {
  const Timed timed(IN_OTHERS);
  Search search;
  search.x = x, search.rows = rows, search.size = size;
  search.values = values, search.places = places, search.parts = {rows};
  run(Search::share, &search, threads_for(rows, size, threads));
}

// A place of each row, drawn as asked: [rows]; -1 where the largest number, its value, is infinite or none. Gives 1
// where memory is short, else 0.
EXPORT int32_t NAMED(draw)(const float* x, int64_t rows, int64_t size, const void* asked, float* values, int64_t* places,
                           int32_t threads) {
  const Timed timed(IN_OTHERS);
  Draws draws;
  threads = threads_for(rows, size, threads);
  if (!draws.make(x, rows, size, threads) && rows) return 1;
  draws.asked = (const Asked*)asked, draws.values = values, draws.places = places;
  run(Draws::share, &draws, threads);
  return 0;
}

// log(sum(e^x)) of each row, no number where its largest is infinite or none: [rows]. And the `count` largest of the
// other rows, equals by ascending place: [rows, count]. Gives 1 where memory is short, else 0.
EXPORT int32_t NAMED(likeliest)(const float* x, int64_t rows, int64_t size, int64_t count, double* logs, float* values,
                                int64_t* places, int32_t threads) {
  const Timed timed(IN_OTHERS);
  Likeliest likeliest;
  threads = threads_for(rows, size, threads);
  if (!likeliest.make(x, rows, size, threads) && rows) return 1;
  likeliest.count = count, likeliest.logs = logs, likeliest.values = values, likeliest.places = places;
  run(Likeliest::share, &likeliest, threads);
  return 0;
}

// Make negative infinity of what is forbidden, in place. chosen: [rows] rows of x; bits: [rows, words], 0: forbidden.
EXPORT void NAMED(forbid)(float* x, int64_t size, const int64_t* chosen, const uint32_t* bits, int64_t rows,
                          int64_t words) {
  const Timed timed(IN_OTHERS);
  const V never = all(-INFINITY);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x + chosen[r] * size;
    const uint32_t* of_row = bits + r * words;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const uint32_t allowed = of_row[i / 32] >> i % 32;
      store(row + i, where_bits(allowed, load(row + i), never));
    }
    for (; i < size; ++i)
      if (!(of_row[i / 32] >> i % 32 & 1)) row[i] = -INFINITY;
  }
}
