// The vector instructions that the kernels need, for the one instruction set that this file is compiled for.
//
// A variant is chosen by -DISA_AVX2, -DISA_AVX512 or -DISA_AVX512BF16 together with the compiler's -m flags. With
// -DEMULATE_BF16 the last one computes without the processor's bfloat16 dot product, number for number as Intel's
// manual describes it, so that its code can be tested on machines that lack the instruction.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#if defined(ISA_AVX2)

#define NAMED(name) JOIN(name, avx2)
typedef __m256 V;   // floats
typedef __m256i U;  // as many 32-bit units
static const int LANES = 8;
static const int HEIGHT = 6;  // rows of a tile: 12 sums, 2 weights and 1 activation in 16 registers

static inline V zero() { return _mm256_setzero_ps(); }
static inline V all(float x) { return _mm256_set1_ps(x); }
static inline V load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
static inline U load_units(const void* p) { return _mm256_loadu_si256((const U*)p); }
static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V divide(V a, V b) { return _mm256_div_ps(a, b); }
static inline V least(V a, V b) { return _mm256_min_ps(a, b); }    // b where either is no number
static inline V greatest(V a, V b) { return _mm256_max_ps(a, b); }
static inline V nearest(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V power_of_two(V n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline V as_floats(U u) { return _mm256_castsi256_ps(u); }
static inline V lower(U u) { return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16)); }
static inline V upper(U u) { return _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000))); }
static inline V load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline V load_bytes(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// The nearest whole numbers, ties to even; what is beyond -128 and 127 becomes these, what is no number any.
static inline void store_bytes(int8_t* p, V v) {
  const __m256i whole = _mm256_cvtps_epi32(v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}
static inline U as_units(V v) { return _mm256_castps_si256(v); }
static inline V where_less(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
static inline V where_number(V a, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, a, _CMP_ORD_Q)); }
static inline U plus(U a, U b) { return _mm256_add_epi32(a, b); }
static inline U both(U a, U b) { return _mm256_and_si256(a, b); }
static inline U either(U a, U b) { return _mm256_or_si256(a, b); }
static inline U all_units(uint32_t x) { return _mm256_set1_epi32((int)x); }
template <int N> static inline U shifted_down(U u) { return _mm256_srli_epi32(u, N); }
// The lower halves of the units, side by side.
static inline void store_halves(uint16_t* p, U u) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 8);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
static inline void store_units(void* p, U u) { _mm256_storeu_si256((U*)p, u); }
// The units of two vectors by turns: a0 b0 a1 b1 ….
static inline void zip(U& a, U& b) {
  const U even = _mm256_unpacklo_epi32(a, b), odd = _mm256_unpackhi_epi32(a, b);
  a = _mm256_permute2x128_si256(even, odd, 0x20), b = _mm256_permute2x128_si256(even, odd, 0x31);
}
static inline float lowest_lane(V v) { return _mm256_cvtss_f32(v); }
static inline U nearest_ints(V v) { return _mm256_cvtps_epi32(v); }  // ties to even; no number gives 0x80000000
static inline V floats_of(U u) { return _mm256_cvtepi32_ps(u); }
static inline U greater_ints(U a, U b) { return _mm256_max_epi32(a, b); }
static inline U pairs_summed(U a, U b) { return _mm256_madd_epi16(a, b); }  // products of halves, two by two
// The lowest bytes of the units, side by side.
static inline void store_lowest_bytes(void* p, U u) {
  const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i a = _mm_shuffle_epi8(_mm256_castsi256_si128(u), lowest);
  const __m128i b = _mm_shuffle_epi8(_mm256_extracti128_si256(u, 1), lowest);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(a, b));
}
typedef __m256d D;  // doubles, half as many
static inline D all_doubles(double x) { return _mm256_set1_pd(x); }
static inline D first_half(V v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
static inline D second_half(V v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
static inline V as_floats(D a, D b) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(a)), _mm256_cvtpd_ps(b), 1);
}
static inline D fma(D a, D b, D c) { return _mm256_fmadd_pd(a, b, c); }
static inline D add(D a, D b) { return _mm256_add_pd(a, b); }
// a * table[n % 8] * 2^(n / 8), rounded down; n: 1.5 * 2^52 + a small whole number.
static inline D times_power(D a, const double* table, D n) {
  const __m256i bits = _mm256_castpd_si256(n);
  const D part = _mm256_i64gather_pd(table, _mm256_and_si256(bits, _mm256_set1_epi64x(7)), 8);
  const __m256i exponent = _mm256_slli_epi64(_mm256_srli_epi64(bits, 3), 52);
  return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(_mm256_mul_pd(a, part)), exponent));
}
static inline void store_doubles(double* p, D d) { _mm256_storeu_pd(p, d); }
static inline V down(V a) { return _mm256_floor_ps(a); }
static inline V minus(V a, V b) { return _mm256_sub_ps(a, b); }
static inline uint32_t bits_at_least(V a, V b) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
static inline V where_bits(uint32_t bits, V yes, V no) {
  const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)bits), places);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, places)));
}
// Those lanes of v, side by side; what follows them up to a whole vector is overwritten.
static inline void store_some(float* p, V v, uint32_t bits) {
  float lanes[LANES];
  _mm256_storeu_ps(lanes, v);
  for (; bits; bits &= bits - 1) *p++ = lanes[__builtin_ctz(bits)];
}
static inline float largest(V v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

#elif defined(ISA_AVX512) || defined(ISA_AVX512BF16)

#if defined(ISA_AVX512)
#define NAMED(name) JOIN(name, avx512)
#else
#define NAMED(name) JOIN(name, avx512bf16)
#endif
typedef __m512 V;
typedef __m512i U;
static const int LANES = 16;
static const int HEIGHT = 12;  // 24 sums, 2 weights and 1 activation; 14 rows spill

static inline V zero() { return _mm512_setzero_ps(); }
static inline V all(float x) { return _mm512_set1_ps(x); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
static inline U load_units(const void* p) { return _mm512_loadu_si512(p); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V divide(V a, V b) { return _mm512_div_ps(a, b); }
static inline V least(V a, V b) { return _mm512_min_ps(a, b); }
static inline V greatest(V a, V b) { return _mm512_max_ps(a, b); }
static inline V nearest(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V power_of_two(V n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
static inline V as_floats(U u) { return _mm512_castsi512_ps(u); }
static inline V lower(U u) { return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16)); }
static inline V upper(U u) { return _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000))); }
static inline V load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline V load_bytes(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// The nearest whole numbers, ties to even; what is beyond -128 and 127 becomes these, what is no number any.
static inline void store_bytes(int8_t* p, V v) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
static inline U as_units(V v) { return _mm512_castps_si512(v); }
static inline V where_less(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
static inline V where_number(V a, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), no, yes);
}
static inline U plus(U a, U b) { return _mm512_add_epi32(a, b); }
static inline U both(U a, U b) { return _mm512_and_si512(a, b); }
static inline U either(U a, U b) { return _mm512_or_si512(a, b); }
static inline U all_units(uint32_t x) { return _mm512_set1_epi32((int)x); }
template <int N> static inline U shifted_down(U u) { return _mm512_srli_epi32(u, N); }
// The lower halves of the units, side by side.
static inline void store_halves(uint16_t* p, U u) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(u)); }
static inline void store_units(void* p, U u) { _mm512_storeu_si512(p, u); }
// The units of two vectors by turns: a0 b0 a1 b1 ….
static inline void zip(U& a, U& b) {
  const U low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const U even = _mm512_permutex2var_epi32(a, low, b);
  b = _mm512_permutex2var_epi32(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b), a = even;
}
static inline float lowest_lane(V v) { return _mm512_cvtss_f32(v); }
static inline U nearest_ints(V v) { return _mm512_cvtps_epi32(v); }
static inline V floats_of(U u) { return _mm512_cvtepi32_ps(u); }
static inline U greater_ints(U a, U b) { return _mm512_max_epi32(a, b); }
static inline void store_lowest_bytes(void* p, U u) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(u)); }
// To each sum the products of a unit's four bytes: without a sign in `a`, signed in `b`. Only where the processor has
// VNNI. In assembly, because gcc 12 copies and spills every sum around the intrinsic.
#define HAS_VNNI 1
static inline void add_bytes(U& sum, U a, U b) { __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
typedef __m512d D;
static inline D all_doubles(double x) { return _mm512_set1_pd(x); }
static inline D first_half(V v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
static inline D second_half(V v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
static inline V as_floats(D a, D b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a)), _mm512_cvtpd_ps(b), 1);
}
static inline D fma(D a, D b, D c) { return _mm512_fmadd_pd(a, b, c); }
static inline D add(D a, D b) { return _mm512_add_pd(a, b); }
static inline D times_power(D a, const double* table, D n) {
  const __m512i bits = _mm512_castpd_si512(n);
  const D part = _mm512_permutexvar_pd(bits, _mm512_loadu_pd(table));
  const __m512i exponent = _mm512_slli_epi64(_mm512_srli_epi64(bits, 3), 52);
  return _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(_mm512_mul_pd(a, part)), exponent));
}
static inline void store_doubles(double* p, D d) { _mm512_storeu_pd(p, d); }
static inline V down(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
static inline V minus(V a, V b) { return _mm512_sub_ps(a, b); }
static inline uint32_t bits_at_least(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline V where_bits(uint32_t bits, V yes, V no) { return _mm512_mask_blend_ps((__mmask16)bits, no, yes); }
static inline void store_some(float* p, V v, uint32_t bits) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)bits, v));
}
static inline float largest(V v) { return _mm512_reduce_max_ps(v); }

#if defined(ISA_AVX512BF16)
#define HAS_DOT 1
#if defined(EMULATE_BF16)
// Subnormal numbers are taken as zero and rounded to zero, and the second number of a pair is added first.
static inline V flushed(V v) {
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(_mm512_castps_si512(v), _mm512_fpclass_ps_mask(v, 0x20),
                                                   _mm512_castps_si512(v), _mm512_set1_epi32((int)0x80000000)));
}
static inline V dot(V sum, U a, U b) {
  sum = flushed(_mm512_fmadd_ps(flushed(upper(a)), flushed(upper(b)), flushed(sum)));
  return flushed(_mm512_fmadd_ps(flushed(lower(a)), flushed(lower(b)), sum));
}
#else
static inline V dot(V sum, U a, U b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif
#endif

#else
#error "no instruction set was named"
#endif

// Rows become columns: LANES vectors of as many units. Half of the rows zipped with the other half, again and again.
static inline void transpose(U (&rows)[LANES]) {
  _Pragma("GCC unroll 4") for (int step = 1; step < LANES; step *= 2) {
    U zipped[LANES];
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES / 2; ++i) {
      zipped[2 * i] = rows[i], zipped[2 * i + 1] = rows[i + LANES / 2];
      zip(zipped[2 * i], zipped[2 * i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; ++i) rows[i] = zipped[i];
  }
}

// The sum of the lanes, halves onto halves.
static inline float total(V v) {
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

static inline int32_t largest_int(U u) {
  int32_t lanes[LANES], most = INT32_MIN;
  store_units(lanes, u);
  for (int32_t lane : lanes) most = lane > most ? lane : most;
  return most;
}

static inline int32_t total_int(U u) {
  uint32_t lanes[LANES], sum = 0;
  store_units(lanes, u);
  for (uint32_t lane : lanes) sum += lane;
  return (int32_t)sum;
}

static inline float to_float(uint16_t x) {
  union { uint32_t i; float f; } u = {(uint32_t)x << 16};
  return u.f;
}

// To the nearest, ties to even; what is no number stays none.
static inline uint16_t to_bf16(float x) {
  union { float f; uint32_t i; } u = {x};
  if ((u.i & 0x7fffffff) > 0x7f800000) return (uint16_t)(u.i >> 16 | 0x40);
  return (uint16_t)((u.i + 0x7fff + (u.i >> 16 & 1)) >> 16);
}

// to_bf16 of each, in the lower halves of the units.
static inline U rounded(V v) {
  const U bits = as_units(v), last = both(shifted_down<16>(bits), all_units(1));
  const U number = plus(bits, plus(all_units(0x7fff), last)), none = either(bits, all_units(0x400000));
  return shifted_down<16>(as_units(where_number(v, as_floats(number), as_floats(none))));
}

// e^x to 2 units in the last place: x = n ln 2 + r, a polynomial for e^r, times 2^n. Too small gives 2^-126 or so,
// too large infinity, no number none.
static inline V exponential(V x) {
  x = greatest(all(-87.0f), least(all(89.0f), x));
  const V n = nearest(mul(x, all(1.44269504f)));
  V r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  V e = all(1.9875691500e-4f);
  e = fma(e, r, all(1.3981999507e-3f));
  e = fma(e, r, all(8.3334519073e-3f));
  e = fma(e, r, all(4.1665795894e-2f));
  e = fma(e, r, all(1.6666665459e-1f));
  e = fma(e, r, all(5.0000001201e-1f));
  e = fma(mul(r, r), e, add(r, all(1.0f)));
  return mul(e, power_of_two(n));
}

static inline V silu(V x) { return divide(x, add(all(1.0f), exponential(mul(x, all(-1.0f))))); }
