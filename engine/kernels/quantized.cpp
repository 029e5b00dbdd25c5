// y = x W^T for packed weights of 8 or 4 bits, see matmul.h. x is quantized to 8 bits first, see bytes.h.
//
// Weights are stored unsigned, offset by ZERO. With 8 bits a row of W has one scale. With 4 bits each group of a row
// has a scale in bfloat16: if a row of thousands of numbers shared one, its largest would leave the others too few of
// 16 steps.
//
// Order. A group's sum of products is an integer, exact in any order. The groups' sums are added as floats from the
// first to the last, each multiplied by its scales in one fused multiply-add. With 8 bits the weight's scale is applied
// last.
#include "bytes.h"
#include "packing.h"
#include "matmul.h"

namespace {

// -- weights of 8 and of 4 bits ---------------------------------------------------------------------------------------

struct Eight {
  static const int SIZE = 128;  // numbers of a group of x: with 64, what follows each group took a tenth of the time
  static const int PER_UNIT = 4, ZERO = 128;

  template <int M, int J>
  static inline __attribute__((always_inline)) void step(U (&sum)[M][J], const U (&w)[J], const char* x) {
    Way::step<M, J>(sum, w, x);
  }
  // A row of W has one scale, which multiplies its sum at the end. Until then the sums could overflow a float if x is
  // very large, so the scales of x are multiplied by DOWN.
  static const bool AT_END = true;
  static constexpr float DOWN = 1.0f / (1 << 19);
  // The scales of a group for the first or the second half of a panel's rows.
  static V scales(const Matrix& matrix, int64_t panel, int64_t, int64_t, int half) {
    return load((const float*)matrix.scales + panel * WIDTH + half * LANES);
  }
};

// The low nibbles of a unit's bytes are its first four numbers.
struct Four {
  static const int SIZE = 32;  // numbers of a group, of x and of the weight
  static const int PER_UNIT = 8, ZERO = 8;
  static const bool AT_END = false;
  static constexpr float DOWN = 1.0f;

  template <int M, int J>
  static inline __attribute__((always_inline)) void step(U (&sum)[M][J], const U (&w)[J], const char* x) {
    U nibbles[J];
    UNROLLED for (int j = 0; j < J; ++j) nibbles[j] = and_(w[j], set1_units(0x0f0f0f0f));
    Way::step<M, J>(sum, nibbles, x);
    UNROLLED for (int j = 0; j < J; ++j) nibbles[j] = and_(shift_right<4>(w[j]), set1_units(0x0f0f0f0f));
    Way::step<M, J>(sum, nibbles, x + M * Way::X_BYTES);
  }
  static V scales(const Matrix& matrix, int64_t panel, int64_t groups, int64_t group, int half) {
    return load_bf16((const uint16_t*)matrix.scales + (panel * groups + group) * WIDTH + half * LANES);
  }
};

// -- the sums ---------------------------------------------------------------------------------------------------------

// Independent of the activations' type, so that it is compiled once for all types.
template <class Width>
struct Sums {
  static const int SIZE = Width::SIZE, UNITS = SIZE / Width::PER_UNIT, FOURS = SIZE / 4;
  static const int ROW_BYTES = 8 + FOURS * Way::X_BYTES;  // of a row's group: initial sum, scale, numbers

  // The running sums are in `out`, in the first-level cache. Registers hold the sums of the current group.
  template <int M, int P>
  static __attribute__((noinline)) void compute(const Matrix& matrix, int64_t units, int64_t panel, const char* xs,
                                             const char* ahead, int lines, float (&out)[M][P][WIDTH]) {
    const int64_t size = units * WIDTH * 4, groups = (units + UNITS - 1) / UNITS;
    const char* w = (const char*)matrix.panels + panel * size;
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < 2 * P; ++j) store(out[m][0] + j * LANES, zero());
    for (int64_t g = 0; g < groups; ++g, xs += M * ROW_BYTES) {
      const int64_t left = units - g * UNITS, count = left < UNITS ? left : UNITS;
      for (int64_t l = 0; l < count * lines; ++l, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      U sum[M][2 * P];
      UNROLLED for (int m = 0; m < M; ++m)
        UNROLLED for (int j = 0; j < 2 * P; ++j) sum[m][j] = set1_units(((const uint32_t*)xs)[m]);
      const char* x = xs + 8 * M;
      for (int64_t u = 0; u < count; ++u, w += WIDTH * 4, x += M * (Width::PER_UNIT / 4) * Way::X_BYTES) {
        U weights[2 * P];
        UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = load_units(w + j / 2 * size + j % 2 * LANES * 4);
        Width::template step<M, 2 * P>(sum, weights, x);
      }
      // Without this the compiler keeps copies of `out` on the stack and writes both, which doubles the time.
      __asm__ volatile("" ::: "memory");
      const float* scale = (const float*)xs + M;
      UNROLLED for (int j = 0; j < 2 * P; ++j) {
        const V of_w = Width::AT_END ? zero() : Width::scales(matrix, panel + j / 2, groups, g, j % 2);
        UNROLLED for (int m = 0; m < M; ++m) {
          float* to = out[m][0] + j * LANES;
          const V factor = Width::AT_END ? set1(scale[m]) : mul(set1(scale[m]), of_w);
          store(to, fma(ints_to_floats(sum[m][j]), factor, load(to)));
        }
      }
    }
    if (!Width::AT_END) return;
    for (int j = 0; j < 2 * P; ++j) {
      const V of_w = Width::scales(matrix, panel + j / 2, groups, 0, j % 2);
      for (int m = 0; m < M; ++m) {
        float* to = out[m][0] + j * LANES;
        store(to, mul(mul(load(to), of_w), set1(1 / Width::DOWN)));
      }
    }
  }
};

template <class Number_, class Width>
struct Quantized {
  typedef Number_ Number;
  typedef Sums<Width> All;

  static int64_t units(int64_t columns) { return (columns + Width::PER_UNIT - 1) / Width::PER_UNIT; }
  static int64_t row_bytes(int64_t units) { return (units + All::UNITS - 1) / All::UNITS * All::ROW_BYTES; }

  static void pack_x(const Number* x, int64_t columns, int64_t, int64_t rows, char* to) {
    for (int64_t k = 0; k < columns; k += All::SIZE, to += rows * All::ROW_BYTES)
      for (int64_t m = 0; m < rows; ++m) {
        Bytes<All::SIZE> bytes;
        bytes.quantize(x + m * columns + k, columns - k);
        ((int32_t*)to)[m] = bytes.scale > 0 ? -Width::ZERO * bytes.sum : 0;  // undoes the weights' offset
        ((float*)to)[rows + m] = bytes.scale * Width::DOWN;
        for (int f = 0; f < All::FOURS; ++f)
          Way::put(bytes.numbers + 4 * f, rows, m, to + 8 * rows + f * rows * Way::X_BYTES);
      }
  }
  template <int M, int P>
  static inline __attribute__((always_inline)) void sums(const Matrix& matrix, int64_t units, int64_t panel, const char* xs,
                                                         const char* ahead, int lines, float (&out)[M][P][WIDTH]) {
    All::template compute<M, P>(matrix, units, panel, xs, ahead, lines, out);
  }
};

template <class Number, class Width>
int32_t multiply(const Matrix* matrix, const void* x, const void* residual, void* y, int64_t rows, int32_t threads) {
  const Timed timed(MATMUL);
  Matmul<Quantized<Number, Width>> matmul = {matrix, (const Number*)x, (const Number*)residual, y, rows};
  return matmul.compute(threads);
}

}  // namespace

#define MATMUL_OF(name, Number, Width)                                                                                 \
  EXPORT int32_t NAMED(name)(const Matrix* matrix, const void* x, const void* residual, void* y, int64_t rows,         \
                             int32_t threads) {                                                                        \
    return multiply<Number, Width>(matrix, x, residual, y, rows, threads);                                        \
  }

MATMUL_OF(matmul_int8_float32, float, Eight)
MATMUL_OF(matmul_int8_bfloat16, uint16_t, Eight)
MATMUL_OF(matmul_int4_float32, float, Four)
MATMUL_OF(matmul_int4_bfloat16, uint16_t, Four)

// -- packing ----------------------------------------------------------------------------------------------------------

namespace {

// A vector of a row of the plain weight, padded with zeros.
template <class Number>
V read(const Number* row, int64_t columns, int64_t k) {
  return k < columns ? get(row + k, columns - k) : zero();
}

// Quantize a row to unsigned bytes; returns its scale.
template <class Number>
float to_eight(const Number* row, int64_t columns, uint8_t* bytes) {
  const float top = max_magnitude(ceil_div(columns, LANES), [&](int64_t i) { return read(row, columns, i * LANES); });
  const float scale = scale_of(top, LARGEST);
  const V inverse = set1(scale > 0 ? (float)LARGEST / top : 0.0f);
  for (int64_t k = 0; k < columns; k += LANES)
    store_lowest_bytes(bytes + k, add_ints(round_to_ints(mul(read(row, columns, k), inverse)), set1_units(Eight::ZERO)));
  return scale;
}

// Quantize a group of a row to 0 … 15; returns its scale. The number of the largest magnitude becomes 0, which stands
// for -8: of the 16 steps the one without a counterpart of the other sign.
template <class Number>
uint16_t to_four(const Number* row, int64_t columns, int64_t start, uint8_t* bytes) {
  float numbers[Four::SIZE], top = 0.0f;
  for (int i = 0; i < Four::SIZE; i += LANES) store(numbers + i, read(row, columns, start + i));
  const float size = max_magnitude(Four::SIZE / LANES, [&](int64_t i) { return load(numbers + i * LANES); });
  for (float number : numbers)
    if (number == size || number == -size) { top = number; break; }
  const float exact = scale_of(size, Four::ZERO);
  const uint16_t scale = to_bf16(top > 0 ? -exact : exact);
  const V inverse = set1(exact > 0 ? 1.0f / to_float(scale) : 0.0f);
  for (int i = 0; i < Four::SIZE; i += LANES) {
    const V steps = max(set1(-8.0f), min(set1(7.0f), round(mul(load(numbers + i), inverse))));
    store_lowest_bytes(bytes + i, add_ints(round_to_ints(steps), set1_units(Four::ZERO)));
  }
  return scale;
}

struct Quantizer {
  static int64_t scratch_bytes(const Weight& weight) {
    return (weight.columns + 8 * LANES - 1) / (8 * LANES) * 8 * LANES * LANES;
  }

  static void pack(const Rows& rows, char* buffer) {
    if (rows.weight.number_bytes == 4) panels_of<float>(rows, (uint8_t*)buffer);
    else panels_of<uint16_t>(rows, (uint8_t*)buffer);
  }

  // Quantize LANES rows, then transpose them into panels.
  template <class Number>
  static void panels_of(const Rows& rows, uint8_t* buffer) {
    const Weight& weight = rows.weight;
    const int64_t size = scratch_bytes(weight) / LANES, per_unit = 32 / weight.bits;
    const int64_t units = (weight.columns + per_unit - 1) / per_unit;
    for (int64_t p = rows.first; p < rows.last; ++p)
      for (int half = 0; half < WIDTH; half += LANES) {
        for (int j = 0; j < LANES; ++j) {
          const Number* row = (const Number*)rows.row(p, half + j);
          if (!row) memset(buffer + j * size, weight.bits == 8 ? Eight::ZERO : Four::ZERO, (size_t)size);
          if (weight.bits == 8) eight(weight, row, p, half + j, buffer + j * size);
          else four(weight, row, p, half + j, buffer + j * size);
        }
        uint32_t* to = (uint32_t*)weight.panels + p * units * WIDTH + half;
        for (int64_t u = 0; u < units; u += LANES) {
          U square[LANES];
          UNROLLED for (int j = 0; j < LANES; ++j) square[j] = unit_of(weight.bits, buffer + j * size, u);
          transpose(square);
          for (int64_t k = 0; k < LANES && u + k < units; ++k) store_units(to + (u + k) * WIDTH, square[k]);
        }
      }
  }

  // LANES units of a quantized row, from unit u on.
  static U unit_of(int bits, const uint8_t* bytes, int64_t u) {
    if (bits == 8) return load_units(bytes + 4 * u);
    uint32_t units[LANES];
    for (int k = 0; k < LANES; ++k) {
      uint32_t low, high;
      memcpy(&low, bytes + 8 * (u + k), 4);
      memcpy(&high, bytes + 8 * (u + k) + 4, 4);
      units[k] = low | high << 4;
    }
    return load_units(units);
  }

  template <class Number>
  static void eight(const Weight& weight, const Number* row, int64_t panel, int j, uint8_t* bytes) {
    ((float*)weight.scales)[panel * WIDTH + j] = row ? to_eight(row, weight.columns, bytes) : 0.0f;
  }

  template <class Number>
  static void four(const Weight& weight, const Number* row, int64_t panel, int j, uint8_t* bytes) {
    const int64_t groups = (weight.columns + Four::SIZE - 1) / Four::SIZE;
    for (int64_t g = 0; g < groups; ++g) {
      uint16_t& scale = ((uint16_t*)weight.scales)[(panel * groups + g) * WIDTH + j];
      scale = row ? to_four(row, weight.columns, g * Four::SIZE, bytes + g * Four::SIZE) : 0;
    }
  }
};

template <class Number>
Number narrow(float x);
template <>
float narrow<float>(float x) { return x; }
template <>
uint16_t narrow<uint16_t>(float x) { return to_bf16(x); }

template <class Number>
void dequantize(const Matrix& matrix, int bits, int64_t id, Number* to) {
  const int64_t panel = id / WIDTH, j = id % WIDTH, per_unit = 32 / bits;
  const int64_t units = ceil_div(matrix.columns, per_unit), groups = (matrix.columns + Four::SIZE - 1) / Four::SIZE;
  const uint32_t* from = (const uint32_t*)matrix.panels + panel * units * WIDTH + j;
  for (int64_t k = 0; k < matrix.columns; ++k) {
    const uint32_t unit = from[k / per_unit * WIDTH];
    if (bits == 8) {
      const int step = (int)(unit >> 8 * (k % 4) & 0xff) - Eight::ZERO;
      to[k] = narrow<Number>((float)step * ((const float*)matrix.scales)[id]);
    } else {
      const int step = (int)(unit >> (8 * (k % 4) + k % 8 / 4 * 4) & 0xf) - Four::ZERO;
      const uint16_t scale = ((const uint16_t*)matrix.scales)[(panel * groups + k / Four::SIZE) * WIDTH + j];
      to[k] = narrow<Number>((float)step * to_float(scale));
    }
  }
}

}  // namespace

// Like `pack` in matmul.cpp, quantizing to 8 or 4 `bits`. With 8 bits the scales are [num_panels, WIDTH] floats; with
// 4, [num_panels, groups of 32 columns, WIDTH] bfloat16.
EXPORT int32_t NAMED(quantize)(const Weight* weights, int64_t count, Progress* progress, int32_t threads) {
  Packing<Quantizer> packing = {weights, count, progress, nullptr, 0, 0};
  return packing.compute(threads);
}

// Dequantize rows of a weight into 4-byte or 2-byte numbers. Returns 0, or 1 + the index of the first invalid id.
EXPORT int64_t NAMED(dequantized)(const Matrix* matrix, int32_t bits, int64_t number_bytes, const int64_t* ids,
                                  int64_t count, void* to) {
  const Timed timed(OTHER);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= matrix->outputs) return i + 1;
    if (number_bytes == 4) dequantize(*matrix, bits, ids[i], (float*)to + i * matrix->columns);
    else dequantize(*matrix, bits, ids[i], (uint16_t*)to + i * matrix->columns);
  }
  return 0;
}
