// Products of bfloat16 by tiles (tiles.h), see matmul.h: each element of y is one chain of tile products along k, 32
// numbers each, whatever the number of rows.
//
// Panels are those of the other variants: 16 units of a panel are two tiles of weights side by side. If their number is
// not a multiple of 16, the last ones are copied and padded with zeros, because what follows them in memory might be
// NaN. Rows of x are packed as X[step][row][64 bytes], one or two tiles of rows.
#pragma once
#include "chains.h"

#if defined(HAS_TILES)
#include "tiles.h"

namespace {

const int64_t STEP_UNITS = 16;                     // of a tile of weights
const int64_t STEP_BYTES = STEP_UNITS * WIDTH * 4;  // of a panel

// Returns the units of a panel's step, padded with zeros behind the end of the panel.
struct Steps {
  const char* w;
  int64_t units;
  alignas(64) char padded[STEP_BYTES];

  Steps(const char* w, int64_t units) : w(w), units(units) {}
  const char* operator()(int64_t step) {
    const int64_t left = units - step * STEP_UNITS;
    return left >= STEP_UNITS ? w + step * STEP_BYTES : pad(w + step * STEP_BYTES, left);
  }
  const char* pad(const char* from, int64_t count) {
    memmove(padded, from, (size_t)count * WIDTH * 4);
    memset(padded + count * WIDTH * 4, 0, (size_t)(STEP_UNITS - count) * WIDTH * 4);
    return padded;
  }
};

// What all Kinds in tiles have.
template <class T, class Kind>
struct InTiles : InPanels<Kind> {
  static const bool IN_TILES = true;
  static const int TALL = 2 * TILE_ROWS;

  static void begin(int64_t tall) {
    TileShapes shapes;
    for (int t = 0; t < 6; ++t) shapes.set(t, tall > TILE_ROWS ? tall / 2 : tall);
    shapes.set(6, TILE_ROWS), shapes.set(7, TILE_ROWS);
    T::configure(shapes);
  }
  static void end() { T::release(); }
};

// Multiply one tile of rows by a panel, or two (COUNT), steps [from, to); write the sums, [tall][WIDTH] of float or of
// int32. `weights(step)` returns a step's units; x: those of the rows from step `from` on. Tiles 0 to 3 are sums, 4 and 5
// rows of x, 6 and 7 weights, so that with two tiles of rows each load serves two products.
template <class T, bool BYTES, int COUNT, class Weights>
INLINE void multiply_tiles(Weights& weights, int64_t from, int64_t to, const char* x, int64_t tall, Fetch& fetch,
                           char* out) {
  const int64_t second = tall / 2;  // row at which the second tile starts
  // Not all prefetches at once, because the tiles' own lines would wait for them: with two tiles of rows that took an
  // eighth longer on an Emerald Rapids.
  const int64_t some = fetch.lines / (2 * COUNT), others = fetch.lines - (2 * COUNT - 1) * some;
  T::template zero<0>(), T::template zero<1>();
  if (COUNT == 2) T::template zero<2>(), T::template zero<3>();
  for (int64_t s = from; s < to; ++s, x += tall * TILE_BYTES) {
    const char* w = weights(s);
    fetch.next(others);
    T::template load<4>(x, TILE_BYTES);
    T::template load<6>(w, WIDTH * 4);
    T::template dot<BYTES, 0, 4, 6>();
    fetch.next(some);
    T::template load<7>(w + TILE_BYTES, WIDTH * 4);
    T::template dot<BYTES, 1, 4, 7>();
    if (COUNT == 1) continue;
    fetch.next(some);
    T::template load<5>(x + second * TILE_BYTES, TILE_BYTES);
    T::template dot<BYTES, 2, 5, 6>();
    fetch.next(some);
    T::template dot<BYTES, 3, 5, 7>();
  }
  T::template store<0>(out, WIDTH * 4), T::template store<1>(out + TILE_BYTES, WIDTH * 4);
  if (COUNT == 1) return;
  out += second * WIDTH * 4;
  T::template store<2>(out, WIDTH * 4), T::template store<3>(out + TILE_BYTES, WIDTH * 4);
}

// The same with as many tiles of rows as `tall` needs.
template <class T, bool BYTES, class Weights>
INLINE void multiply_rows(Weights& weights, int64_t from, int64_t to, const char* x, int64_t tall, Fetch& fetch,
                          void* out) {
  if (tall > TILE_ROWS) multiply_tiles<T, BYTES, 2>(weights, from, to, x, tall, fetch, (char*)out);
  else multiply_tiles<T, BYTES, 1>(weights, from, to, x, tall, fetch, (char*)out);
}

// T: Tiles, or the emulation, with which a trial compares them.
template <class T = Tiles>
struct Tiled : InTiles<T, Tiled<T>> {
  typedef uint16_t Number;
  static int64_t units(int64_t columns) { return ceil_div(columns, 2); }
  static int64_t steps(int64_t units) { return ceil_div(units, STEP_UNITS); }
  static int64_t row_bytes(int64_t units) { return steps(units) * TILE_BYTES; }

  static void pack_row(const uint16_t* x, int64_t count, int64_t units, int64_t tall, int64_t m, char* tile) {
    char* to = tile + m * TILE_BYTES;
    for (int64_t k = 0; k < steps(units) * TILE_BYTES / 2; k += TILE_BYTES / 2, to += tall * TILE_BYTES) {
      const int64_t bytes = max(0, min(2 * (count - k), TILE_BYTES));
      memcpy(to, x + k, (size_t)bytes);
      memset(to + bytes, 0, (size_t)(TILE_BYTES - bytes));
    }
  }
  static void sums(const Matrix&, int64_t units, int64_t, const char* w, char*, const char* xs, int64_t tall, Fetch& fetch,
                   float (&out)[2 * TILE_ROWS][WIDTH]) {
    Steps weights(w, units);
    multiply_rows<T, false>(weights, 0, steps(units), xs, tall, fetch, out);
  }
};

typedef Tiled<> PlainHalves;

}  // namespace

#else
typedef Chain<Halves> PlainHalves;
#endif
