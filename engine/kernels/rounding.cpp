// Packs a plain weight in the blocks of I4, I5 or I8, see blocks.h: numbers of 4, 5 or 8 bits, and for each group of 32 a
// scale, and a minimum if they have fewer than 8 bits.
//
// With 8 bits the largest number of a group becomes its largest stored one. With fewer, packing searches both: from
// several first scales it takes turns. The numbers are rounded, and then the scale and the minimum become those with the
// smallest sum of squared errors, each multiplied by the importance of its column. The best pair of a group is then
// expressed in bytes, as multiples of a scale and a minimum of the row, the minimum is chosen once more for the scale
// that was rounded, and so are the numbers.
#include "blocks.h"
#include "packing.h"

namespace {

const int GROUP = 32;
const int MOST = 127;                // of the bytes that multiply a row's scale and minimum
const float SMALLEST = 7.8886e-31f;  // 2^-100: a group of smaller numbers counts as zeros
// The first scales, relative to that which spans a group's numbers. With three turns from each the sum of squared errors
// of trained weights is 28 % smaller than that of the best of eight scales without a minimum, which need as many bits.
const int TRIED = 4, TURNS = 3;
const float SPANS[TRIED] = {1.06f, 1.02f, 0.98f, 0.94f};

// A group of LANES rows, one row in each lane: every lane is computed alike, so the result does not depend on LANES.
template <int BITS>
struct GroupOfRows {
  static constexpr float TOP = (1 << BITS) - 1;
  V numbers[GROUP];

  // From `start` on; a null row counts as zeros.
  template <class Number>
  GroupOfRows(const Number* const* rows, int64_t columns, int64_t start) {
    for (int i = 0; i < GROUP; i += LANES) {
      U square[LANES];
      UNROLLED for (int j = 0; j < LANES; ++j) {
        const int64_t k = start + i;
        square[j] = as_units(rows[j] && k < columns ? get(rows[j] + k, columns - k) : zero());
      }
      transpose(square);
      UNROLLED for (int j = 0; j < LANES; ++j) numbers[i + j] = as_floats(square[j]);
    }
  }

  static INLINE V inverse_of(V scale) { return where_less(zero(), scale, divide(set1(1.0f), scale), zero()); }
  static INLINE V stored(V number, V inverse, V offset) {
    return max(zero(), min(set1(TOP), round(fma(number, inverse, offset))));
  }
  static INLINE V negative(V v) { return mul(v, set1(-1.0f)); }

  // The largest magnitude, as integers, where NaN is larger than infinity.
  U largest() const {
    U bits = set1_units(0);
    for (int k = 0; k < GROUP; ++k) bits = max_ints(bits, and_(as_units(numbers[k]), set1_units(0x7fffffff)));
    return bits;
  }

  // The scale and the minimum. Both are NaN if a number is not finite.
  void search(const float* importance, V& scale, V& minimum) const {
    V low = numbers[0], high = numbers[0], sum_w = zero(), sum_x = zero(), sum_xx = zero();
    for (int k = 0; k < GROUP; ++k) {
      const V x = numbers[k], w = set1(importance[k]), wx = mul(w, x);
      low = min(low, x), high = max(high, x);
      sum_w = add(sum_w, w), sum_x = add(sum_x, wx), sum_xx = fma(wx, x, sum_xx);
    }
    const V half_low = mul(low, set1(0.5f)), half_high = mul(high, set1(0.5f));  // the difference could overflow
    const V middle = add(half_low, half_high), half = sub(half_high, half_low);
    scale = mul(half, set1(2 / TOP)), minimum = low;
    V least = set1(bits_to_float(0x7f800000)), scales[TRIED], minimums[TRIED];
    UNROLLED for (int c = 0; c < TRIED; ++c) {
      scales[c] = mul(half, set1(2 * SPANS[c] / TOP));
      minimums[c] = fma(half, set1(-SPANS[c]), middle);
    }
    for (int turn = 0; turn < TURNS; ++turn) {
      V inverses[TRIED], offsets[TRIED], sum_q[TRIED], sum_qq[TRIED], sum_qx[TRIED];
      UNROLLED for (int c = 0; c < TRIED; ++c) {
        inverses[c] = inverse_of(scales[c]), offsets[c] = mul(negative(minimums[c]), inverses[c]);
        sum_q[c] = sum_qq[c] = sum_qx[c] = zero();
      }
      for (int k = 0; k < GROUP; ++k) {
        const V x = numbers[k], w = set1(importance[k]);
        UNROLLED for (int c = 0; c < TRIED; ++c) {
          const V q = stored(x, inverses[c], offsets[c]), wq = mul(w, q);
          sum_q[c] = add(sum_q[c], wq), sum_qq[c] = fma(wq, q, sum_qq[c]), sum_qx[c] = fma(wq, x, sum_qx[c]);
        }
      }
      UNROLLED for (int c = 0; c < TRIED; ++c) {
        const V determinant = fma(sum_w, sum_qq[c], negative(mul(sum_q[c], sum_q[c])));
        const V covariance = fma(sum_w, sum_qx[c], negative(mul(sum_q[c], sum_x)));
        const V slope = divide(covariance, determinant), start = divide(fma(negative(slope), sum_q[c], sum_x), sum_w);
        V error = fma(negative(slope), sum_qx[c], fma(negative(start), sum_x, sum_xx));
        error = where_less(zero(), determinant, error, set1(bits_to_float(0x7f800000)));  // all numbers are alike
        scales[c] = where_less(zero(), determinant, slope, scales[c]);
        minimums[c] = where_less(zero(), determinant, start, minimums[c]);
        scale = where_less(error, least, slope, scale), minimum = where_less(error, least, start, minimum);
        least = where_less(error, least, error, least);
      }
    }
    const V size = as_floats(largest()), nan = set1(bits_to_float(0x7fc00000));
    scale = where_less(size, set1(SMALLEST), zero(), scale);
    minimum = where_less(size, set1(SMALLEST), zero(), minimum);
    const V finite = sub(size, size);  // infinity - infinity is NaN
    scale = where_not_nan(finite, scale, nan), minimum = where_not_nan(finite, minimum, nan);
  }

  // The multiple of `unit`, the row's minimum, that is best with this scale and these numbers' rounding.
  V factor_of_minimum(const float* importance, V scale, V minimum, V unit) const {
    const V inverse = inverse_of(scale), offset = mul(negative(minimum), inverse);
    V rest = zero(), sum_w = zero();
    for (int k = 0; k < GROUP; ++k) {
      const V w = set1(importance[k]), q = stored(numbers[k], inverse, offset);
      rest = fma(w, fma(negative(scale), q, numbers[k]), rest), sum_w = add(sum_w, w);
    }
    return factor(where_less(zero(), sum_w, divide(rest, sum_w), minimum), unit, -MOST);
  }
  // number / unit as a byte.
  static V factor(V number, V unit, int smallest) {
    const V factor = round(mul(number, inverse_of(unit)));
    return max(set1((float)smallest), min(set1((float)MOST), factor));
  }

  // Write the units of the group's stored numbers, see blocks.cpp: vectors that are WIDTH units apart.
  void write_units(V scale, V minimum, uint32_t* to) const {
    const V inverse = inverse_of(scale), offset = mul(negative(minimum), inverse);
    U upper = set1_units(0), fours[GROUP / 4];
    for (int s = GROUP / 4 - 1; s >= 0; --s) {
      U four = set1_units(0);
      for (int i = 3; i >= 0; --i) {
        const U number = round_to_ints(stored(numbers[4 * s + i], inverse, offset));
        four = or_(shift_left<8>(four), and_(number, set1_units(31)));
      }
      upper = or_(shift_left<1>(upper), and_(shift_right<4>(four), set1_units(0x01010101)));
      fours[s] = and_(four, set1_units(0x0f0f0f0f));
    }
    if (BITS == 5) store_units(to, upper), to += WIDTH;
    for (int u = 0; u < GROUP / 8; ++u) store_units(to + u * WIDTH, or_(fours[2 * u], shift_left<4>(fours[2 * u + 1])));
  }

  // Write the group's numbers of 8 bits, multiples of `scale`, like write_units.
  void write_bytes(V scale, uint32_t* to) const {
    const V inverse = inverse_of(scale);
    for (int s = 0; s < GROUP / 4; ++s) {
      U four = set1_units(0);
      for (int i = 3; i >= 0; --i) {
        const V steps = max(set1(-MOST), min(set1(MOST), round(mul(numbers[4 * s + i], inverse))));
        four = or_(shift_left<8>(four), add_ints(round_to_ints(steps), set1_units(128)));
      }
      store_units(to + s * WIDTH, four);
    }
  }
};

struct Rounder {
  // The scale and the minimum of each group of LANES rows.
  static int64_t scratch_bytes(const Weight& weight) { return ceil_div(weight.columns, GROUP) * 2 * LANES * 4; }

  static void pack(const Rows& rows, char* buffer) {
    if (rows.weight.number_bytes == 4) panels_of<float>(rows, (float*)buffer);
    else panels_of<uint16_t>(rows, (float*)buffer);
  }

  template <class Number>
  static void panels_of(const Rows& rows, float* found) {
    for (int64_t p = rows.first; p < rows.last; ++p)
      for (int half = 0; half < WIDTH; half += LANES) {
        const Number* of_lanes[LANES];  // null for a missing row
        for (int j = 0; j < LANES; ++j) of_lanes[j] = (const Number*)rows.row(p, half + j);
        if (rows.weight.bits == 8) round_to_8(rows.weight, of_lanes, p, half);
        else if (rows.weight.bits == 4) round_rows<4>(rows.weight, of_lanes, p, half, found);
        else round_rows<5>(rows.weight, of_lanes, p, half, found);
      }
  }

  // A row's scale is that of its largest number divided by MOST, and a factor is rounded up, so that no number is cut off.
  template <class Number>
  static void round_to_8(const Weight& weight, const Number* const* rows, int64_t panel, int half) {
    typedef GroupOfRows<8> Group;
    const int64_t groups = ceil_div(weight.columns, GROUP), group_units = GROUP / 4;
    U bits = set1_units(0);
    for (int64_t g = 0; g < groups; ++g) bits = max_ints(bits, Group(rows, weight.columns, g * GROUP).largest());
    const V top = as_floats(bits), finite = sub(top, top);  // infinity - infinity is NaN
    const V one = divide(divide(top, set1(MOST)), set1(MOST));
    const V scale = where_not_nan(finite, where_less(top, set1(SMALLEST), zero(), one), finite);
    const U rounded = to_bf16_units(scale);
    uint16_t* of_row = (uint16_t*)((char*)weight.scales + panel * (2 + groups) * WIDTH) + half;
    store_halves(of_row, rounded);
    const V unit = as_floats(shift_left<16>(rounded));
    int8_t* factors = (int8_t*)(of_row - half + WIDTH) + half;
    uint32_t* to = (uint32_t*)weight.panels + panel * groups * group_units * WIDTH + half;
    for (int64_t g = 0; g < groups; ++g, factors += WIDTH, to += group_units * WIDTH) {
      const Group group(rows, weight.columns, g * GROUP);
      const V exact = mul(divide(as_floats(group.largest()), set1(MOST)), Group::inverse_of(unit)), near = round(exact);
      const V up = add(near, where_less(near, exact, set1(1.0f), zero()));
      const V factor = max(set1(1.0f), min(set1(MOST), up));
      store_bytes(factors, factor);
      group.write_bytes(mul(factor, unit), to);
    }
  }

  template <int BITS, class Number>
  static void round_rows(const Weight& weight, const Number* const* rows, int64_t panel, int half, float* found) {
    typedef GroupOfRows<BITS> Group;
    const int64_t groups = ceil_div(weight.columns, GROUP), group_units = BITS;
    V largest[2] = {zero(), zero()};
    for (int64_t g = 0; g < groups; ++g) {
      V pair[2];
      Group(rows, weight.columns, g * GROUP).search(weight.importance + g * GROUP, pair[0], pair[1]);
      for (int i = 0; i < 2; ++i) {
        store(found + (2 * g + i) * LANES, pair[i]);
        const V size = as_floats(and_(as_units(pair[i]), set1_units(0x7fffffff)));
        largest[i] = where_not_nan(size, where_not_nan(largest[i], max(size, largest[i]), largest[i]), size);
      }
    }
    // Of a panel: the scales of its rows and their minimums, and the same of bytes for each group, see blocks.cpp.
    uint16_t* of_row = (uint16_t*)((char*)weight.scales + panel * (2 + groups) * 2 * WIDTH) + half;
    V units[2];
    for (int i = 0; i < 2; ++i) {
      const U rounded = to_bf16_units(divide(largest[i], set1((float)MOST)));
      store_halves(of_row + i * WIDTH, rounded);
      units[i] = as_floats(shift_left<16>(rounded));
    }
    int8_t* factors = (int8_t*)(of_row - half + 2 * WIDTH) + half;
    uint32_t* to = (uint32_t*)weight.panels + panel * groups * group_units * WIDTH + half;
    for (int64_t g = 0; g < groups; ++g, factors += 2 * WIDTH, to += group_units * WIDTH) {
      const Group group(rows, weight.columns, g * GROUP);
      const float* importance = weight.importance + g * GROUP;
      const V factor = Group::factor(load(found + 2 * g * LANES), units[0], 1), scale = mul(factor, units[0]);
      const V first = mul(Group::factor(load(found + (2 * g + 1) * LANES), units[1], -MOST), units[1]);
      const V factor_of_minimum = group.factor_of_minimum(importance, scale, first, units[1]);
      store_bytes(factors, factor), store_bytes(factors + WIDTH, factor_of_minimum);
      group.write_units(scale, mul(factor_of_minimum, units[1]), to);
    }
  }
};

}  // namespace

// Like `pack` in matmul.cpp, for weights of `bits`, 4, 5 or 8, that become blocks of I4, I5 or I8.
EXPORT int32_t NAMED(round_rows)(const Weight* weights, int64_t count, Progress* progress, int32_t threads) {
  Packing<Rounder> packing = {weights, count, progress, nullptr, 0, 0};
  return packing.compute(threads);
}
