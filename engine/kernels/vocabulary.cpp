// What a step wants of its logits: each row's largest number, a token drawn by chance, the likeliest tokens.
//
// Nothing here depends on how a row was cut or on who looked at its pieces. The lowest place wins among equals, and
// what is no number wins over all. Probabilities are whole numbers, whose sums are the same in any order: see `weigh`.
#include <math.h>

#include <algorithm>

#include "isa.h"
#include "work.h"

namespace {

const int64_t PIECE = 1 << 13;
const int64_t SMALL = 1 << 15;  // numbers below which waking other threads costs more than they save
const double ONE = 0x1p44;      // the weight of a row's likeliest token
// Weights are added as doubles in so many at once: up to 2^53 that is exact. A piece is made of whole spans.
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

// The nearest float to e^x, for x from -32 to 0: computed to 2^-52, so that but for a few numbers in 2^28 no rounding
// can fall the other way, and torch's exp of a double, rounded, is the same.
D exponential(D x) {
  const D shift = all_doubles(0x1.8p52);
  const D n = fma(x, all_doubles(0x1.71547652b82fep0), shift);
  const D whole = add(n, all_doubles(-0x1.8p52));
  D r = fma(whole, all_doubles(-0x1.62e42fefa0000p-1), x);  // exact: the constant is short, and so is x
  r = fma(whole, all_doubles(-0x1.cf79abc9e3b39p-40), r);
  D e = all_doubles(1.0 / 6227020800);  // Taylor's series: the next term is below 2^-57
  for (double each : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                      1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    e = fma(e, r, all_doubles(each));
  return times_power(e, n);
}

// floor(2^44 e^((x - top) / temperature)) of each lane; x is at most top.
V weight(V x, V top, V temperature) {
  const V scaled = divide(minus(x, top), temperature);
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
int64_t weigh(const float* x, int64_t count, float top, float temperature, float* weights) {
  const V most = all(top), scale = all(temperature);
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

// The numbers from `low` up to below `high`; put together at `room` where that is given, which may be `v`.
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

const int64_t FEW = 256;     // numbers that are sorted: to have the answer, or to see about where it is
const int64_t MARGIN = 24;   // places in a sample by which it may be wrong: three times what is usual

// The largest number of v such that those at least as large measure `need`, which is from 1 to what all of them
// measure. No number of v is NaN or positive infinity. room: [count + LANES].
template <class Measure>
float threshold(const float* v, int64_t count, int64_t need, float* room) {
  int64_t all_measure = -1;
  while (count > FEW) {
    float sample[FEW];
    int64_t measured = 0;
    for (int64_t i = 0; i < FEW; ++i) measured += Measure::of(sample[i] = v[i * count / FEW]);
    std::sort(sample, sample + FEW, [](float a, float b) { return a > b; });
    if (all_measure < 0) all_measure = part<Measure>(v, count, -INFINITY, INFINITY, nullptr).measure;
    const double share = (double)need / (double)all_measure * (double)measured;
    int64_t place = 0;
    for (double upto = (double)Measure::of(sample[0]); upto < share && place < FEW - 1;)
      upto += (double)Measure::of(sample[++place]);
    const float high = place >= MARGIN ? sample[place - MARGIN] : INFINITY;
    const float low = place + MARGIN < FEW ? sample[place + MARGIN] : -INFINITY;
    // Above, between and below; the answer is in the first of them that does not leave some of the need.
    const float edges[] = {INFINITY, high, low, -INFINITY};
    Part found = {0, 0};
    int which = 0;
    for (; which < 3; ++which) {
      found = part<Measure>(v, count, edges[which + 1], edges[which], nullptr);
      if (need <= found.measure) break;
      need -= found.measure;
    }
    float from = edges[which + 1];
    if (found.count == count) {  // nothing was cut off: `from` may be the least of them, and the answer
      from = *std::min_element(v, v + count);
      const Part rest = part<Measure>(v, count, nextafterf(from, INFINITY), INFINITY, nullptr);
      if (rest.measure < need) return from;
      from = nextafterf(from, INFINITY);
    }
    found = part<Measure>(v, count, from, edges[which], room);
    v = room, count = found.count, all_measure = found.measure;
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

// Room for the row that a thread works on; other threads help with its weights.
struct Room {
  float *weights, *more;  // [size + LANES]
  int32_t* places;        // [size]
  int64_t* sums;          // [spans] of the weights
};

// Rows are worked on side by side, as many at once as there are threads: pieces of all of them first, then each row by
// one thread. Like that room does not grow with the rows, one row alone is shared, and a row stays in one core's cache.
struct Rows {
  const float* x;  // [rows, size]
  int64_t rows, size, pieces, spans, width;
  Best* found;  // [rows, pieces]
  Room* rooms;  // [width]

  bool make(const float* given, int64_t num_rows, int64_t row_size, int threads) {
    x = given, rows = num_rows, size = row_size;
    pieces = (size + PIECE - 1) / PIECE, spans = (size + SPAN - 1) / SPAN;
    width = rows < threads ? rows : threads;
    const int64_t padded = size + LANES, each = 8 * spans + 4 * padded * 3;
    const int64_t head = rows * pieces * (int64_t)sizeof(Best), table = width * (int64_t)sizeof(Room);
    char* memory = (char*)scratch(head + table + width * ((each + 63) / 64 * 64));
    if (!memory) return false;
    found = (Best*)memory, rooms = (Room*)(memory + head);
    for (int64_t i = 0; i < width; ++i) {
      char* room = memory + head + table + i * ((each + 63) / 64 * 64);
      int64_t* sums = (int64_t*)room;
      float* weights = (float*)(sums + spans);
      rooms[i] = {weights, weights + padded, (int32_t*)(weights + 2 * padded), sums};
    }
    return true;
  }

  const float* row(int64_t r) const { return x + r * size; }

  // Call work(row, start, count) for this thread's pieces of some rows.
  template <class Work>
  void for_pieces(int64_t first, int64_t last, int thread, int threads, Work work) const {
    const int64_t all_pieces = (last - first) * pieces;
    for (int64_t p = all_pieces * thread / threads; p < all_pieces * (thread + 1) / threads; ++p) {
      const int64_t start = p % pieces * PIECE, left = size - start;
      work(first + p / pieces, start, left < PIECE ? left : PIECE);
    }
  }

  void look_at(int64_t first, int64_t last, int thread, int threads) const {
    for_pieces(first, last, thread, threads, [&](int64_t r, int64_t start, int64_t count) {
      Best best = look(row(r) + start, count);
      best.place += start;
      found[r * pieces + start / PIECE] = best;
    });
  }

  Best best(int64_t r) const {
    const Best* of_row = found + r * pieces;
    Best best = of_row[0];
    for (int64_t p = 1; p < pieces && is_number(best.value); ++p)
      if (of_row[p].value > best.value || !is_number(of_row[p].value)) best = of_row[p];
    return best;
  }

  // All weights of this thread's pieces, for rows with a temperature (0: none).
  template <class Temperature>
  void weigh_all(int64_t first, int64_t last, int thread, int threads, Temperature temperature) const {
    for_pieces(first, last, thread, threads, [&](int64_t r, int64_t start, int64_t count) {
      const float top = best(r).value, scale = temperature(r);
      if (!(scale > 0) || !isfinite(top)) return;
      const Room& room = rooms[r - first];
      for (int64_t i = start; i < start + count; i += SPAN) {
        const int64_t left = start + count - i;
        room.sums[i / SPAN] = weigh(row(r) + i, left < SPAN ? left : SPAN, top, scale, room.weights + i);
      }
    });
  }
};

int64_t sum_of(const int64_t* sums, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += sums[i];
  return total;
}

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
      floor = fmax(floor, (double)threshold<Mass>(room.weights, count, need, room.more));
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

  int64_t draw(int64_t r, const Best& best, const Room& room) const {
    const Asked& ask = asked[r];
    if (ask.top_k >= size) return pick(ask, room, size);
    const float* from = row(r);
    const float least = threshold<Count>(from, size, ask.top_k, room.more);
    const int64_t kept = places_of(from, size, least, room.places);
    for (int64_t i = 0; i < kept; ++i) room.more[i] = from[room.places[i]];
    for (int64_t i = 0; i < kept; i += SPAN) {
      const int64_t count = kept - i < SPAN ? kept - i : SPAN;
      room.sums[i / SPAN] = weigh(room.more + i, count, best.value, (float)ask.temperature, room.weights + i);
    }
    return room.places[pick(ask, room, kept)];
  }

  static void share(void* work, int thread, int threads) {
    const Draws& d = *(const Draws*)work;
    for (int64_t first = 0; first < d.rows; first += d.width) {
      const int64_t last = first + d.width < d.rows ? first + d.width : d.rows;
      d.look_at(first, last, thread, threads);
      meet();
      // Of rows with top_k few numbers are weighed, and those later.
      d.weigh_all(first, last, thread, threads,
                  [&](int64_t r) { return d.asked[r].top_k < d.size ? 0.0f : (float)d.asked[r].temperature; });
      meet();
      for (int64_t r = first + thread; r < last; r += threads) {
        const Best best = d.best(r);
        const bool draws = d.asked[r].temperature > 0 && isfinite(best.value);
        d.values[r] = best.value;
        d.places[r] = draws ? d.draw(r, best, d.rooms[r - first]) : best.place;
      }
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
    const float least = threshold<Count>(from, size, count, room.more);
    const int64_t kept = places_of(from, size, least, room.places);
    std::sort(room.places, room.places + kept,
              [from](int32_t a, int32_t b) { return from[a] > from[b] || (from[a] == from[b] && a < b); });
    for (int64_t i = 0; i < count; ++i) {
      values[r * count + i] = from[room.places[i]];
      places[r * count + i] = room.places[i];
    }
  }

  static void share(void* work, int thread, int threads) {
    const Likeliest& l = *(const Likeliest*)work;
    for (int64_t first = 0; first < l.rows; first += l.width) {
      const int64_t last = first + l.width < l.rows ? first + l.width : l.rows;
      l.look_at(first, last, thread, threads);
      meet();
      l.weigh_all(first, last, thread, threads, [](int64_t) { return 1.0f; });
      meet();
      for (int64_t r = first + thread; r < last; r += threads) {
        const float top = l.best(r).value;
        const Room& room = l.rooms[r - first];
        l.logs[r] = isfinite(top) ? top + log((double)sum_of(room.sums, l.spans) / ONE) : NAN;
        if (l.count && isfinite(top)) l.list(r, room);
      }
    }
  }
};

}  // namespace

// values and places: [rows] of x: [rows, size]; size is at least 1. Gives 1 where memory is short, else 0.
EXPORT int32_t NAMED(best)(const float* x, int64_t rows, int64_t size, float* values, int64_t* places, int32_t threads) {
  const Timed timed(IN_OTHERS);
  Rows all_rows;
  if (!all_rows.make(x, rows, size, 0) && rows) return 1;
  run([](void* work, int thread, int threads) { ((Rows*)work)->look_at(0, ((Rows*)work)->rows, thread, threads); },
      &all_rows, rows * size < SMALL ? 1 : threads);
  for (int64_t row = 0; row < rows; ++row) {
    const Best best = all_rows.best(row);
    values[row] = best.value, places[row] = best.place;
  }
  return 0;
}

// A place of each row, drawn as asked: [rows]. values: the largest numbers, where that is infinite or no number its
// place is given. Gives 1 where memory is short, else 0.
EXPORT int32_t NAMED(draw)(const float* x, int64_t rows, int64_t size, const void* asked, float* values, int64_t* places,
                           int32_t threads) {
  const Timed timed(IN_OTHERS);
  Draws draws;
  if (rows * size < SMALL) threads = 1;
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
  if (rows * size < SMALL) threads = 1;
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
