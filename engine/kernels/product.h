// What all packed products share: panels of a weight, tiles of rows, threads, and what follows the sums.
//
// Units. Four bytes of a row of the weight along k: one float, two bfloat16, four bytes, or eight halves of a byte; the
// first is the lowest. Zeros, or whatever counts as zero, fill the last one.
//
// Panels. A panel holds 2 * LANES rows of W (columns of y) as P[unit][row]: each step along k reads 2 vectors. Rows
// that W does not have are zero. Of a gated matrix (gate and up side by side, one result column from a row of each)
// the first vector holds gate rows and the second the up rows of the same result columns.
//
// Order. Each element of y is the sum that its Kind makes along k from 0 upwards, then bias, gate, residual, then one
// rounding to the result's type. Neither the number of rows nor a tile's height nor the thread changes any of it: the
// bits of a row never depend on its neighbours.
//
// Tiles. Up to HEIGHT rows of x by one panel, or few rows by several panels, so that enough sums run side by side to
// hide the latency of the additions. The rows of a tile are packed beside each other, X[unit][row]: rows of x are a
// power of two apart, and read in place they would push one another out of the first cache.
#pragma once
#include "isa.h"
#include "work.h"

#include <string.h>

// Every variant has names of its own: the linker would take one of several inline functions that are called the same.
namespace {

const int WIDTH = 2 * LANES;      // rows of W in a panel
const int64_t BLOCK = 40 * HEIGHT;  // rows of x that are packed at once: bounds the scratch memory
const int64_t NEAR = 512 << 10;   // bytes of packed x that should stay in the second cache beside a panel
const int64_t SMALL = 1 << 18;    // multiply-adds below which waking other threads costs more than they save
const int64_t SHORT = 1 << 14;    // numbers of x that one thread packs faster than several agree on it

#define UNROLLED _Pragma("GCC unroll 16")

// -- one product --------------------------------------------------------------------------------------------------------

// A Kind of product: what x is, and how the sums are made.
//
//   Number                          of x, the residual and (unless the matrix is wide) y
//   units(columns)                  of a row of the weight
//   row_bytes(units)                of a row of x once it is packed
//   pack_x(x, columns, units, rows, to)
//   sums<M, P>(matrix, units, panel, xs, ahead, lines, out)
//       M rows by P panels. `ahead`: what memory should bring meanwhile, `lines` cache lines for each unit.
template <class Kind>
struct Product {
  typedef typename Kind::Number Number;
  const Matrix* matrix;
  const Number* x;
  const Number* residual;  // or null
  void* y;
  int64_t rows, units;
  char* packed;  // scratch: the rows of one block in tiles

  int64_t panel_bytes() const { return units * WIDTH * 4; }

  static float widen(float v) { return v; }
  static float widen(uint16_t v) { return to_float(v); }
  static V widen(const float* p) { return load(p); }
  static V widen(const uint16_t* p) { return load_bf16(p); }

  // Adds the residual and stores up to a vector of one row of y, rounded once.
  void emit(V v, int64_t row, int64_t column) const {
    const int64_t place = row * matrix->outputs + column;
    const int64_t left = matrix->outputs - column, count = left < LANES ? left : LANES;
    float out[LANES];
    if (residual && count == LANES) {
      v = add(v, widen(residual + place));
    } else if (residual) {
      float more[LANES] = {};
      for (int64_t i = 0; i < count; ++i) more[i] = widen(residual[place + i]);
      v = add(v, load(more));
    }
    store(out, v);
    if (matrix->wide || sizeof(Number) == 4) {
      memcpy((float*)y + place, out, (size_t)count * 4);
    } else {
      uint16_t* to = (uint16_t*)y + place;
      if (count == LANES)
        for (int i = 0; i < LANES; ++i) to[i] = to_bf16(out[i]);
      else
        for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(out[i]);
    }
  }

  // What follows the sums of one panel and one row. Not inlined: it would be compiled into every size of a tile.
  __attribute__((noinline)) void finish(const float* sums, int64_t panel, int64_t row) const {
    V a = load(sums), b = load(sums + LANES);
    if (matrix->bias) {
      a = add(a, load(matrix->bias + panel * WIDTH));
      b = add(b, load(matrix->bias + panel * WIDTH + LANES));
    }
    if (matrix->gated) {
      emit(mul(silu(a), b), row, panel * LANES);
    } else {
      emit(a, row, panel * WIDTH);
      if (panel * WIDTH + LANES < matrix->outputs) emit(b, row, panel * WIDTH + LANES);
    }
  }

  // M rows by P panels.
  template <int M, int P>
  __attribute__((noinline)) void tile(const char* xs, int64_t panel, int64_t row, const char* ahead, int lines) const {
    float out[M][P][WIDTH];
    Kind::template sums<M, P>(*matrix, units, panel, xs, ahead, lines, out);
    for (int m = 0; m < M; ++m)
      for (int p = 0; p < P; ++p) finish(out[m][p], panel + p, row + m);
  }

  void any(int height, const char* xs, int64_t panel, int64_t row, const char* ahead, int lines) const {
    switch (height) {
      case 1: return tile<1, 1>(xs, panel, row, ahead, lines);
      case 2: return tile<2, 1>(xs, panel, row, ahead, lines);
      case 3: return tile<3, 1>(xs, panel, row, ahead, lines);
      case 4: return tile<4, 1>(xs, panel, row, ahead, lines);
      case 5: return tile<5, 1>(xs, panel, row, ahead, lines);
      case 6: return tile<6, 1>(xs, panel, row, ahead, lines);
#if !defined(ISA_AVX2)
      case 7: return tile<7, 1>(xs, panel, row, ahead, lines);
      case 8: return tile<8, 1>(xs, panel, row, ahead, lines);
      case 9: return tile<9, 1>(xs, panel, row, ahead, lines);
      case 10: return tile<10, 1>(xs, panel, row, ahead, lines);
      case 11: return tile<11, 1>(xs, panel, row, ahead, lines);
      case 12: return tile<12, 1>(xs, panel, row, ahead, lines);
#endif
    }
  }

  // Few rows by panels [from, to): several panels side by side, the rest one by one. Nothing is fetched ahead: the
  // panels are so many streams in order, which the processor follows by itself, a third faster here at one row.
  template <int M, int P>
  void few(int64_t from, int64_t to) const {
    for (; from + P <= to; from += P) tile<M, P>(packed, from, 0, nullptr, 0);
    for (; from < to; ++from) tile<M, 1>(packed, from, 0, nullptr, 0);
  }

  // Tiles [first, last) of a block by panels [from, to). Tiles have equal heights: 16 rows are 8 and 8, not 12 and 4.
  void many(int64_t start, int64_t count, int64_t first, int64_t last, int64_t from, int64_t to) const {
    const int64_t tiles = (count + HEIGHT - 1) / HEIGHT, row_bytes = Kind::row_bytes(units);
    int64_t at_once = NEAR / (row_bytes * HEIGHT);
    if (at_once < 1) at_once = 1;
    for (int64_t group = first; group < last; group += at_once) {
      const int64_t stop = group + at_once < last ? group + at_once : last;
      for (int64_t panel = from; panel < to; ++panel) {
        const char* next = (const char*)matrix->panels + (panel + 1) * panel_bytes();
        for (int64_t t = group; t < stop; ++t) {
          const int64_t row = count * t / tiles;
          // The next panel is fetched while this one is multiplied, a part of it in each of the first tiles: with all
          // of it in the first one, memory would idle during the others.
          const int64_t n = t - group;
          const int lines = stop - group == 1 ? 2 : n < 2 ? 1 : 0;
          any((int)(count * (t + 1) / tiles - row), packed + row * row_bytes, panel, start + row,
              next + n * units * 64, lines);
        }
      }
    }
  }

  void pack_tiles(int64_t start, int64_t count, int64_t first, int64_t last) const {
    const int64_t tiles = (count + HEIGHT - 1) / HEIGHT;
    for (int64_t t = first; t < last; ++t) {
      const int64_t row = count * t / tiles, end = count * (t + 1) / tiles;
      Kind::pack_x(x + (start + row) * matrix->columns, matrix->columns, units, end - row,
                   packed + row * Kind::row_bytes(units));
    }
  }

  void share(int thread, int threads, bool is_packed) const {
    const int64_t panels = matrix->num_panels;
    for (int64_t start = 0; start < rows; start += BLOCK) {
      const int64_t count = rows - start < BLOCK ? rows - start : BLOCK, tiles = (count + HEIGHT - 1) / HEIGHT;
      if (!is_packed) {
        if (start) meet();
        pack_tiles(start, count, tiles * thread / threads, tiles * (thread + 1) / threads);
        if (threads > 1) meet();
      }
      // Threads that find no panel of their own share the rows of others'.
      int64_t bands = threads / panels;
      bands = bands < 1 ? 1 : bands > tiles ? tiles : bands;
      const int64_t columns = threads / bands, place = thread % columns, band = thread / columns;
      if (band >= bands) continue;
      const int64_t from = panels * place / columns, to = panels * (place + 1) / columns;
      if (rows == 1) few<1, 4>(from, to);
      else if (rows == 2) few<2, 2>(from, to);
      else if (rows == 3) few<3, HEIGHT >= 12 ? 2 : 1>(from, to);
      else many(start, count, tiles * band / bands, tiles * (band + 1) / bands, from, to);
    }
  }

  static void packs(void* work, int thread, int threads) { ((const Product*)work)->share(thread, threads, false); }
  static void multiplies(void* work, int thread, int threads) { ((const Product*)work)->share(thread, threads, true); }

  // 0, or 1 where memory is short.
  int32_t compute(int threads) {
    if (rows <= 0) return 0;
    units = Kind::units(matrix->columns);
    packed = (char*)scratch((rows < BLOCK ? rows : BLOCK) * Kind::row_bytes(units));
    if (!packed) return 1;
    if (rows * matrix->columns * matrix->num_panels * WIDTH < SMALL) threads = 1;
    if (rows <= BLOCK && rows * matrix->columns <= SHORT) {
      pack_tiles(0, rows, 0, (rows + HEIGHT - 1) / HEIGHT);
      run(multiplies, this, threads);
    } else {
      run(packs, this, threads);
    }
    return 0;
  }
};

// -- panels ------------------------------------------------------------------------------------------------------------

// The row of the plain weight, gate before up, that is row `j` of a panel; -1 where it has none.
int64_t source(int64_t rows, bool gated, int64_t panel, int j) {
  if (!gated) return panel * WIDTH + j < rows ? panel * WIDTH + j : -1;
  const int64_t row = panel * LANES + j % LANES, half = rows / 2;
  return row >= half ? -1 : j < LANES ? row : half + row;
}

}  // namespace
