// y = x W^T for packed weights of 8 or 4 bits, see matmul.h. x is quantized to 8 bits first, see bytes.h.
//
// Weights are stored unsigned, offset by ZERO. With 8 bits a row of W has one scale. With 4 bits each group of a row
// has a scale in bfloat16: if a row of thousands of numbers shared one, its largest would leave the others too few of
// 16 steps. The packing searches that scale: the error of clipping the largest number may be less than it saves.
//
// Order. A group's sum of products is an integer, exact in any order. The groups' sums are added as floats from the
// first to the last, each multiplied by its scales in one fused multiply-add. With 8 bits the weight's scale is applied
// last.
#include "bytes.h"
#include "packing.h"
#include "tiled.h"

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
  static __attribute__((noinline)) void compute(const Matrix& matrix, int64_t units, int64_t panel, const char* w,
                                                const char* xs, const char* ahead, int lines, float (&out)[M][P][WIDTH]) {
    const int64_t size = units * WIDTH * 4, groups = (units + UNITS - 1) / UNITS;
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
struct Quantized : InPanels<Quantized<Number_, Width>> {
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
  static inline __attribute__((always_inline)) void sums(const Matrix& matrix, int64_t units, int64_t panel, const char* w,
                                                         char*, const char* xs, const char* ahead, int lines,
                                                         float (&out)[M][P][WIDTH]) {
    All::template compute<M, P>(matrix, units, panel, w, xs, ahead, lines, out);
  }
};

#if defined(HAS_TILES)
// Weights of 8 bits, with the same results: a tile has one group's sum of products. Rows of x are packed as
// X[step][row][64 bytes]; the groups' initial sums and scales follow, [group][row] each.
template <class Number_>
struct TiledEight : InTiles<Tiles, TiledEight<Number_>> {
  typedef Number_ Number;
  static const int64_t STEPS = Eight::SIZE / TILE_BYTES;  // of a group

  static int64_t units(int64_t columns) { return ceil_div(columns, Eight::PER_UNIT); }
  static int64_t groups(int64_t units) { return ceil_div(units, STEPS * STEP_UNITS); }
  static int64_t row_bytes(int64_t units) { return groups(units) * Eight::SIZE + ceil_div(groups(units), 8) * 64; }

  static void pack_row(const Number* x, int64_t count, int64_t units, int64_t tall, int64_t m, char* tile) {
    const int64_t num_groups = groups(units);
    int32_t* initial = (int32_t*)(tile + num_groups * Eight::SIZE * tall);
    float* scales = (float*)(initial + num_groups * tall);
    for (int64_t g = 0; g < num_groups; ++g) {
      Bytes<Eight::SIZE> bytes;
      bytes.quantize(x + g * Eight::SIZE, max(0, count - g * Eight::SIZE));
      initial[g * tall + m] = bytes.scale > 0 ? -Eight::ZERO * bytes.sum : 0;
      scales[g * tall + m] = bytes.scale * Eight::DOWN;
      for (int64_t s = 0; s < STEPS; ++s)
        memcpy(tile + ((g * STEPS + s) * tall + m) * TILE_BYTES, bytes.numbers + s * TILE_BYTES, TILE_BYTES);
    }
  }
  static void sums(const Matrix& matrix, int64_t units, int64_t panel, const char* w, char*, const char* xs, int64_t tall,
                   Fetch& fetch, float (&out)[2 * TILE_ROWS][WIDTH]) {
    const int64_t num_groups = groups(units);
    const int32_t* initial = (const int32_t*)(xs + num_groups * Eight::SIZE * tall);
    const float* scales = (const float*)(initial + num_groups * tall);
    Steps weights(w, units);
    for (int64_t i = 0; i < tall; ++i) store(out[i], zero()), store(out[i] + LANES, zero());
    for (int64_t g = 0; g < num_groups; ++g, initial += tall, scales += tall) {
      alignas(64) int32_t group[2 * TILE_ROWS][WIDTH];
      const int64_t from = g * STEPS, to = min(from + STEPS, ceil_div(units, STEP_UNITS));
      multiply_rows<Tiles, true>(weights, from, to, xs + from * tall * TILE_BYTES, tall, fetch, group);
      for (int64_t m = 0; m < tall; ++m)
        for (int j = 0; j < WIDTH; j += LANES) {
          const U sum = add_ints(load_units(group[m] + j), set1_units((uint32_t)initial[m]));
          store(out[m] + j, fma(ints_to_floats(sum), set1(scales[m]), load(out[m] + j)));
        }
    }
    for (int j = 0; j < 2; ++j) {
      const V of_w = Eight::scales(matrix, panel, num_groups, 0, j);
      for (int64_t m = 0; m < tall; ++m) {
        float* to = out[m] + j * LANES;
        store(to, mul(mul(load(to), of_w), set1(1 / Eight::DOWN)));
      }
    }
  }
};
template <class Number>
using Eights = TiledEight<Number>;
#else
template <class Number>
using Eights = Quantized<Number, Eight>;
#endif
template <class Number>
using Fours = Quantized<Number, Four>;

template <class Kind>
int32_t multiply(const Matrix* matrix, const void* x, const void* residual, void* y, int64_t rows, int32_t threads) {
  typedef typename Kind::Number Number;
  const Timed timed(MATMUL);
  Matmul<Kind> matmul = {matrix, (const Number*)x, (const Number*)residual, y, rows};
  return matmul.compute(threads);
}

}  // namespace

#define MATMUL_OF(name, Kind)                                                                                          \
  EXPORT int32_t NAMED(name)(const Matrix* matrix, const void* x, const void* residual, void* y, int64_t rows,         \
                             int32_t threads) {                                                                        \
    return multiply<Kind>(matrix, x, residual, y, rows, threads);                                                      \
  }

MATMUL_OF(matmul_int8_float32, Eights<float>)
MATMUL_OF(matmul_int8_bfloat16, Eights<uint16_t>)
MATMUL_OF(matmul_int4_float32, Fours<float>)
MATMUL_OF(matmul_int4_bfloat16, Fours<uint16_t>)

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

// The scales tried for a group in 4 bits are its number of the largest magnitude, divided by each of these. The first
// is that of rounding to nearest, so the search is never worse. With the others the sum of squared errors of trained and
// of Gaussian weights is 10 to 11 % smaller; with 44 it would be 11 to 12 %.
const int TRIED = 8;
const float TOPS[TRIED] = {-8.0f, -8.4f, -7.2f, -8.8f, -7.8f, -8.2f, -7.0f, -8.6f};
const int AT_ONCE = 4;  // scales, whose independent sums hide the latency of the additions

// A group of LANES rows, one row in each lane: every lane is computed alike, so the result does not depend on LANES.
struct GroupOfFour {
  V numbers[Four::SIZE];

  // From `start` on; a null row counts as zeros.
  template <class Number>
  GroupOfFour(const Number* const* rows, int64_t columns, int64_t start) {
    for (int i = 0; i < Four::SIZE; i += LANES) {
      U square[LANES];
      UNROLLED for (int j = 0; j < LANES; ++j)
        square[j] = as_units(rows[j] ? read(rows[j], columns, start + i) : zero());
      transpose(square);
      UNROLLED for (int j = 0; j < LANES; ++j) numbers[i + j] = as_floats(square[j]);
    }
  }

  static V steps_of(V number, V inverse) { return max(set1(-8.0f), min(set1(7.0f), round(mul(number, inverse)))); }

  // Return the scale, of those tried, with the smallest sum of squared errors, each multiplied by the importance of its
  // column, in lanes of bfloat16. It is zero if all numbers are smaller than TINY, and NaN if one is not finite.
  V search(const float* importance) const {
    V top = zero(), size = zero();  // the first number of the largest magnitude, and its magnitude
    U bits = set1_units(0);         // the same as integers, where NaN is larger than infinity
    for (const V number : numbers) {
      const V magnitude = as_floats(and_(as_units(number), set1_units(0x7fffffff)));
      top = where_less(size, magnitude, number, top);
      size = max(magnitude, size);
      bits = max_ints(bits, as_units(magnitude));
    }
    V best = zero(), least = zero();
    for (int first = 0; first < TRIED; first += AT_ONCE) {
      V scales[AT_ONCE], inverses[AT_ONCE], errors[AT_ONCE];
      UNROLLED for (int c = 0; c < AT_ONCE; ++c) {
        scales[c] = rounded(divide(top, set1(TOPS[first + c])));
        inverses[c] = divide(set1(1.0f), scales[c]);
        errors[c] = zero();
      }
      for (int k = 0; k < Four::SIZE; ++k) {
        const V number = numbers[k], weight = set1(importance[k]);
        UNROLLED for (int c = 0; c < AT_ONCE; ++c) {
          const V off = sub(number, mul(steps_of(number, inverses[c]), scales[c]));
          errors[c] = fma(mul(weight, off), off, errors[c]);
        }
      }
      UNROLLED for (int c = 0; c < AT_ONCE; ++c) {
        if (first + c == 0) {
          best = scales[c], least = errors[c];
          continue;
        }
        best = where_less(errors[c], least, scales[c], best);
        least = where_less(errors[c], least, errors[c], least);
      }
    }
    size = as_floats(bits);
    best = where_less(size, set1(TINY), zero(), best);
    return where_not_nan(sub(size, size), best, set1(bits_to_float(0x7fc00000)));  // infinity - infinity is NaN
  }
  static V rounded(V v) { return as_floats(shift_left<16>(to_bf16_units(v))); }

  static constexpr int NIBBLES[] = {7, 3, 6, 2, 5, 1, 4, 0};  // a unit's numbers, from the highest nibble to the lowest

  // Write the group's units for LANES rows, but at most `count`: vectors that are WIDTH units apart.
  void quantize(V scale, int64_t count, uint32_t* to) const {
    const V magnitude = as_floats(and_(as_units(scale), set1_units(0x7fffffff)));
    const V inverse = where_less(zero(), magnitude, divide(set1(1.0f), scale), zero());
    for (int64_t u = 0; u < Four::SIZE / Four::PER_UNIT && u < count; ++u, to += WIDTH) {
      U unit = set1_units(0);
      for (const int i : NIBBLES) {
        const U steps = round_to_ints(steps_of(numbers[u * Four::PER_UNIT + i], inverse));
        unit = or_(shift_left<4>(unit), and_(add_ints(steps, set1_units(Four::ZERO)), set1_units(15)));
      }
      store_units(to, unit);
    }
  }
};

struct Quantizer {
  static int64_t scratch_bytes(const Weight& weight) {
    return weight.bits == 8 ? (weight.columns + 4 * LANES - 1) / (4 * LANES) * 4 * LANES * LANES : 0;
  }

  static void pack(const Rows& rows, char* buffer) {
    if (rows.weight.number_bytes == 4) panels_of<float>(rows, (uint8_t*)buffer);
    else panels_of<uint16_t>(rows, (uint8_t*)buffer);
  }

  template <class Number>
  static void panels_of(const Rows& rows, uint8_t* buffer) {
    for (int64_t p = rows.first; p < rows.last; ++p)
      for (int half = 0; half < WIDTH; half += LANES) {
        const Number* of_lanes[LANES];  // null for a missing row
        for (int j = 0; j < LANES; ++j) of_lanes[j] = (const Number*)rows.row(p, half + j);
        if (rows.weight.bits == 8) eight(rows.weight, of_lanes, p, half, buffer);
        else four(rows.weight, of_lanes, p, half);
      }
  }

  // Quantize LANES rows, then transpose them into panels.
  template <class Number>
  static void eight(const Weight& weight, const Number* const* rows, int64_t panel, int half, uint8_t* buffer) {
    const int64_t size = scratch_bytes(weight) / LANES, units = ceil_div(weight.columns, Eight::PER_UNIT);
    float* scales = (float*)weight.scales + panel * WIDTH + half;
    for (int j = 0; j < LANES; ++j) {
      if (!rows[j]) memset(buffer + j * size, Eight::ZERO, (size_t)size);
      scales[j] = rows[j] ? to_eight(rows[j], weight.columns, buffer + j * size) : 0.0f;
    }
    uint32_t* to = (uint32_t*)weight.panels + panel * units * WIDTH + half;
    for (int64_t u = 0; u < units; u += LANES) {
      U square[LANES];
      UNROLLED for (int j = 0; j < LANES; ++j) square[j] = load_units(buffer + j * size + 4 * u);
      transpose(square);
      for (int64_t k = 0; k < LANES && u + k < units; ++k) store_units(to + (u + k) * WIDTH, square[k]);
    }
  }

  template <class Number>
  static void four(const Weight& weight, const Number* const* rows, int64_t panel, int half) {
    const int64_t groups = ceil_div(weight.columns, Four::SIZE), units = ceil_div(weight.columns, Four::PER_UNIT);
    for (int64_t g = 0; g < groups; ++g) {
      const GroupOfFour group(rows, weight.columns, g * Four::SIZE);
      const V scale = group.search(weight.importance + g * Four::SIZE);
      write((uint16_t*)weight.scales + (panel * groups + g) * WIDTH + half, scale);
      const int64_t unit = g * Four::SIZE / Four::PER_UNIT;
      group.quantize(scale, units - unit, (uint32_t*)weight.panels + (panel * units + unit) * WIDTH + half);
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
