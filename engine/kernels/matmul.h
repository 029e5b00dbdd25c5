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
#include "numbers.h"
#include "work.h"

// Every variant has names of its own: the linker would take one of several inline functions that are called the same.
namespace {

const int WIDTH = 2 * LANES;      // rows of W in a panel
const int64_t BLOCK = 44 * HEIGHT;  // rows of x that are packed at once: bounds the scratch memory
const int64_t PARTS = 24;         // about so many that a thread's panels are divided into
const int64_t NEAR = 512 << 10;   // bytes of packed x that should stay in the second cache beside a panel
const int64_t SMALL = 1 << 18;    // multiply-adds below which waking other threads costs more than they save
const int64_t SHORT = 1 << 14;    // numbers of x that one thread packs faster than several agree on it

#define UNROLLED _Pragma("GCC unroll 16")

// Panels side by side of few rows. Each is a stream from memory: AMD's processors are a fifth faster with one for each
// thread; Intel's, which do not take the dot product of bfloat16, a third with four.
constexpr int beside(int64_t rows) {
#if defined(HAS_DOT)
  (void)rows;
  return 1;
#else
  return rows == 1 ? 4 : rows == 2 ? 2 : rows == 3 ? LANES / 8 : 1;
#endif
}

// Parts of a thread's panels that it, or another, has begun.
struct alignas(64) Begun {
  int64_t parts;
};

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
  int64_t rows;
  // The rest is for `compute`.
  int64_t units = 0;
  int threads = 1;
  Begun* begun = nullptr;        // scratch: of each thread
  char* packed = nullptr;        // scratch: the rows of one block in tiles
  int64_t start = 0, count = 0;  // the block: its first row, and how many
  Parts tiles = {};              // of the block, to be packed

  int64_t panel_bytes() const { return units * WIDTH * 4; }

  // Adds the residual and stores up to a vector of one row of y, rounded once.
  void emit(V v, int64_t row, int64_t column) const {
    const int64_t place = row * matrix->outputs + column, count = matrix->outputs - column;
    if (residual) v = add(v, get(residual + place, count));
    if (matrix->wide) put((float*)y + place, v, count);
    else put((Number*)y + place, v, count);
  }

  // What follows the sums of one panel and some rows, which are `apart`. Not inlined: it would be compiled into every
  // size of a tile.
  __attribute__((noinline)) void finish(const float* sums, int64_t apart, int64_t height, int64_t panel, int64_t row) const {
    for (int64_t end = row + height; row < end; ++row, sums += apart) {
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
  }

  // M rows by P panels.
  template <int M, int P>
  __attribute__((noinline)) void tile(const char* xs, int64_t panel, int64_t row, const char* ahead, int lines) const {
    float out[M][P][WIDTH];
    // Rows of y are far apart: the first line of each is asked for before the sums begin.
    const int64_t column = panel * (matrix->gated ? LANES : WIDTH), size = matrix->wide ? 4 : sizeof(Number);
    for (int m = 0; m < M; ++m) __builtin_prefetch((char*)y + ((row + m) * matrix->outputs + column) * size, 1, 2);
    Kind::template sums<M, P>(*matrix, units, panel, xs, ahead, lines, out);
    for (int p = 0; p < P; ++p) finish(out[0][p], P * WIDTH, M, panel + p, row);
  }

  // `height` rows, up to M, by one panel.
  template <int M = HEIGHT>
  void any(int height, const char* xs, int64_t panel, int64_t row, const char* ahead, int lines) const {
    if constexpr (M > 1)
      if (height < M) return any<M - 1>(height, xs, panel, row, ahead, lines);
    tile<M, 1>(xs, panel, row, ahead, lines);
  }

  // Few rows by panels [from, to), some of them side by side. Nothing is fetched ahead: the panels are streams in order,
  // which the processor follows by itself, a third faster here at one row.
  template <int M>
  void few(int64_t from, int64_t to) const {
    const int P = beside(M);
    for (; from + P <= to; from += P) tile<M, P>(packed, from, 0, nullptr, 0);
    for (; from < to; ++from) tile<M, 1>(packed, from, 0, nullptr, 0);
  }

  // Tiles of the block. They have equal heights: 16 rows are 8 and 8, not 12 and 4.
  int64_t num_tiles() const { return (count + HEIGHT - 1) / HEIGHT; }

  // Tiles [first, last) of the block by panels [from, to).
  void many(int64_t first, int64_t last, int64_t from, int64_t to) const {
    const int64_t tiles = num_tiles(), row_bytes = Kind::row_bytes(units);
    for (int64_t panel = from; panel < to; ++panel) {
      const char* next = (const char*)matrix->panels + (panel + 1) * panel_bytes();
      for (int64_t t = first; t < last; ++t) {
        // The next panel is fetched while this one is multiplied, a part of it in each of the first tiles: with all of
        // it in the first one, memory would idle during the others.
        const int64_t row = count * t / tiles, n = t - first;
        const int lines = last - first == 1 ? 2 : n < 2 ? 1 : 0;
        any((int)(count * (t + 1) / tiles - row), packed + row * row_bytes, panel, start + row, next + n * units * 64,
            lines);
      }
    }
  }

  void pack() {
    const int64_t num = num_tiles();
    for (int64_t t; tiles.take(t);) {
      const int64_t row = count * t / num, end = count * (t + 1) / num;
      Kind::pack_x(x + (start + row) * matrix->columns, matrix->columns, units, end - row,
                   packed + row * Kind::row_bytes(units));
    }
  }

  // Every thread has a range of the panels, in parts: it computes those first, whose memory it may be nearest to, and then
  // what others have not begun, so that a thread which something else keeps from its processor keeps nobody waiting.
  void multiply(int thread) const {
    for (int i = 0; i < threads; ++i) compute_range((thread + i) % threads);
  }

  void compute_range(int64_t whose) const {
    int64_t* parts_begun = &begun[whose].parts;
    const int64_t panels = matrix->num_panels, from = panels * whose / threads, to = panels * (whose + 1) / threads;
    const int64_t least = beside(rows), some = (to - from) / PARTS / least * least, size = some < least ? least : some;
    const int64_t parts = (to - from + size - 1) / size;
    // Tiles whose rows stay in the second cache, all by one part; fewer where there are more threads than panels.
    const int64_t tiles = num_tiles();
    int64_t at_once = NEAR / (Kind::row_bytes(units) * HEIGHT);
    if (panels < threads && at_once > tiles * panels / threads) at_once = tiles * panels / threads;
    const int64_t groups = at_once < 1 ? tiles : (tiles + at_once - 1) / at_once;
    while (__atomic_load_n(parts_begun, __ATOMIC_RELAXED) < groups * parts) {
      const int64_t part = __atomic_fetch_add(parts_begun, 1, __ATOMIC_RELAXED), group = part / parts;
      if (group >= groups) return;
      const int64_t begin = from + part % parts * size, end = begin + size < to ? begin + size : to;
      if (rows == 1) few<1>(begin, end);
      else if (rows == 2) few<2>(begin, end);
      else if (rows == 3) few<3>(begin, end);
      else many(tiles * group / groups, tiles * (group + 1) / groups, begin, end);
    }
  }

  static void packs(void* work, int) { ((Product*)work)->pack(); }
  static void multiplies(void* work, int thread) { ((const Product*)work)->multiply(thread); }

  // 0, or 1 where memory is short.
  int32_t compute(int most_threads) {
    if (rows <= 0) return 0;
    units = Kind::units(matrix->columns);
    threads = most_threads < 1 || rows * matrix->columns * matrix->num_panels * WIDTH < SMALL ? 1 : most_threads;
    begun = (Begun*)scratch(threads * sizeof(Begun) + (rows < BLOCK ? rows : BLOCK) * Kind::row_bytes(units));
    if (!begun) return 1;
    packed = (char*)(begun + threads);
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    for (int64_t block = 0; block < blocks; ++block) {
      start = rows * block / blocks, count = rows * (block + 1) / blocks - start;
      tiles = {num_tiles()};
      run(packs, this, count * matrix->columns <= SHORT ? 1 : threads);
      memset(begun, 0, threads * sizeof(Begun));
      run(multiplies, this, threads);
    }
    return 0;
  }
};

// The units of several rows of x beside each other: to[unit][row], or to[unit][EACH][row] where `spread` makes several
// vectors of a unit's. `read` gives LANES units of a row from one on. Squares of units are turned in registers. Vectors
// are stored whole: what does not belong to one is overwritten by the next one, but at the end.
template <int EACH, class Read, class Spread>
void interleave(int64_t units, int64_t rows, Read read, Spread spread, void* to) {
  uint32_t* out = (uint32_t*)to;
  const uint32_t* end = out + units * EACH * rows;
  for (int64_t start = 0; start < units; start += LANES) {
    const int64_t count = units - start < LANES ? units - start : LANES;
    U some[LANES];
    UNROLLED for (int m = 0; m < LANES; ++m) some[m] = m < rows ? read(m, start) : all_units(0);
    transpose(some);
    UNROLLED for (int k = 0; k < LANES; ++k) {
      if (k >= count) break;
      for (int i = 0; i < EACH; ++i, out += rows) {
        const U vector = spread(some[k], i);
        if (end - out >= LANES) {
          store_units(out, vector);
        } else {
          uint32_t lanes[LANES];
          store_units(lanes, vector);
          memcpy(out, lanes, (size_t)rows * 4);
        }
      }
    }
  }
}

// -- panels ------------------------------------------------------------------------------------------------------------

// The row of the plain weight, gate before up, that is row `j` of a panel; -1 where it has none.
int64_t source(int64_t rows, bool gated, int64_t panel, int j) {
  if (!gated) return panel * WIDTH + j < rows ? panel * WIDTH + j : -1;
  const int64_t row = panel * LANES + j % LANES, half = rows / 2;
  return row >= half ? -1 : j < LANES ? row : half + row;
}

}  // namespace
