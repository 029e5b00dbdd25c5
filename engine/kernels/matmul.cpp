// y = x W^T for packed weights in float32 or bfloat16, see matmul.h.
#include "packing.h"
#include "matmul.h"

namespace {

#define UNROLLED_24 _Pragma("GCC unroll 24")

// -- three ways to multiply a unit ------------------------------------------------------------------------------------

// Each number of x is broadcast once for all panels.
template <int M, int J>
inline __attribute__((always_inline)) void multiply(V (&sum)[M][J], const float* x, const V (&weights)[J]) {
  UNROLLED for (int m = 0; m < M; ++m) {
    const V a = set1(x[m]);
    UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = fma(a, weights[j], sum[m][j]);
  }
}

// Readers of LANES units of a row of x, padded with zeros: a unit is a float, or a pair of bfloat16.
auto floats(const float* x, int64_t columns) {
  return [=](int64_t m, int64_t k) { return as_units(get(x + m * columns + k, columns - k)); };
}

auto pairs(const uint16_t* x, int64_t columns) {
  return [=](int64_t m, int64_t k) {
    const int64_t left = columns - 2 * k;
    if (left >= 2 * LANES) return load_units(x + m * columns + 2 * k);
    uint16_t numbers[2 * LANES] = {};
    memcpy(numbers, x + m * columns + 2 * k, (size_t)left * 2);
    return load_units(numbers);
  };
}

struct Floats {
  typedef float Number;
  static const int PER_UNIT = 1, X_BYTES = 4;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    V weights[2 * P];
    UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = load((const float*)(w + j / 2 * panel) + j % 2 * LANES);
    multiply(sum, (const float*)x, weights);
  }
  static void pack_x(const float* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    if (rows == 1) memcpy(to, x, (size_t)columns * 4);
    else interleave<1>(units, rows, floats(x, columns), [](U unit, int) { return unit; }, to);
  }
};

// Widens bfloat16 to float by shifts, which is exact, and computes in floats.
struct Widened {
  typedef uint16_t Number;
  static const int PER_UNIT = 2, X_BYTES = 8;
  template <int M, int P>
  static inline __attribute__((always_inline)) void step(V (&sum)[M][2 * P], const char* x, const char* w, int64_t panel) {
    U units[2 * P];
    V weights[2 * P];
    UNROLLED for (int j = 0; j < 2 * P; ++j) units[j] = load_units((const float*)(w + j / 2 * panel) + j % 2 * LANES);
    UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = lower(units[j]);
    multiply(sum, (const float*)x, weights);
    UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = upper(units[j]);
    multiply(sum, (const float*)x + M, weights);
  }
  static void pack_x(const uint16_t* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    const auto widened = [](U unit, int half) { return as_units(half ? upper(unit) : lower(unit)); };
    interleave<2>(units, rows, pairs(x, columns), widened, to);
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
        const U a = set1_units(((const uint32_t*)x)[m]);
        sum[m][2 * p] = dot(sum[m][2 * p], a, w0);
        sum[m][2 * p + 1] = dot(sum[m][2 * p + 1], a, w1);
      }
    }
  }
  static void pack_x(const uint16_t* x, int64_t columns, int64_t units, int64_t rows, char* to) {
    interleave<1>(units, rows, pairs(x, columns), [](U unit, int) { return unit; }, to);
  }
};
typedef Dotted Halves;

const int CHAINS = 24;  // enough to hide the latency of either instruction

// Nanoseconds of 1000 steps, each of which applies one instruction to each of CHAINS sums in registers.
template <class Step>
int64_t duration(Step step) {
  V sum[CHAINS];
  UNROLLED_24 for (int i = 0; i < CHAINS; ++i) sum[i] = zero();
  const int64_t start = now();
  // The empty assembly keeps the compiler from merging the sums and from moving their computation.
  UNROLLED_24 for (int i = 0; i < CHAINS; ++i) __asm__ volatile("" : "+v"(sum[i]));
  for (int n = 0; n < 1000; ++n) UNROLLED_24 for (int i = 0; i < CHAINS; ++i) step(sum[i]);
  UNROLLED_24 for (int i = 0; i < CHAINS; ++i) __asm__ volatile("" : "+v"(sum[i]));
  return now() - start;
}
#else
typedef Widened Halves;
#endif

// Computes each element by one chain of fused multiply-adds along k, in a register.
template <class Unit>
struct Chain : Unit {
  static int64_t units(int64_t columns) { return (columns + Unit::PER_UNIT - 1) / Unit::PER_UNIT; }
  static int64_t row_bytes(int64_t units) { return units * Unit::X_BYTES; }

  template <int M, int P>
  static inline __attribute__((always_inline)) void sums(const Matrix& matrix, int64_t units, int64_t panel, const char* xs,
                                                         const char* ahead, int lines, float (&out)[M][P][WIDTH]) {
    V sum[M][2 * P];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) sum[m][j] = zero();
    const int64_t size = units * WIDTH * 4;
    const char* w = (const char*)matrix.panels + panel * size;
    for (int64_t u = 0; u < units;) {
      const int64_t end = u + 8 < units ? u + 8 : units;
      for (int l = 0; l < 8 * lines; ++l, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      for (; u < end; ++u, w += WIDTH * 4, xs += M * Unit::X_BYTES) Unit::template step<M, P>(sum, xs, w, size);
    }
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) store(out[m][0] + j * LANES, sum[m][j]);
  }
};

}  // namespace

EXPORT int32_t NAMED(matmul_float32)(const Matrix* matrix, const float* x, const float* residual, float* y,
                                          int64_t rows, int32_t threads) {
  const Timed timed(MATMUL);
  Matmul<Chain<Floats>> matmul = {matrix, x, residual, y, rows};
  return matmul.compute(threads);
}

EXPORT int32_t NAMED(matmul_bfloat16)(const Matrix* matrix, const uint16_t* x, const uint16_t* residual, void* y,
                                           int64_t rows, int32_t threads) {
  const Timed timed(MATMUL);
  Matmul<Chain<Halves>> matmul = {matrix, x, residual, y, rows};
  return matmul.compute(threads);
}

#if defined(HAS_DOT)
// Whether the bfloat16 dot product is faster than two multiply-adds: on AMD's processors it is nearly twice as fast,
// while on Intel's (Emerald Rapids) it takes as long as four. Compares the shortest of many short trials, so that other
// load does not change the choice, and with it the bits of results, from one start to the next.
EXPORT int32_t NAMED(dot_pays)() {
  int64_t dots = INT64_MAX, adds = INT64_MAX;
  const U pair = set1_units(0x3f803f80);  // ones
  for (int trial = 0; trial < 20; ++trial) {
    const int64_t dot_time = duration([&](V& sum) { sum = dot(sum, pair, pair); });
    const int64_t add_time = duration([&](V& sum) { sum = fma(upper(pair), upper(pair), sum); });
    dots = min(dot_time, dots), adds = min(add_time, adds);
  }
  return dots < 2 * adds;
}
#endif

// -- packing ----------------------------------------------------------------------------------------------------------

EXPORT int32_t NAMED(panel_width)() { return WIDTH; }

namespace {

const int64_t AHEAD = 512;  // bytes of a row to prefetch ahead

struct Plain {
  static int64_t scratch_bytes(const Weight&) { return 0; }

  static void pack(const Rows& rows, char*) {
    const Weight& weight = rows.weight;
    const int64_t row_bytes = weight.row_bytes, units = (row_bytes + 3) / 4, whole = row_bytes / 4 / LANES * LANES;
    for (int64_t p = rows.first; p < rows.last; ++p) {
      uint32_t* to = (uint32_t*)weight.panels + p * units * WIDTH;
      const char* from[WIDTH];  // null for a missing row
      for (int j = 0; j < WIDTH; ++j) from[j] = rows.row(p, j);
      for (int64_t u = 0; u < whole; u += LANES)
        for (int half = 0; half < WIDTH; half += LANES) transpose_square(from + half, u, to + half);
      for (int64_t u = whole; u < units; ++u)
        for (int j = 0; j < WIDTH; ++j) {
          uint32_t unit = 0;
          if (from[j]) memcpy(&unit, from[j] + 4 * u, row_bytes - 4 * u < 4 ? 2 : 4);
          to[u * WIDTH + j] = unit;
        }
    }
  }

  // LANES units of LANES rows. Prefetches, because these are more streams than the processor follows by itself.
  static void transpose_square(const char* const* from, int64_t u, uint32_t* to) {
    U units[LANES];
    UNROLLED for (int j = 0; j < LANES; ++j) {
      units[j] = from[j] ? load_units(from[j] + 4 * u) : set1_units(0);
      if (from[j]) __builtin_prefetch(from[j] + 4 * u + AHEAD);
    }
    transpose(units);
    UNROLLED for (int k = 0; k < LANES; ++k) store_units(to + (u + k) * WIDTH, units[k]);
  }
};

}  // namespace

// Pack weights of 4-byte or 2-byte numbers; the `panels` of each hold num_panels * units * WIDTH units. Updates
// `progress`. Returns 0, 1 if out of memory, or 2 if a file cannot be read.
EXPORT int32_t NAMED(pack)(const Weight* weights, int64_t count, Progress* progress, int32_t threads) {
  Packing<Plain> packing = {weights, count, progress, nullptr, 0, 0};
  return packing.compute(threads);
}

// Copy rows of a packed weight: to[i] = W[ids[i]]. Returns 0, or 1 + the index of the first invalid id.
EXPORT int64_t NAMED(lookup)(const Matrix* matrix, int64_t number_bytes, const int64_t* ids, int64_t count,
                                 void* to) {
  const Timed timed(OTHER);
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
