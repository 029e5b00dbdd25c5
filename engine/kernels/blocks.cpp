// y = x W^T for weights in the blocks of a GGUF file, see matmul.h. x is quantized to 8 bits first, see bytes.h.
//
// The numbers and scales of a file are kept as they are, and only rearranged.
//
// Panels. A group of a row is 32 numbers, or 16 if they have 6 bits. Its units hold the lowest four bits of eight
// numbers each, the first four numbers in the low nibbles. One more unit before them holds the upper bits of all its
// numbers: with 5 bits, number 4s + b has bit 8b + s; with 6 bits, it has the two bits from 8b + 2s on. Numbers of 8
// bits are bytes.
//
// Numbers of MXFP4 are stored as indices of E2M1, and looked up before they are multiplied.
//
// Scales. A panel has a record for each block, which is one group or several: for each row the scale and, if the
// format has them, the minimum, in float16. If several groups share a record, bytes follow for each group: for each row
// the factor of its scale, and that of its minimum. I4, I5 and I8 have one record for a row, whose scale and minimum are in
// bfloat16. Q4_Z has a byte in place of the minimum, which is the scale times that byte. MXFP4 has only a byte: its scale
// is a power of two, and the byte is the exponent of half of it.
//
// Activations. A number of x has one byte, or two: the second has 7 more bits, multiplied by the same weights after the
// sums have been shifted by 7 bits. That takes up to twice the time, and rounds x less than bfloat16 does.
//
// Order. A group's sum of products is an integer, exact in any order. The groups are added as floats from the first to
// the last: the sum multiplied by its scales in one fused multiply-add, then the sum of x multiplied by the minimum in
// another. Stored numbers are multiplied, and the weights' zero times the sum of x is subtracted from an integer sum; with
// AVX2 numbers of 8 bits are multiplied without their zero, see bytes.h.
#include "blocks.h"
#include "bytes.h"
#include "packing.h"
#include "matmul.h"

namespace {

const int SHORT_TILE = 6;  // rows of a tile of two vectors, whose sums fit in AVX-512's registers

// -- numbers of a group -----------------------------------------------------------------------------------------------

// Shift right, or left if N is negative.
template <int N>
inline __attribute__((always_inline)) U shifted(U u) {
  if constexpr (N >= 0) return shift_right<N>(u);
  else return shift_left<-N>(u);
}

// The layout of groups whose numbers have this number of bits.
template <int BITS, bool CODED = false>
struct Group {
  static const int SIZE = BITS == 6 ? 16 : 32;
  static const int UPPER = BITS == 5 || BITS == 6;  // units of upper bits
  static const int UNITS = SIZE / (BITS == 8 ? 4 : 8) + UPPER;

  // The upper bits of numbers 4S to 4S + 3, in bits 4 and 5 of each byte.
  template <int S>
  static inline __attribute__((always_inline)) U upper_bits(U u) {
    if constexpr (BITS == 5) return and_(shifted<S - 4>(u), set1_units(0x10101010));
    else return and_(shifted<2 * S - 4>(u), set1_units(0x30303030));
  }

  // Numbers 4S to 4S + 3 of LANES rows, whose group is at `w`.
  template <int S>
  static inline __attribute__((always_inline)) U numbers(const U& upper, const char* w) {
    U four = load_units(w + (UPPER + (BITS == 8 ? S : S / 2)) * WIDTH * 4);
    if constexpr (BITS < 8) four = and_(shifted<S % 2 * 4>(four), set1_units(0x0f0f0f0f));
    if constexpr (CODED) four = look_up_bytes(broadcast_16_bytes(E2M1), four);
    if constexpr (UPPER) four = or_(four, upper_bits<S>(upper));
    return four;
  }

  // Multiply numbers from 4S on by x, and add the products to the sums.
  template <int M, int J, int S = 0>
  static inline __attribute__((always_inline)) void multiply(U (&sum)[M][J], const U (&upper)[J], const char* w,
                                                             int64_t size, const char* x) {
    if constexpr (S < SIZE / 4) {
#if !defined(HAS_VNNI)
      if constexpr (BITS < 8) {
        const int STEPS = Narrow::steps(CODED ? 24 : (1 << BITS) - 1, SIZE / 4);  // E2M1's largest number is 24
        U products[M][J];
        narrow<M, J, S, S + STEPS>(products, true, upper, w, size, x);
        Narrow::add<M, J>(sum, products);
        multiply<M, J, S + STEPS>(sum, upper, w, size, x + STEPS * M * 4);
      } else
#endif
      {
        U four[J];
        UNROLLED for (int j = 0; j < J; ++j) four[j] = numbers<S>(upper[j], w + j / 2 * size + j % 2 * LANES * 4);
        Way::step<M, J>(sum, four, x);
        multiply<M, J, S + 1>(sum, upper, w, size, x + M * 4);
      }
    }
  }

#if !defined(HAS_VNNI)
  // The steps from S to END, whose products are added in 16 bits.
  template <int M, int J, int S, int END>
  static inline __attribute__((always_inline)) void narrow(U (&products)[M][J], bool first, const U (&upper)[J],
                                                           const char* w, int64_t size, const char* x) {
    if constexpr (S < END) {
      U four[J];
      UNROLLED for (int j = 0; j < J; ++j) four[j] = numbers<S>(upper[j], w + j / 2 * size + j % 2 * LANES * 4);
      Narrow::step<M, J>(products, first, four, x);
      narrow<M, J, S + 1, END>(products, false, upper, w, size, x + M * 4);
    }
  }
#endif
};

// -- scales -----------------------------------------------------------------------------------------------------------

// The scale and minimum of a block for LANES rows of a panel. Those of its groups are multiples if several groups share
// a record.
class Scales {
  const char* record = nullptr;  // the factors of the first group's scales
  bool has_factors = false;
  int kinds = 1;
  V scale, minimum;

  INLINE V multiple(V of, int64_t line) const { return mul(of, load_bytes((const int8_t*)record + line * WIDTH)); }

 public:
  // `groups`: of a row.
  static int64_t record_bytes(const Format& format, int64_t groups) {
    if (format.has_zeros || format.is_coded) return (format.is_coded ? 1 : 3) * WIDTH;
    return (format.groups == 1 ? 2 : 2 + groups_of_record(format, groups)) * WIDTH * (1 + format.has_minimum);
  }

  INLINE Scales() {}
  // `from`: the block's record; `row`: the first of the rows.
  INLINE Scales(const Format& format, const char* from, int row)
      : has_factors(format.groups != 1), kinds(1 + format.has_minimum), minimum(zero()) {
    if (format.is_coded) {  // in two factors, because a power below 2^-126 is not a normal number
      scale = mul(power_of_two(add(load_bytes((const int8_t*)from + row), set1(64.0f))), set1(0x1p-64f));
      return;
    }
    const uint16_t* halves = (const uint16_t*)from + row;
    record = from + 2 * WIDTH * kinds + row;
    if (!format.groups) {
      scale = load_bf16(halves);
      if (format.has_minimum) minimum = load_bf16(halves + WIDTH);
      return;
    }
    scale = load_f16(halves);
    if (format.has_zeros) minimum = mul(scale, load_bytes((const int8_t*)from + 2 * WIDTH + row));
    else if (format.has_minimum) minimum = load_f16(halves + WIDTH);
  }
  INLINE V scale_of(int64_t group) const { return has_factors ? multiple(scale, group * kinds) : scale; }
  INLINE V minimum_of(int64_t group) const { return has_factors ? multiple(minimum, group * kinds + 1) : minimum; }
};

// -- the sums ---------------------------------------------------------------------------------------------------------

// Independent of the activations' type, so that it is compiled once for all types. PLANES: bytes of an activation.
template <int BITS, bool CODED, int PLANES>
struct Sums {
  typedef Group<BITS, CODED> Layout;
  static const int FOURS = Layout::SIZE / 4;
  static const int BYTES = FOURS * 4;  // of a row's group
  // What is added to numbers of formats without minimums when they are multiplied.
  static const int OFFSET = CODED ? 12 : BITS == 8 ? Way::OFFSET : 1 << (BITS - 1);
  // Of a row's group: -OFFSET times the sum of its numbers, their scale, the sum times the scale, and the bytes.
  static const int ROW_BYTES = 12 + PLANES * BYTES;

  // How many of the vectors of some panels are multiplied at once. With more rows than SHORT_TILE one after the other,
  // so that registers can hold the running sums: to load and store them for each group took a tenth to a quarter of the
  // time. With 16 registers the group's sums of two vectors, which read x once, are faster than running sums in
  // registers; those of 8 bits need more registers without VNNI.
  static constexpr int at_once(int rows, int panels) {
#if !defined(HAS_VNNI)
    if (BITS == 8) return rows < 4 ? 2 * panels : 1;
#endif
#if defined(FEW_REGISTERS)
    (void)rows;
    return 2 * panels;
#else
    return rows <= SHORT_TILE ? 2 * panels : 1;
#endif
  }

  template <int M, int P>
  static __attribute__((noinline)) void compute(const Matrix& matrix, int64_t units, int64_t panel, const char* w,
                                                const char* xs, const char* ahead, int lines,
                                                float (&out)[M][P][WIDTH]) {
    constexpr int J = at_once(M, P);
    for (int first = 0; first < 2 * P * LANES; first += J * LANES, lines = 0)
      vectors<M, J>(matrix, units, panel, w + first * 4, first, xs, ahead, lines, out[0][0] + first, P * WIDTH);
  }

  // M rows by J vectors of panels, of which the first starts at the panel's row `first`. Writes M rows of sums, which
  // are `apart` numbers apart.
  template <int M, int J>
  static INLINE void vectors(const Matrix& matrix, int64_t units, int64_t panel, const char* w, int first,
                             const char* xs, const char* ahead, int lines, float* out, int apart) {
    // Running sums, sums of the group, weights and scales; otherwise the running sums are in the first-level cache.
    constexpr bool IN_REGISTERS = 2 * M * J + 3 * J + 1 <= (LANES == 16 ? 32 : 16);
    const Format& format = format_of(matrix.format);
    const bool has_minimum = format.has_minimum, from_zero = has_minimum || PLANES == 2;
    const int64_t size = units * WIDTH * 4, groups = groups_of_record(format, units / Layout::UNITS);
    const int64_t blocks = units / Layout::UNITS / groups, record_bytes = Scales::record_bytes(format, groups);
    const char* records = (const char*)matrix.scales + panel * blocks * record_bytes;
    V total[M][J];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < J; ++j) {
        total[m][j] = zero();
        if (!IN_REGISTERS) store(out + m * apart + j * LANES, zero());
      }
    // total += a * b
    const auto add_product = [&](int m, int j, V a, V b) __attribute__((always_inline)) {
      float* to = out + m * apart + j * LANES;
      if (IN_REGISTERS) total[m][j] = fma(a, b, total[m][j]);
      else store(to, fma(a, b, load(to)));
    };
    for (int64_t block = 0; block < blocks; ++block, records += record_bytes) {
      Scales scales[J];
      UNROLLED for (int j = 0; j < J; ++j)
        scales[j] = Scales(format, records + j / 2 * blocks * record_bytes, first + j % 2 * LANES);
      for (int64_t g = 0; g < groups; ++g, xs += M * ROW_BYTES, w += Layout::UNITS * WIDTH * 4) {
        for (int64_t l = 0; l < Layout::UNITS * lines; ++l, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        U sum[M][J], upper[J];
        if (from_zero) {
          UNROLLED for (int m = 0; m < M; ++m)
            UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = set1_units(0);
        } else {
          UNROLLED for (int m = 0; m < M; ++m)
            UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = set1_units(((const uint32_t*)xs)[m]);
        }
        UNROLLED for (int j = 0; j < J; ++j) upper[j] = load_units(w + j / 2 * size + j % 2 * LANES * 4);
        Layout::template multiply<M, J>(sum, upper, w, size, xs + 12 * M);
        if constexpr (PLANES == 2) {
          UNROLLED for (int m = 0; m < M; ++m) {
            const U offset = has_minimum ? set1_units(0) : set1_units(((const uint32_t*)xs)[m]);
            UNROLLED for (int j = 0; j < J; ++j) sum[m][j] = add_ints(shift_left<FINE_BITS>(sum[m][j]), offset);
          }
          Layout::template multiply<M, J>(sum, upper, w, size, xs + (12 + BYTES) * M);
        }
        // Without this the compiler keeps copies of `out` on the stack and writes both, which doubles the time.
        if (!IN_REGISTERS) __asm__ volatile("" ::: "memory");
        const float *scale = (const float*)xs + M, *scaled = scale + M;
        UNROLLED for (int j = 0; j < J; ++j) {
          const V of_w = scales[j].scale_of(g);
          UNROLLED for (int m = 0; m < M; ++m) add_product(m, j, ints_to_floats(sum[m][j]), mul(set1(scale[m]), of_w));
          if (!has_minimum) continue;
          const V minimum = scales[j].minimum_of(g);
          UNROLLED for (int m = 0; m < M; ++m) add_product(m, j, set1(scaled[m]), minimum);
        }
      }
    }
    if (!IN_REGISTERS) return;
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < J; ++j) store(out + m * apart + j * LANES, total[m][j]);
  }
};

template <class Number_, int BITS, int PLANES, bool CODED = false>
struct InBlocks : InPanels<InBlocks<Number_, BITS, PLANES, CODED>> {
  typedef Number_ Number;
  typedef Sums<BITS, CODED, PLANES> All;
  typedef Group<BITS> Layout;

#if defined(HAS_DOT)
  // Two vectors at once read x half as often as one, but unpack weights for half as many rows. AMD's processors, which use
  // this variant, are 3 to 10 % faster so (Zen 5). Intel's unpack in the units that multiply.
  static const int TALL = SHORT_TILE;
#elif defined(FEW_REGISTERS)
  // With more panels the running sums do not fit in the registers. One request was a seventh faster on an AMD EPYC (Zen 3).
  // Codes take longer to look up, and are faster with two.
  static constexpr int panels(int64_t rows) { return CODED && rows < 3 ? 2 : 1; }
  static const int64_t AHEAD = 4 << 10;
  // So the registers hold the group's sums of two vectors. The running sums are in the first-level cache.
  static const int TALL = BITS < 8 ? 5 : HEIGHT;
#endif

  static int64_t units(int64_t columns) { return ceil_div(columns, Layout::SIZE) * Layout::UNITS; }
  static int64_t row_bytes(int64_t units) { return units / Layout::UNITS * All::ROW_BYTES; }

  static void pack_x(const Number* x, int64_t columns, int64_t, int64_t rows, char* to) {
    for (int64_t k = 0; k < columns; k += Layout::SIZE, to += rows * All::ROW_BYTES)
      for (int64_t m = 0; m < rows; ++m) {
        Bytes<Layout::SIZE> bytes;
        bytes.quantize(x + m * columns + k, columns - k);
        put(bytes.numbers, rows, m, to + 12 * rows);
        if constexpr (PLANES == 2) {
          int8_t rest[Layout::SIZE];
          bytes.sum = bytes.sum * FINE + bytes.quantize_rest(x + m * columns + k, rest);
          bytes.scale /= FINE;
          put(rest, rows, m, to + (12 + All::BYTES) * rows);
        }
        const int32_t sum = bytes.scale > 0 ? bytes.sum : 0;
        ((int32_t*)to)[m] = -All::OFFSET * sum;
        ((float*)to)[rows + m] = bytes.scale;
        ((float*)to)[2 * rows + m] = bytes.scale * (float)sum;
      }
  }
  static void put(const int8_t* numbers, int64_t rows, int64_t m, char* to) {
    for (int f = 0; f < All::FOURS; ++f) memcpy(to + 4 * (f * rows + m), numbers + 4 * f, 4);
  }
  template <int M, int P>
  static inline __attribute__((always_inline)) void sums(const Matrix& matrix, int64_t units, int64_t panel, const char* w,
                                                         char*, const char* xs, const char* ahead, int lines,
                                                         float (&out)[M][P][WIDTH]) {
    All::template compute<M, P>(matrix, units, panel, w, xs, ahead, lines, out);
  }
};

template <class Kind>
int32_t multiply(const Matrix* matrix, const void* x, const void* residual, void* y, int64_t rows, int32_t threads) {
  typedef typename Kind::Number Number;
  Matmul<Kind> matmul = {matrix, (const Number*)x, (const Number*)residual, y, rows};
  return matmul.compute(threads);
}

}  // namespace

#define MATMUL_OF(name, Number, bits, coded)                                                                           \
  EXPORT int32_t NAMED(name)(const Matrix* matrix, const void* x, const void* residual, void* y, int64_t rows,         \
                             int32_t threads) {                                                                        \
    const Timed timed(MATMUL);                                                                                         \
    const auto compute = matrix->planes == 1 ? multiply<InBlocks<Number, bits, 1, coded>>                              \
                                             : multiply<InBlocks<Number, bits, 2, coded>>;                             \
    return compute(matrix, x, residual, y, rows, threads);                                                             \
  }

MATMUL_OF(matmul_blocks4_float32, float, 4, false)
MATMUL_OF(matmul_blocks4_bfloat16, uint16_t, 4, false)
MATMUL_OF(matmul_blocks5_float32, float, 5, false)
MATMUL_OF(matmul_blocks5_bfloat16, uint16_t, 5, false)
MATMUL_OF(matmul_blocks6_float32, float, 6, false)
MATMUL_OF(matmul_blocks6_bfloat16, uint16_t, 6, false)
MATMUL_OF(matmul_blocks8_float32, float, 8, false)
MATMUL_OF(matmul_blocks8_bfloat16, uint16_t, 8, false)
MATMUL_OF(matmul_codes_float32, float, 4, true)
MATMUL_OF(matmul_codes_bfloat16, uint16_t, 4, true)

// Multiply x by each part, into its columns of y. Residual and y have numbers of the same type.
EXPORT int32_t NAMED(matmul_joined)(const Joined* joined, const void* x, const void* residual, void* y, int64_t rows,
                                    int32_t threads) {
  int32_t failed = 0;
  for (int64_t i = 0; i < joined->count; ++i) {
    const int64_t offset = joined->offsets[i];
    const void* added = residual ? (const char*)residual + offset : nullptr;
    failed |= joined->parts[i].apply(x, added, (char*)y + offset, rows, threads);
  }
  return failed;
}

// -- repacking --------------------------------------------------------------------------------------------------------

namespace {

uint32_t unit_at(const uint8_t* bytes) {
  uint32_t unit;
  memcpy(&unit, bytes, 4);
  return unit;
}

// Write the units of a group of stored numbers, see the top of this file.
template <int BITS>
void units_of(const uint8_t* numbers, uint32_t* to) {
  typedef Group<BITS> Layout;
  if (BITS == 8) return (void)memcpy(to, numbers, Layout::SIZE);
  if (Layout::UPPER) {
    uint32_t upper = 0;
    for (int s = 0; s < Layout::SIZE / 4; ++s)
      upper |= BITS == 5 ? (unit_at(numbers + 4 * s) >> 4 & 0x01010101) << s
                         : (unit_at(numbers + 4 * s) >> 4 & 0x03030303) << 2 * s;
    *to++ = upper;
  }
  for (int k = 0; k < Layout::SIZE; k += 8)
    *to++ = (unit_at(numbers + k) & 0x0f0f0f0f) | (unit_at(numbers + k + 4) & 0x0f0f0f0f) << 4;
}

struct Repacker {
  static int64_t scratch_bytes(const Weight& weight) {
    return LANES * 4 * (weight.columns / 4 + LANES);  // at most a unit for four numbers
  }

  static void pack(const Rows& rows, char* buffer) {
    const Format& format = format_of(rows.weight.format);
    if (format.bits == 4) panels_of<4>(rows, format, (uint32_t*)buffer);
    else if (format.bits == 5) panels_of<5>(rows, format, (uint32_t*)buffer);
    else if (format.bits == 6) panels_of<6>(rows, format, (uint32_t*)buffer);
    else panels_of<8>(rows, format, (uint32_t*)buffer);
  }

  // Rearrange LANES rows, then transpose them into panels.
  template <int BITS>
  static void panels_of(const Rows& rows, const Format& format, uint32_t* buffer) {
    typedef Group<BITS> Layout;
    const Weight& weight = rows.weight;
    const int64_t apart = weight.columns / 4 + LANES, units = weight.columns / Layout::SIZE * Layout::UNITS;
    const int64_t blocks = weight.columns / Layout::SIZE / format.groups;
    const int64_t record = Scales::record_bytes(format, format.groups);
    for (int64_t p = rows.first; p < rows.last; ++p)
      for (int half = 0; half < WIDTH; half += LANES) {
        for (int j = 0; j < LANES; ++j) {
          const uint8_t* row = (const uint8_t*)rows.row(p, half + j);
          uint32_t* to = buffer + j * apart;
          char* scales = (char*)weight.scales + p * blocks * record;
          if (!row) memset(to, 0, (size_t)units * 4);
          for (int64_t b = 0; b < blocks; ++b, scales += record) {
            if (!row) {
              put_scales(format, nullptr, half + j, scales);
              continue;
            }
            const Block block(format, row + b * format.block_bytes);
            for (int g = 0; g < format.groups; ++g, to += Layout::UNITS)
              units_of<BITS>(block.numbers + g * Layout::SIZE, to);
            put_scales(format, &block, half + j, scales);
          }
        }
        uint32_t* to = (uint32_t*)weight.panels + p * units * WIDTH + half;
        for (int64_t u = 0; u < units; u += LANES) {
          U square[LANES];
          UNROLLED for (int j = 0; j < LANES; ++j) square[j] = load_units(buffer + j * apart + u);
          transpose(square);
          for (int64_t k = 0; k < LANES && u + k < units; ++k) store_units(to + (u + k) * WIDTH, square[k]);
        }
      }
  }

  // Write a row's scales to its block's record; without a block, zeros.
  static void put_scales(const Format& format, const Block* block, int row, char* record) {
    if (format.is_coded) return (void)(record[row] = (char)(block ? block->byte ^ 0x80 : 0));
    uint16_t* halves = (uint16_t*)record + row;
    const int kinds = 1 + format.has_minimum;
    halves[0] = block ? block->scale : 0;
    if (format.has_zeros) return (void)(record[2 * WIDTH + row] = (char)(block ? block->byte : 0));
    if (format.has_minimum) halves[WIDTH] = block ? block->minimum : 0;
    if (format.groups == 1) return;
    uint8_t* factors = (uint8_t*)record + 2 * WIDTH * kinds + row;
    for (int g = 0; g < format.groups; ++g, factors += kinds * WIDTH) {
      factors[0] = block ? block->factors[g] : 0;
      if (format.has_minimum) factors[WIDTH] = block ? block->minimums[g] : 0;
    }
  }
};

void put_number(float* to, float x) { *to = x; }
void put_number(uint16_t* to, float x) { *to = to_bf16(x); }

template <int BITS, class Number>
void dequantize(const Matrix& matrix, const Format& format, int64_t id, Number* to) {
  typedef Group<BITS> Layout;
  const int64_t panel = id / WIDTH, groups = ceil_div(matrix.columns, Layout::SIZE), units = groups * Layout::UNITS;
  const uint32_t* from = (const uint32_t*)matrix.panels + panel * units * WIDTH + id % WIDTH;
  const int64_t of_record = groups_of_record(format, groups), record_bytes = Scales::record_bytes(format, groups);
  const char* records = (const char*)matrix.scales + panel * (groups / of_record) * record_bytes;
  const int first = (int)(id % WIDTH) / LANES * LANES;
  for (int64_t g = 0; g < groups; ++g, from += Layout::UNITS * WIDTH, to += Layout::SIZE) {
    const Scales scales(format, records + g / of_record * record_bytes, first);
    const int64_t group = g % of_record, left = matrix.columns - g * Layout::SIZE;
    float of_rows[2][LANES] = {};
    store(of_rows[0], scales.scale_of(group));
    if (format.has_minimum) store(of_rows[1], scales.minimum_of(group));
    for (int k = 0; k < Layout::SIZE && k < left; ++k) {
      const int byte = 8 * (k % 4), four = k / 4;
      int stored;
      if (BITS == 8) stored = (int)(from[four * WIDTH] >> byte & 255);
      else stored = (int)(from[(Layout::UPPER + k / 8) * WIDTH] >> (byte + four % 2 * 4) & 15);
      if (format.is_coded) stored = E2M1[stored];
      if (BITS == 5) stored |= (int)(from[0] >> (byte + four) & 1) << 4;
      if (BITS == 6) stored |= (int)(from[0] >> (byte + 2 * four) & 3) << 4;
      put_number(to + k, of_rows[0][id % LANES] * (float)(stored - format.zero) + of_rows[1][id % LANES]);
    }
  }
}

template <class Number>
void dequantize(const Matrix& matrix, int64_t id, Number* to) {
  const Format& format = format_of(matrix.format);
  if (format.bits == 4) dequantize<4>(matrix, format, id, to);
  else if (format.bits == 5) dequantize<5>(matrix, format, id, to);
  else if (format.bits == 6) dequantize<6>(matrix, format, id, to);
  else dequantize<8>(matrix, format, id, to);
}

}  // namespace

// Like `pack` in matmul.cpp, for rows in the blocks of `format`.
EXPORT int32_t NAMED(repack)(const Weight* weights, int64_t count, Progress* progress, int32_t threads) {
  Packing<Repacker> packing = {weights, count, progress, nullptr, 0, 0};
  return packing.compute(threads);
}

// The size of the scales of a panel, in bytes.
EXPORT int64_t NAMED(scales_bytes)(int32_t type, int64_t columns) {
  const Format& format = format_of(type);
  const int64_t groups = ceil_div(columns, format.bits == 6 ? 16 : 32);
  return groups / groups_of_record(format, groups) * Scales::record_bytes(format, groups);
}

// Like `dequantized` in quantized.cpp.
EXPORT int64_t NAMED(dequantized_blocks)(const Matrix* matrix, int64_t number_bytes, const int64_t* ids, int64_t count,
                                         void* to) {
  const Timed timed(OTHER);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= matrix->outputs) return i + 1;
    if (number_bytes == 4) dequantize(*matrix, ids[i], (float*)to + i * matrix->columns);
    else dequantize(*matrix, ids[i], (uint16_t*)to + i * matrix->columns);
  }
  return 0;
}
