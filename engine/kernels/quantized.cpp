// y = x W^T for packed weights of 8 bits, see matmul.h. x is quantized to 8 bits first, see bytes.h.
//
// Weights are stored unsigned, offset by ZERO. A row of W has one scale.
//
// Order. A group's sum of products is an integer, exact in any order. The groups' sums are added as floats from the
// first to the last, each multiplied by its scale in one fused multiply-add. The weight's scale is applied last.
#include "bytes.h"
#include "packing.h"
#include "tiled.h"

namespace {

// -- weights of 8 bits ------------------------------------------------------------------------------------------------

struct Eight {
  static const int SIZE = 128;  // numbers of a group of x: with 64, what follows each group took a tenth of the time
  static const int PER_UNIT = 4;

  template <int M, int J>
  static inline __attribute__((always_inline)) void step(U (&sum)[M][J], const U (&w)[J], const char* x) {
    Way::step<M, J>(sum, w, x);
  }
  // A row of W has one scale, which multiplies its sum at the end. Until then the sums could overflow a float if x is
  // very large, so the scales of x are multiplied by DOWN.
  static constexpr float DOWN = 1.0f / (1 << 19);
  // The scales of the first or the second half of a panel's rows.
  static V scales(const Matrix& matrix, int64_t panel, int half) {
    return load((const float*)matrix.scales + panel * WIDTH + half * LANES);
  }
};

// -- the sums ---------------------------------------------------------------------------------------------------------

// Independent of the activations' type, so that it is compiled once for all types.
template <class Width>
struct Sums {
  static const int SIZE = Width::SIZE, UNITS = SIZE / Width::PER_UNIT, FOURS = SIZE / 4;
  static const int ROW_BYTES = 8 + FOURS * 4;  // of a row's group: initial sum, scale, numbers

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
      for (int64_t u = 0; u < count; ++u, w += WIDTH * 4, x += M * Width::PER_UNIT) {
        U weights[2 * P];
        UNROLLED for (int j = 0; j < 2 * P; ++j) weights[j] = load_units(w + j / 2 * size + j % 2 * LANES * 4);
        Width::template step<M, 2 * P>(sum, weights, x);
      }
      // Without this the compiler keeps copies of `out` on the stack and writes both, which doubles the time.
      __asm__ volatile("" ::: "memory");
      const float* scale = (const float*)xs + M;
      UNROLLED for (int j = 0; j < 2 * P; ++j) {
        UNROLLED for (int m = 0; m < M; ++m) {
          float* to = out[m][0] + j * LANES;
          store(to, fma(ints_to_floats(sum[m][j]), set1(scale[m]), load(to)));
        }
      }
    }
    for (int j = 0; j < 2 * P; ++j) {
      const V of_w = Width::scales(matrix, panel + j / 2, j % 2);
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
        ((int32_t*)to)[m] = bytes.scale > 0 ? -Way::OFFSET * bytes.sum : 0;
        ((float*)to)[rows + m] = bytes.scale * Width::DOWN;
        for (int f = 0; f < All::FOURS; ++f)
          memcpy(to + 4 * (2 * rows + f * rows + m), bytes.numbers + 4 * f, 4);
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
      initial[g * tall + m] = bytes.scale > 0 ? -ZERO * bytes.sum : 0;
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
      const V of_w = Eight::scales(matrix, panel, j);
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
    store_lowest_bytes(bytes + k, add_ints(round_to_ints(mul(read(row, columns, k), inverse)), set1_units(ZERO)));
  return scale;
}

struct Quantizer {
  static int64_t scratch_bytes(const Weight& weight) {
    return (weight.columns + 4 * LANES - 1) / (4 * LANES) * 4 * LANES * LANES;
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
        eight(rows.weight, of_lanes, p, half, buffer);
      }
  }

  // Quantize LANES rows, then transpose them into panels.
  template <class Number>
  static void eight(const Weight& weight, const Number* const* rows, int64_t panel, int half, uint8_t* buffer) {
    const int64_t size = scratch_bytes(weight) / LANES, units = ceil_div(weight.columns, Eight::PER_UNIT);
    float* scales = (float*)weight.scales + panel * WIDTH + half;
    for (int j = 0; j < LANES; ++j) {
      if (!rows[j]) memset(buffer + j * size, ZERO, (size_t)size);
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
};

template <class Number>
Number narrow(float x);
template <>
float narrow<float>(float x) { return x; }
template <>
uint16_t narrow<uint16_t>(float x) { return to_bf16(x); }

template <class Number>
void dequantize(const Matrix& matrix, int64_t id, Number* to) {
  const int64_t panel = id / WIDTH, units = ceil_div(matrix.columns, Eight::PER_UNIT);
  const uint32_t* from = (const uint32_t*)matrix.panels + panel * units * WIDTH + id % WIDTH;
  for (int64_t k = 0; k < matrix.columns; ++k) {
    const int step = (int)(from[k / 4 * WIDTH] >> 8 * (k % 4) & 0xff) - ZERO;
    to[k] = narrow<Number>((float)step * ((const float*)matrix.scales)[id]);
  }
}

}  // namespace

// Like `pack` in matmul.cpp, quantizing to 8 bits. The scales are [num_panels, WIDTH] floats.
EXPORT int32_t NAMED(quantize)(const Weight* weights, int64_t count, Progress* progress, int32_t threads) {
  Packing<Quantizer> packing = {weights, count, progress, nullptr, 0, 0};
  return packing.compute(threads);
}

// Dequantize rows of a weight into 4-byte or 2-byte numbers. Returns 0, or 1 + the index of the first invalid id.
EXPORT int64_t NAMED(dequantized)(const Matrix* matrix, int64_t number_bytes, const int64_t* ids, int64_t count,
                                  void* to) {
  const Timed timed(OTHER);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= matrix->outputs) return i + 1;
    if (number_bytes == 4) dequantize(*matrix, ids[i], (float*)to + i * matrix->columns);
    else dequantize(*matrix, ids[i], (uint16_t*)to + i * matrix->columns);
  }
  return 0;
}
