// The largest number of each row and where it is: what a greedy step wants of its logits.
//
// A row is looked at in pieces, whose results are joined from the first to the last. The lowest place wins among
// equals, and what is no number wins over all, so that pieces and threads leave no trace.
#include "isa.h"
#include "work.h"

namespace {

const int64_t PIECE = 1 << 13;
const int64_t SMALL = 1 << 15;  // numbers below which waking other threads costs more than they save

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

struct Search {
  const float* x;
  int64_t rows, size, pieces;
  Best* found;  // [rows, pieces]

  // A first pass without places: they would cost more than to look for the one that counts.
  Best look(const float* from, int64_t count) const {
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

  static void share(void* work, int thread, int threads) {
    const Search& s = *(const Search*)work;
    const int64_t all_pieces = s.rows * s.pieces;
    for (int64_t p = all_pieces * thread / threads; p < all_pieces * (thread + 1) / threads; ++p) {
      const int64_t start = p % s.pieces * PIECE, left = s.size - start;
      s.found[p] = s.look(s.x + p / s.pieces * s.size + start, left < PIECE ? left : PIECE);
      s.found[p].place += start;
    }
  }
};

}  // namespace

// values and places: [rows] of x: [rows, size]; size is at least 1. Gives 1 where memory is short, else 0.
EXPORT int32_t NAMED(best)(const float* x, int64_t rows, int64_t size, float* values, int64_t* places, int32_t threads) {
  const Timed timed(IN_OTHERS);
  const int64_t pieces = (size + PIECE - 1) / PIECE;
  Search search = {x, rows, size, pieces, (Best*)scratch(rows * pieces * (int64_t)sizeof(Best))};
  if (rows && !search.found) return 1;
  run(Search::share, &search, rows * size < SMALL ? 1 : threads);
  for (int64_t row = 0; row < rows; ++row) {
    Best best = search.found[row * pieces];
    for (int64_t p = 1; p < pieces && is_number(best.value); ++p) {
      const Best& other = search.found[row * pieces + p];
      if (other.value > best.value || !is_number(other.value)) best = other;
    }
    values[row] = best.value, places[row] = best.place;
  }
  return 0;
}
