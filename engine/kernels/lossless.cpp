// y = x W^T for weights in bfloat16 that are compressed without loss to 12 bits per number, see matmul.h.
//
// Of a number's 16 bits, the sign and the mantissa are kept, and the exponent is replaced by a code of 4 bits: few
// exponents are common in a panel (with normally distributed numbers the 16 most common ones leave out about 1 of
// 50,000). Numbers with other exponents are exceptions, kept in a list. DFloat11 (arXiv 2504.11651) and ZipNN
// (arXiv 2411.05239) compress exponents further, with entropy codes, which take longer to decode.
//
// Panels. A unit of a panel, two vectors in matmul.h, has one vector of signs and mantissas here, a byte for each number.
// Before those of two units is one vector of codes: of the first unit in the low nibbles of its bytes, and of the second
// in the high nibbles. In each 16 bytes, the first eight belong to the first vector of the unit and the others to the
// second, so that interleaving bytes restores both.
//
// Results. Numbers are restored before they are multiplied, so the bits of y are those of plain weights.
#include "packing.h"
#include "tiled.h"

namespace {

const int VECTOR = LANES * 4;         // bytes
const int NUMBERS = 2 * WIDTH;        // in a unit of a panel
const int NUM_CODES = 16;
const int64_t STEP = 8;               // units that are expanded at once, into the first-level cache
const int64_t AHEAD_BYTES = 6 << 10;  // to prefetch ahead: one row was a tenth faster with it on AMD's Zen 4
const int64_t PER_EXCEPTION = 512;  // numbers of a panel for which there is room for one exception

struct Exception {
  uint32_t position;  // in the expanded panel
  uint32_t number;
};

// What a panel has beside its numbers; in `scales` of the matrix, for each panel.
struct Codes {
  uint8_t exponents[NUM_CODES];
  int64_t count;           // of the exceptions; more than there is room for if the panel could not be compressed
  Exception exceptions[];  // in the order of their positions

  static int64_t room(int64_t units) { return units * NUMBERS / PER_EXCEPTION + 4; }
  static int64_t size(int64_t units) { return (int64_t)sizeof(Codes) + room(units) * (int64_t)sizeof(Exception); }
  static Codes* of(const void* scales, int64_t panel, int64_t units) {
    return (Codes*)((char*)scales + panel * size(units));
  }
};

int64_t compressed_bytes(int64_t units) { return (units + 1) / 2 * 3 * VECTOR; }

// -- expanding --------------------------------------------------------------------------------------------------------

// Expands a panel from its first unit to its last.
struct Expander {
  U upper_bits, lower_bits;  // of each exponent: the upper seven, and the lowest in a byte's highest bit
  const Exception *next, *last;

  inline __attribute__((always_inline)) void begin(const Matrix& matrix, int64_t panel, int64_t units) {
    const Codes* codes = Codes::of(matrix.scales, panel, units);
    const U exponents = broadcast_16_bytes(codes->exponents);
    upper_bits = and_(shift_right<1>(exponents), set1_units(0x7f7f7f7f));
    lower_bits = and_(shift_left<7>(exponents), set1_units(0x80808080));
    next = codes->exceptions, last = next + codes->count;
  }

  inline __attribute__((always_inline)) void unit(U codes, U rest, char* to) const {
    const U high = or_masked(look_up_bytes(upper_bits, codes), rest, set1_units(0x80808080));
    const U low = or_masked(look_up_bytes(lower_bits, codes), rest, set1_units(0x7f7f7f7f));
    store_units(to, zip_first_bytes(low, high));
    store_units(to + VECTOR, zip_last_bytes(low, high));
  }

  // Write units [from, to) to `out`; if that is an odd number, one unit more. `w`: the panel; `fetches`: nothing else
  // prefetches it.
  inline __attribute__((always_inline)) void expand(const char* w, int64_t from, int64_t to, char* out, bool fetches) {
    w += from / 2 * 3 * VECTOR;
    for (int64_t u = from; u < to; u += 2, w += 3 * VECTOR) {
      if (fetches)
        for (int b = 0; b < 3 * VECTOR; b += 64) __builtin_prefetch(w + AHEAD_BYTES + b, 0, 2);
      const U codes = load_units(w);
      unit(and_(codes, set1_units(0x0f0f0f0f)), load_units(w + VECTOR), out + (u - from) * WIDTH * 4);
      unit(and_(shift_right<4>(codes), set1_units(0x0f0f0f0f)), load_units(w + 2 * VECTOR),
           out + (u + 1 - from) * WIDTH * 4);
    }
    for (; next < last && next->position < to * NUMBERS; ++next)
      memcpy(out + (next->position - from * NUMBERS) * 2, &next->number, 2);
  }
};

template <class Unit>
struct Lossless : Chain<Unit> {
  typedef Chain<Unit> Expanded;
  static const bool EXPANDS = true;
  static int64_t panel_bytes(int64_t units) { return compressed_bytes(units); }
#if defined(ISA_AVX2)
  // More would not fit in the registers: two rows took 1.5 times as long.
  static constexpr int panels(int64_t rows) { return rows == 1 ? 2 : 1; }
#endif

  template <int M, int P>
  static inline __attribute__((always_inline)) void sums(const Matrix& matrix, int64_t units, int64_t panel, const char* w,
                                                         char* expanded, const char* xs, const char* ahead, int lines,
                                                         float (&out)[M][P][WIDTH]) {
    constexpr bool FETCHES = M < 4;  // with more rows `ahead` is prefetched; to do both cost 16 rows 3 % of the time
    alignas(64) char numbers[P][STEP * WIDTH * 4];
    Expander expanders[P];
    for (int p = 0; p < P; ++p) expanders[p].begin(matrix, panel + p, units);
    V sum[M][2 * P];
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) sum[m][j] = zero();
    for (int64_t start = 0; start < units; start += STEP) {
      const int64_t end = min(start + STEP, units);
      for (int l = 0; l < STEP * lines; ++l, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      char* unit = expanded ? expanded + start * WIDTH * 4 : numbers[0];
      for (int p = 0; p < P; ++p)
        expanders[p].expand(w + p * compressed_bytes(units), start, end, unit + p * sizeof numbers[0], FETCHES);
      for (int64_t u = start; u < end; ++u, unit += WIDTH * 4, xs += M * Unit::X_BYTES)
        Unit::template step<M, P>(sum, xs, unit, sizeof numbers[0]);
    }
    UNROLLED for (int m = 0; m < M; ++m)
      UNROLLED for (int j = 0; j < 2 * P; ++j) store(out[m][0] + j * LANES, sum[m][j]);
  }
};

#if defined(HAS_TILES)
// Returns the units of a panel's steps in their order, each expanded into the first-level cache or into `expanded`.
struct ExpandedSteps {
  const char* w;
  char* expanded;  // or null
  Expander expander;
  Steps step;

  ExpandedSteps(const Matrix& matrix, int64_t units, int64_t panel, const char* w, char* expanded)
      : w(w), expanded(expanded), step(w, units) {
    expander.begin(matrix, panel, units);
  }
  const char* operator()(int64_t s) {
    const int64_t start = s * STEP_UNITS, end = min(start + STEP_UNITS, step.units);
    char* to = expanded ? expanded + s * STEP_BYTES : step.padded;
    expander.expand(w, start, end, to, true);
    return end - start == STEP_UNITS ? to : step.pad(to, end - start);
  }
};

struct TiledLossless : Tiled<> {
  typedef Tiled<> Expanded;
  static const bool EXPANDS = true;
  static int64_t panel_bytes(int64_t units) { return compressed_bytes(units); }
  static void sums(const Matrix& matrix, int64_t units, int64_t panel, const char* w, char* expanded, const char* xs,
                   int64_t tall, Fetch& fetch, float (&out)[2 * TILE_ROWS][WIDTH]) {
    ExpandedSteps weights(matrix, units, panel, w, expanded);
    multiply_rows<Tiles, false>(weights, 0, steps(units), xs, tall, fetch, out);
  }
};
typedef TiledLossless LosslessHalves;
#else
typedef Lossless<Halves> LosslessHalves;
#endif

}  // namespace

EXPORT int32_t NAMED(matmul_lossless)(const Matrix* matrix, const uint16_t* x, const uint16_t* residual, void* y,
                                      int64_t rows, int32_t threads) {
  const Timed timed(MATMUL);
  Matmul<LosslessHalves> matmul = {matrix, x, residual, y, rows};
  return matmul.compute(threads);
}

// -- compressing ------------------------------------------------------------------------------------------------------

namespace {

int exponent_of(uint16_t number) { return number >> 7 & 0xff; }

struct Compressor {
  static int64_t scratch_bytes(const Weight& weight) { return ((weight.columns + 1) / 2 + 1) * WIDTH * 4; }

  static void pack(const Rows& rows, char* buffer) {
    const Weight& weight = rows.weight;
    const int64_t units = (weight.columns + 1) / 2;
    for (int64_t p = rows.first; p < rows.last; ++p) {
      pack_panel(rows, p, buffer);
      memset(buffer + units * WIDTH * 4, 0, WIDTH * 4);  // the second unit of the last pair, if there is none
      compress((const uint16_t*)buffer, units, *Codes::of(weight.scales, p, units),
               (char*)weight.panels + p * compressed_bytes(units));
    }
  }

  static void compress(const uint16_t* numbers, int64_t units, Codes& codes, char* to) {
    choose(numbers, units * NUMBERS, codes.exponents);
    U exponents[NUM_CODES];
    for (int c = 0; c < NUM_CODES; ++c) exponents[c] = set1_units(codes.exponents[c] * 0x01010101u);
    codes.count = 0;
    for (int64_t u = 0; u < units; u += 2, to += 3 * VECTOR) {
      const U first = unit(numbers, u, exponents, codes, units, to + VECTOR);
      const U second = unit(numbers, u + 1, exponents, codes, units, to + 2 * VECTOR);
      store_units(to, or_(first, shift_left<4>(second)));
    }
  }

  // Store the signs and mantissas of a unit, add its exceptions, and return its codes.
  static U unit(const uint16_t* numbers, int64_t u, const U (&exponents)[NUM_CODES], Codes& codes, int64_t units, char* to) {
    const U a = load_units(numbers + u * NUMBERS), b = load_units(numbers + u * NUMBERS + WIDTH);
    store_units(to, saturate_to_bytes(rest(a), rest(b)));
    const U own = saturate_to_bytes(exponent(a), exponent(b));
    U code = set1_units(0), found = set1_units(0);
    UNROLLED for (int c = 0; c < NUM_CODES; ++c) {
      code = or_(code, bytes_where_equal(own, exponents[c], set1_units(c * 0x01010101u)));
      found = or_(found, bytes_where_equal(own, exponents[c], set1_units(0xffffffff)));
    }
    uint8_t known[VECTOR];
    store_units(known, found);
    if (u < units && memchr(known, 0, VECTOR)) add_exceptions(numbers, u, codes, units);
    return code;
  }
  static U rest(U numbers) {
    return or_(and_(shift_right<8>(numbers), set1_units(0x00800080)), and_(numbers, set1_units(0x007f007f)));
  }
  static U exponent(U numbers) { return and_(shift_right<7>(numbers), set1_units(0x00ff00ff)); }

  static void add_exceptions(const uint16_t* numbers, int64_t u, Codes& codes, int64_t units) {
    for (int64_t i = u * NUMBERS; i < (u + 1) * NUMBERS; ++i) {
      if (memchr(codes.exponents, exponent_of(numbers[i]), NUM_CODES)) continue;
      if (codes.count < Codes::room(units)) codes.exceptions[codes.count] = {(uint32_t)i, numbers[i]};
      ++codes.count;
    }
  }

  // Choose the most common exponents of a panel.
  static void choose(const uint16_t* numbers, int64_t count, uint8_t* exponents) {
    uint32_t counts[4][256] = {};  // several, so that equal exponents in a row do not wait for each other
    for (int64_t i = 0; i < count; i += 4)
      UNROLLED for (int j = 0; j < 4; ++j) ++counts[j][exponent_of(numbers[i + j])];
    for (int e = 0; e < 256; ++e) counts[0][e] += counts[1][e] + counts[2][e] + counts[3][e];
    for (int c = 0; c < NUM_CODES; ++c) {
      int best = 0;
      for (int e = 1; e < 256; ++e)
        if (counts[0][e] > counts[0][best]) best = e;
      exponents[c] = (uint8_t)best, counts[0][best] = 0;
    }
  }
};

// Number k of row `id`, but for exceptions.
uint16_t number_at(const Codes& codes, const char* panel, int64_t j, int64_t k) {

  const int64_t u = k / 2, place = 2 * (j % LANES) + k % 2;
  const uint8_t* pair = (const uint8_t*)panel + u / 2 * 3 * VECTOR;
  const int64_t byte = place / 8 * 16 + j / LANES * 8 + place % 8;
  const uint32_t rest = pair[(1 + u % 2) * VECTOR + byte], exponent = codes.exponents[pair[byte] >> u % 2 * 4 & 15];
  return (uint16_t)((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}

}  // namespace

// The size of a panel and of its codes, in bytes.
EXPORT int64_t NAMED(lossless_panel_bytes)(int64_t columns) { return compressed_bytes((columns + 1) / 2); }
EXPORT int64_t NAMED(lossless_codes_bytes)(int64_t columns) { return Codes::size((columns + 1) / 2); }

// The number of panels that have too many exceptions to be compressed; the weight then cannot be used.
EXPORT int64_t NAMED(lossless_failures)(const Matrix* matrix) {
  const int64_t units = (matrix->columns + 1) / 2;
  int64_t failures = 0;
  for (int64_t p = 0; p < matrix->num_panels; ++p)
    failures += Codes::of(matrix->scales, p, units)->count > Codes::room(units);
  return failures;
}

// Like `pack` in matmul.cpp, for weights in bfloat16.
EXPORT int32_t NAMED(compress)(const Weight* weights, int64_t count, Progress* progress, int32_t threads) {
  Packing<Compressor> packing = {weights, count, progress, nullptr, 0, 0};
  return packing.compute(threads);
}

// Like `lookup` in matmul.cpp.
EXPORT int64_t NAMED(lossless_lookup)(const Matrix* matrix, const int64_t* ids, int64_t count, uint16_t* to) {
  const Timed timed(OTHER);
  const int64_t columns = matrix->columns, units = (columns + 1) / 2;
  for (int64_t i = 0; i < count; ++i, to += columns) {
    if (ids[i] < 0 || ids[i] >= matrix->outputs) return i + 1;
    const int64_t panel = ids[i] / WIDTH, j = ids[i] % WIDTH;
    const char* w = (const char*)matrix->panels + panel * compressed_bytes(units);
    const Codes& codes = *Codes::of(matrix->scales, panel, units);
    for (int64_t k = 0; k < columns; ++k) to[k] = number_at(codes, w, j, k);
    for (const Exception* e = codes.exceptions; e < codes.exceptions + codes.count; ++e)
      if (e->position % NUMBERS / 2 == j)
        to[e->position / NUMBERS * 2 + e->position % 2] = (uint16_t)e->number;
  }
  return 0;
}
