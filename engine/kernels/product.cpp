// y = x W^T for weights that were packed once, with what follows the product in a transformer: bias, residual, SiLU.
//
// Units. Four bytes of a row along k: one float, or two bfloat16, the first in the lower half. A row of K numbers has
// ceil(K / 2) or K units; zeros fill the last one.
//
// Panels. A panel holds 2 * LANES rows of W (columns of y) as P[unit][row]: each step along k reads 2 vectors. Rows
// that W does not have are zero. Of a gated matrix (gate and up side by side, one result column from a row of each)
// the first vector holds gate rows and the second the up rows of the same result columns.
//
// Order. Each element of y is one chain of fused multiply-adds along k from 0 upwards, in one register, then bias,
// gate, residual, then one rounding to the result's type. Neither the number of rows nor a tile's height nor the
// thread changes any of it: the bits of a row never depend on its neighbours.
//
// Tiles. Up to HEIGHT rows of x by one panel, or few rows by several panels, so that enough sums run side by side to
// hide the latency of the additions. The rows of a tile are packed as X[unit][row]: rows of x are a power of two
// apart, and read in place they would push one another out of the first cache.
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

// -- the three ways to multiply a unit -----------------------------------------------------------------------------------

struct Floats {
  typedef float Number;
  static const int PER_UNIT = 1, X_BYTES = 4;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    UNROLLED for (int p = 0; p < P; ++p) {
      const V w0 = load((const float*)(w + p * panel)), w1 = load((const float*)(w + p * panel) + LANES);
      UNROLLED for (int m = 0; m < M; ++m) {
        const V a = all(((const float*)x)[m]);
        sum[m][2 * p] = fma(a, w0, sum[m][2 * p]);
        sum[m][2 * p + 1] = fma(a, w1, sum[m][2 * p + 1]);
      }
    }
  }
  static void pack_x(const float* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    float* out = (float*)to;
    if (rows == 1) {
      memcpy(out, x, (size_t)columns * 4);
      return;
    }
    for (int64_t k = 0; k < units; ++k)
      for (int64_t m = 0; m < rows; ++m) *out++ = x[m * columns + k];
  }
};

// bfloat16 widened to float by shifts: exact, and each product and sum is a float's.
struct Widened {
  typedef uint16_t Number;
  static const int PER_UNIT = 2, X_BYTES = 8;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    UNROLLED for (int p = 0; p < P; ++p) {
      const U u0 = load_units(w + p * panel), u1 = load_units((const float*)(w + p * panel) + LANES);
      const V l0 = lower(u0), l1 = lower(u1);
      UNROLLED for (int m = 0; m < M; ++m) {
        const V a = all(((const float*)x)[m]);
        sum[m][2 * p] = fma(a, l0, sum[m][2 * p]);
        sum[m][2 * p + 1] = fma(a, l1, sum[m][2 * p + 1]);
      }
      const V h0 = upper(u0), h1 = upper(u1);
      UNROLLED for (int m = 0; m < M; ++m) {
        const V a = all(((const float*)x)[M + m]);
        sum[m][2 * p] = fma(a, h0, sum[m][2 * p]);
        sum[m][2 * p + 1] = fma(a, h1, sum[m][2 * p + 1]);
      }
    }
  }
  static void pack_x(const uint16_t* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    float* out = (float*)to;
    for (int64_t k = 0; k < 2 * units; ++k)
      for (int64_t m = 0; m < rows; ++m) *out++ = k < columns ? to_float(x[m * columns + k]) : 0.0f;
  }
};

#if defined(HAS_DOT)
struct Dotted {
  typedef uint16_t Number;
  static const int PER_UNIT = 2, X_BYTES = 4;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    UNROLLED for (int p = 0; p < P; ++p) {
      const U w0 = load_units(w + p * panel), w1 = load_units((const float*)(w + p * panel) + LANES);
      UNROLLED for (int m = 0; m < M; ++m) {
        const U a = all_units(((const uint32_t*)x)[m]);
        sum[m][2 * p] = dot(sum[m][2 * p], a, w0);
        sum[m][2 * p + 1] = dot(sum[m][2 * p + 1], a, w1);
      }
    }
  }
  static void pack_x(const uint16_t* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    uint32_t* out = (uint32_t*)to;
    for (int64_t k = 0; k < units; ++k)
      for (int64_t m = 0; m < rows; ++m) {
        const uint16_t* pair = x + m * columns + 2 * k;
        *out++ = pair[0] | (uint32_t)(2 * k + 1 < columns ? pair[1] : 0) << 16;
      }
  }
};
typedef Dotted Halves;
#else
typedef Widened Halves;
#endif

// -- one product --------------------------------------------------------------------------------------------------------

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

  // M rows by P panels. `ahead`: what memory should bring meanwhile, `lines` cache lines for each unit.
  template <int M, int P>
  __attribute__((noinline)) void tile(const char* xs, int64_t panel, int64_t row, const char* ahead, int lines) const {
    V sum[M][2 * P];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) sum[m][j] = zero();
    const char* w = (const char*)matrix->panels + panel * panel_bytes();
    const int64_t size = panel_bytes();
    for (int64_t u = 0; u < units;) {
      const int64_t end = u + 8 < units ? u + 8 : units;
      for (int l = 0; l < 8 * lines; ++l, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      for (; u < end; ++u, w += WIDTH * 4, xs += M * Kind::X_BYTES) Kind::template step<M, P>(sum, xs, w, size);
    }
    float out[M][P][WIDTH];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) store(out[m][0] + j * LANES, sum[m][j]);
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
    const int64_t tiles = (count + HEIGHT - 1) / HEIGHT, row_bytes = units * Kind::X_BYTES;
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
                   packed + row * units * Kind::X_BYTES);
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
    units = (matrix->columns + Kind::PER_UNIT - 1) / Kind::PER_UNIT;
    packed = (char*)scratch((rows < BLOCK ? rows : BLOCK) * units * Kind::X_BYTES);
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

}  // namespace

EXPORT int32_t NAMED(product_float32)(const Matrix* matrix, const float* x, const float* residual, float* y,
                                          int64_t rows, int32_t threads) {
  const Timed timed(IN_PRODUCTS);
  Product<Floats> product = {matrix, x, residual, y, rows, 0, 0};
  return product.compute(threads);
}

EXPORT int32_t NAMED(product_bfloat16)(const Matrix* matrix, const uint16_t* x, const uint16_t* residual, void* y,
                                           int64_t rows, int32_t threads) {
  const Timed timed(IN_PRODUCTS);
  Product<Halves> product = {matrix, x, residual, y, rows, 0, 0};
  return product.compute(threads);
}

// -- packing ------------------------------------------------------------------------------------------------------------

EXPORT int32_t NAMED(panel_width)() { return WIDTH; }

namespace {

struct Packing {
  const char* weight;  // [rows, columns] of numbers, gate before up
  uint32_t* panels;
  int64_t rows, columns, number_bytes, num_panels;
  int32_t gated;

  // The row of the plain weight that is row `j` of a panel; -1 where it has none.
  int64_t source(int64_t panel, int j) const {
    if (!gated) return panel * WIDTH + j < rows ? panel * WIDTH + j : -1;
    const int64_t row = panel * LANES + j % LANES, half = rows / 2;
    return row >= half ? -1 : j < LANES ? row : half + row;
  }

  void share(int thread, int threads) const {
    const int64_t row_bytes = columns * number_bytes, units = (row_bytes + 3) / 4, whole = row_bytes / 4;
    for (int64_t p = num_panels * thread / threads; p < num_panels * (thread + 1) / threads; ++p) {
      uint32_t* to = panels + p * units * WIDTH;
      // Sixteen units of every row at a time: whole cache lines are read, and what is written stays in the first cache.
      for (int64_t start = 0; start < units; start += 16) {
        const int64_t end = start + 16 < units ? start + 16 : units;
        for (int j = 0; j < WIDTH; ++j) {
          const int64_t row = source(p, j);
          const char* from = weight + row * row_bytes;
          for (int64_t u = start; u < end; ++u) {
            uint32_t unit = 0;
            if (row >= 0 && u < whole) memcpy(&unit, from + 4 * u, 4);
            else if (row >= 0) memcpy(&unit, from + 4 * u, 2);
            to[u * WIDTH + j] = unit;
          }
        }
      }
    }
  }

  static void work(void* packing, int thread, int threads) { ((const Packing*)packing)->share(thread, threads); }
};

}  // namespace

// `number_bytes` is 4 or 2. `panels` has room for num_panels * units * WIDTH units.
EXPORT void NAMED(pack)(const void* weight, void* panels, int64_t rows, int64_t columns, int64_t number_bytes,
                            int64_t num_panels, int32_t gated, int32_t threads) {
  Packing packing = {(const char*)weight, (uint32_t*)panels, rows, columns, number_bytes, num_panels, gated};
  run(Packing::work, &packing, threads);
}

// Rows of the weight that was packed, as they were: to[i] = W[ids[i]]. Gives the first id that is none, plus 1, or 0.
EXPORT int64_t NAMED(lookup)(const Matrix* matrix, int64_t number_bytes, const int64_t* ids, int64_t count,
                                 void* to) {
  const Timed timed(IN_OTHERS);
  const int64_t row_bytes = matrix->columns * number_bytes, units = (row_bytes + 3) / 4, whole = row_bytes / 4;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= matrix->outputs) return i + 1;
    const uint32_t* from = (const uint32_t*)matrix->panels + ids[i] / WIDTH * units * WIDTH + ids[i] % WIDTH;
    char* out = (char*)to + i * row_bytes;
    for (int64_t u = 0; u < whole; ++u) memcpy(out + 4 * u, from + u * WIDTH, 4);
    if (whole < units) memcpy(out + 4 * whole, from + whole * WIDTH, 2);
  }
  return 0;
}
