// The vector operations that the kernels use, for the instruction set that the file is compiled for.
//
// -DISA_AVX2, -DISA_AVXVNNI, -DISA_AVX512, -DISA_AVX512BF16 or -DISA_AMX selects the variant, together with the
// compiler's -m flags. With -DEMULATE, AVX-VNNI's product of bytes, the bfloat16 dot product of AVX-512 and AMX's tiles
// (tiles.h) are emulated as Intel's manual defines them, so that their code can be tested on machines without the
// instructions. With -DNO_AVX_VNNI the assembler does not know AVX-VNNI; the library then does not report it.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#if defined(ISA_AVX2) || defined(ISA_AVXVNNI)

#if defined(ISA_AVX2)
#define NAMED(name) JOIN(name, avx2)
#else
#define NAMED(name) JOIN(name, avxvnni)
#endif
#define FEW_REGISTERS 1  // 16 vectors
typedef __m256 V;   // floats
typedef __m256i U;  // 32-bit units
static const int LANES = 8;
static const int HEIGHT = 6;  // rows of a tile: 12 sums, 2 weights and 1 activation fit 16 registers

static inline V zero() { return _mm256_setzero_ps(); }
static inline V set1(float x) { return _mm256_set1_ps(x); }
static inline V load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
static inline U load_units(const void* p) { return _mm256_loadu_si256((const U*)p); }
static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V divide(V a, V b) { return _mm256_div_ps(a, b); }
static inline V min(V a, V b) { return _mm256_min_ps(a, b); }  // min and max return b if either is NaN
static inline V max(V a, V b) { return _mm256_max_ps(a, b); }
static inline V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
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
static inline V load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
// Round to int8, ties to even; saturates. The result for NaN is unspecified.
static inline void store_bytes(int8_t* p, V v) {
  const __m256i whole = _mm256_cvtps_epi32(v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}
static inline U as_units(V v) { return _mm256_castps_si256(v); }
static inline V where_less(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
static inline V where_not_nan(V a, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, a, _CMP_ORD_Q)); }
static inline U add_ints(U a, U b) { return _mm256_add_epi32(a, b); }
static inline U and_(U a, U b) { return _mm256_and_si256(a, b); }
static inline U or_(U a, U b) { return _mm256_or_si256(a, b); }
static inline U set1_units(uint32_t x) { return _mm256_set1_epi32((int)x); }
template <int N> static inline U shift_right(U u) { return _mm256_srli_epi32(u, N); }
template <int N> static inline U shift_left(U u) { return _mm256_slli_epi32(u, N); }
// Store the lower halves of the units contiguously.
static inline void store_halves(uint16_t* p, U u) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 8);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
static inline void store_units(void* p, U u) { _mm256_storeu_si256((U*)p, u); }
// Interleave the units of two vectors: a0 b0 a1 b1 ….
static inline void zip(U& a, U& b) {
  const U even = _mm256_unpacklo_epi32(a, b), odd = _mm256_unpackhi_epi32(a, b);
  a = _mm256_permute2x128_si256(even, odd, 0x20), b = _mm256_permute2x128_si256(even, odd, 0x31);
}
static inline float first_lane(V v) { return _mm256_cvtss_f32(v); }
static inline U round_to_ints(V v) { return _mm256_cvtps_epi32(v); }  // ties to even; NaN becomes 0x80000000
static inline V ints_to_floats(U u) { return _mm256_cvtepi32_ps(u); }
static inline U max_ints(U a, U b) { return _mm256_max_epi32(a, b); }
static inline U madd_pairs(U a, U b) { return _mm256_madd_epi16(a, b); }  // multiply 16-bit halves, add pairs
// Multiply bytes, unsigned in `a` and signed in `b`, and add pairs in 16 bits; saturates.
static inline U madd_bytes(U a, U b) { return _mm256_maddubs_epi16(a, b); }
static inline U add_halves(U a, U b) { return _mm256_add_epi16(a, b); }
static inline U absolute_bytes(U a) { return _mm256_abs_epi8(a); }
static inline U signed_bytes(U a, U of) { return _mm256_sign_epi8(a, of); }  // a times the sign of `of`
static inline U xor_(U a, U b) { return _mm256_xor_si256(a, b); }
// Compute u here: gcc 12 would compute the products of a whole group first, and spill them.
static inline void in_order(U& u) { __asm__("" : "+x"(u)); }
// Operations on bytes, within each 16 bytes of a vector: look up 16 bytes by index; interleave the first or last eight
// bytes of two vectors; and saturate 16-bit numbers, those of a before those of b.
static inline U broadcast_16_bytes(const void* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
static inline U look_up_bytes(U table, U index) { return _mm256_shuffle_epi8(table, index); }
static inline U zip_first_bytes(U a, U b) { return _mm256_unpacklo_epi8(a, b); }
static inline U zip_last_bytes(U a, U b) { return _mm256_unpackhi_epi8(a, b); }
static inline U saturate_to_bytes(U a, U b) { return _mm256_packus_epi16(a, b); }
static inline U bytes_where_equal(U a, U b, U yes) { return _mm256_and_si256(_mm256_cmpeq_epi8(a, b), yes); }
static inline U or_masked(U a, U b, U mask) { return or_(a, and_(b, mask)); }
// Store the lowest bytes of the units contiguously.
static inline void store_lowest_bytes(void* p, U u) {
  const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i a = _mm_shuffle_epi8(_mm256_castsi256_si128(u), lowest);
  const __m128i b = _mm_shuffle_epi8(_mm256_extracti128_si256(u, 1), lowest);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(a, b));
}
#if defined(ISA_AVXVNNI)
// As for AVX-512 below. {vex}: the assembler would choose AVX-512's encoding.
#define HAS_VNNI 1
#if defined(EMULATE) || defined(NO_AVX_VNNI)
// Products of the bytes at even places, then of those at odd places; neither sum of two overflows 32 bits.
static inline void add_bytes(U& sum, U a, U b) {
  const U even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const U odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  sum = add_ints(sum, add_ints(even, odd));
}
#else
static inline void add_bytes(U& sum, U a, U b) { __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
#endif
#endif
typedef __m256d D;  // LANES / 2 doubles
static inline D set1_doubles(double x) { return _mm256_set1_pd(x); }
static inline D first_half(V v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
static inline D second_half(V v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
static inline V to_floats(D a, D b) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(a)), _mm256_cvtpd_ps(b), 1);
}
static inline D fma(D a, D b, D c) { return _mm256_fmadd_pd(a, b, c); }
static inline D add(D a, D b) { return _mm256_add_pd(a, b); }
// a * table[k % 8] * 2^floor(k / 8), where n = 1.5 * 2^52 + k for a small integer k.
static inline D times_power(D a, const double* table, D n) {
  const __m256i bits = _mm256_castpd_si256(n);
  const D part = _mm256_i64gather_pd(table, _mm256_and_si256(bits, _mm256_set1_epi64x(7)), 8);
  const __m256i exponent = _mm256_slli_epi64(_mm256_srli_epi64(bits, 3), 52);
  return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(_mm256_mul_pd(a, part)), exponent));
}
static inline void store_doubles(double* p, D d) { _mm256_storeu_pd(p, d); }
static inline V floor(V a) { return _mm256_floor_ps(a); }
static inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline uint32_t bits_where_ge(V a, V b) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
static inline V where_bits(uint32_t bits, V yes, V no) {
  const __m256i lane_bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)bits), lane_bits);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane_bits)));
}
// Store the lanes of v that `bits` selects contiguously. May overwrite a whole vector at p.
static inline void store_selected(float* p, V v, uint32_t bits) {
  float lanes[LANES];
  _mm256_storeu_ps(lanes, v);
  for (; bits; bits &= bits - 1) *p++ = lanes[__builtin_ctz(bits)];
}
static inline float max_lane(V v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// The sum of the lanes: the upper half is added to the lower half until one lane is left.
static inline float sum_lanes(V v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

#elif defined(ISA_AVX512) || defined(ISA_AVX512BF16) || defined(ISA_AMX)

#if defined(ISA_AVX512)
#define NAMED(name) JOIN(name, avx512)
#elif defined(ISA_AVX512BF16)
#define NAMED(name) JOIN(name, avx512bf16)
#else
#define NAMED(name) JOIN(name, amx)
#define HAS_TILES 1
#endif
typedef __m512 V;
typedef __m512i U;
static const int LANES = 16;
static const int HEIGHT = 12;  // 24 sums, 2 weights and 1 activation; 14 rows would spill

static inline V zero() { return _mm512_setzero_ps(); }
static inline V set1(float x) { return _mm512_set1_ps(x); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
static inline U load_units(const void* p) { return _mm512_loadu_si512(p); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V divide(V a, V b) { return _mm512_div_ps(a, b); }
static inline V min(V a, V b) { return _mm512_min_ps(a, b); }
static inline V max(V a, V b) { return _mm512_max_ps(a, b); }
static inline V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
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
static inline V load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// Round to int8, ties to even; saturates. The result for NaN is unspecified.
static inline void store_bytes(int8_t* p, V v) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
static inline U as_units(V v) { return _mm512_castps_si512(v); }
static inline V where_less(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
static inline V where_not_nan(V a, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), no, yes);
}
static inline U add_ints(U a, U b) { return _mm512_add_epi32(a, b); }
static inline U and_(U a, U b) { return _mm512_and_si512(a, b); }
static inline U or_(U a, U b) { return _mm512_or_si512(a, b); }
static inline U set1_units(uint32_t x) { return _mm512_set1_epi32((int)x); }
template <int N> static inline U shift_right(U u) { return _mm512_srli_epi32(u, N); }
template <int N> static inline U shift_left(U u) { return _mm512_slli_epi32(u, N); }
// Store the lower halves of the units contiguously.
static inline void store_halves(uint16_t* p, U u) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(u)); }
static inline void store_units(void* p, U u) { _mm512_storeu_si512(p, u); }
// Interleave the units of two vectors: a0 b0 a1 b1 ….
static inline void zip(U& a, U& b) {
  const U low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const U even = _mm512_permutex2var_epi32(a, low, b);
  b = _mm512_permutex2var_epi32(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b), a = even;
}
static inline float first_lane(V v) { return _mm512_cvtss_f32(v); }
static inline U round_to_ints(V v) { return _mm512_cvtps_epi32(v); }
static inline V ints_to_floats(U u) { return _mm512_cvtepi32_ps(u); }
static inline U max_ints(U a, U b) { return _mm512_max_epi32(a, b); }
static inline void store_lowest_bytes(void* p, U u) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(u)); }
static inline U broadcast_16_bytes(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
static inline U look_up_bytes(U table, U index) { return _mm512_shuffle_epi8(table, index); }
static inline U zip_first_bytes(U a, U b) { return _mm512_unpacklo_epi8(a, b); }
static inline U zip_last_bytes(U a, U b) { return _mm512_unpackhi_epi8(a, b); }
static inline U saturate_to_bytes(U a, U b) { return _mm512_packus_epi16(a, b); }
static inline U bytes_where_equal(U a, U b, U yes) { return _mm512_maskz_mov_epi8(_mm512_cmpeq_epi8_mask(a, b), yes); }
static inline U or_masked(U a, U b, U mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); }
// Add the products of a unit's four bytes, unsigned in `a` and signed in `b`, to each sum. Needs a processor with VNNI.
// In assembly, because gcc 12 copies and spills every sum around the intrinsic.
#define HAS_VNNI 1
static inline void add_bytes(U& sum, U a, U b) { __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
typedef __m512d D;
static inline D set1_doubles(double x) { return _mm512_set1_pd(x); }
static inline D first_half(V v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
static inline D second_half(V v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
static inline V to_floats(D a, D b) {
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
static inline V floor(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline uint32_t bits_where_ge(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline V where_bits(uint32_t bits, V yes, V no) { return _mm512_mask_blend_ps((__mmask16)bits, no, yes); }
static inline void store_selected(float* p, V v, uint32_t bits) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)bits, v));
}
static inline float max_lane(V v) { return _mm512_reduce_max_ps(v); }
// The sum of the lanes: the upper half is added to the lower half until one lane is left.
static inline float sum_lanes(V v) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

#if defined(ISA_AVX512BF16)
#define HAS_DOT 1
#if defined(EMULATE)
// Subnormal inputs and results count as zero, and the second number of a pair is added first.
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
#error "define ISA_AVX2, ISA_AVXVNNI, ISA_AVX512, ISA_AVX512BF16 or ISA_AMX"
#endif

// Transpose LANES rows of N units, which N vectors hold one after the other, into N vectors of LANES units, by
// repeatedly interleaving the first half of the vectors with the second. N is a power of two.
template <int N>
static inline void transpose(U (&rows)[N]) {
  _Pragma("GCC unroll 4") for (int step = 1; step < LANES; step *= 2) {
    U zipped[N];
    _Pragma("GCC unroll 16") for (int i = 0; i < N / 2; ++i) {
      zipped[2 * i] = rows[i], zipped[2 * i + 1] = rows[i + N / 2];
      zip(zipped[2 * i], zipped[2 * i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < N; ++i) rows[i] = zipped[i];
  }
}

static inline int32_t max_int_lane(U u) {
  int32_t lanes[LANES], largest = INT32_MIN;
  store_units(lanes, u);
  for (int32_t lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

static inline int32_t sum_int_lanes(U u) {
  uint32_t lanes[LANES], sum = 0;
  store_units(lanes, u);
  for (uint32_t lane : lanes) sum += lane;
  return (int32_t)sum;
}

static inline float to_float(uint16_t x) {
  union { uint32_t i; float f; } u = {(uint32_t)x << 16};
  return u.f;
}

// Round to nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bf16(float x) {
  union { float f; uint32_t i; } u = {x};
  if ((u.i & 0x7fffffff) > 0x7f800000) return (uint16_t)(u.i >> 16 | 0x40);
  return (uint16_t)((u.i + 0x7fff + (u.i >> 16 & 1)) >> 16);
}

// Convert each lane as to_bf16 does, into the lower halves of the units.
static inline U to_bf16_units(V v) {
  const U bits = as_units(v), last = and_(shift_right<16>(bits), set1_units(1));
  const U halves = add_ints(bits, add_ints(set1_units(0x7fff), last)), nan = or_(bits, set1_units(0x400000));
  return shift_right<16>(as_units(where_not_nan(v, as_floats(halves), as_floats(nan))));
}

// e^x to 2 units in the last place: x = n ln 2 + r, and the result is a polynomial for e^r times 2^n. Underflow yields
// about 2^-126, overflow infinity, and NaN stays NaN.
static inline V exponential(V x) {
  x = max(set1(-87.0f), min(set1(89.0f), x));
  const V n = round(mul(x, set1(1.44269504f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V e = set1(1.9875691500e-4f);
  e = fma(e, r, set1(1.3981999507e-3f));
  e = fma(e, r, set1(8.3334519073e-3f));
  e = fma(e, r, set1(4.1665795894e-2f));
  e = fma(e, r, set1(1.6666665459e-1f));
  e = fma(e, r, set1(5.0000001201e-1f));
  e = fma(mul(r, r), e, add(r, set1(1.0f)));
  return mul(e, power_of_two(n));
}

#define INLINE inline __attribute__((always_inline))

static const float LOG2E = 1.44269504f;

// 2^x for x <= 0, to 2 units in the last place: x = n + r, and the result is a polynomial for 2^r times 2^n. Exactly 0
// from -126.5 down, exactly 1 at 0; NaN stays NaN.
static INLINE V exponential2(V x) {
  x = max(set1(-127.0f), x);
  const V n = round(x), r = fma(n, set1(-1.0f), x);
  V e = set1(1.52527338e-5f);
  e = fma(e, r, set1(1.54035304e-4f));
  e = fma(e, r, set1(1.33335581e-3f));
  e = fma(e, r, set1(9.61812911e-3f));
  e = fma(e, r, set1(5.55041087e-2f));
  e = fma(e, r, set1(2.40226507e-1f));
  e = fma(e, r, set1(6.93147181e-1f));
  e = fma(e, r, set1(1.0f));
  return mul(e, power_of_two(n));
}

static INLINE float exponential2(float x) { return first_lane(exponential2(set1(x))); }

// tanh(x), to 2e-7 of the result. Uses a series near 0, where the quotient would cancel.
static INLINE V hyperbolic_tangent(V x) {
  const V square = mul(x, x), size = max(x, mul(x, set1(-1.0f)));
  V series = set1(62.0f / 2835);
  series = fma(series, square, set1(-17.0f / 315));
  series = fma(series, square, set1(2.0f / 15));
  series = fma(series, square, set1(-1.0f / 3));
  series = fma(mul(series, square), x, x);
  const V e = exponential2(mul(size, set1(-2 * LOG2E)));
  const V quotient = divide(add(set1(1.0f), mul(e, set1(-1.0f))), add(set1(1.0f), e));
  const V result = where_less(x, zero(), mul(quotient, set1(-1.0f)), quotient);
  return where_less(size, set1(0.25f), series, result);
}

static inline V silu(V x) { return divide(x, add(set1(1.0f), exponential(mul(x, set1(-1.0f))))); }

static inline V sigmoid(V x) { return divide(set1(1.0f), add(set1(1.0f), exponential(mul(x, set1(-1.0f))))); }

// log(1 + e^x), to 3e-7 of the result: max(x, 0) + log(1 + y) for y = e^-|x|, where log(1 + y) is a series in
// y / (2 + y), which is at most 1/3. NaN stays NaN.
static inline V softplus(V x) {
  const V y = exponential(min(x, mul(x, set1(-1.0f)))), s = divide(y, add(y, set1(2.0f))), square = mul(s, s);
  V series = set1(2.0f / 17);
  _Pragma("GCC unroll 8") for (int n = 15; n > 0; n -= 2) series = fma(series, square, set1(2.0f / (float)n));
  return fma(series, s, max(zero(), x));
}

// GELU with tanh, x * (1 + tanh(u)) / 2 for u = sqrt(2 / pi) (x + 0.044715 x^3), as the equal x / (1 + e^-2u), which
// does not cancel.
static inline V gelu_tanh(V x) {
  const V u = mul(x, fma(mul(x, x), set1(0.7978845608f * 0.044715f), set1(0.7978845608f)));
  return divide(x, add(set1(1.0f), exponential(mul(u, set1(-2.0f)))));
}

// GELU, x * erfc(-x / sqrt(2)) / 2. erfc(z) is t * e^(-z^2 + p(t)) for t = 1 / (1 + z / 2), to 1.2e-7 of the result, from
// Press et al., Numerical Recipes (1992), section 6.2.
static inline V gelu(V x) {
  const V size = max(mul(x, set1(-0.70710678f)), mul(x, set1(0.70710678f)));
  const V t = divide(set1(1.0f), fma(size, set1(0.5f), set1(1.0f)));
  V p = set1(0.17087277f);
  p = fma(p, t, set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  const V tail = mul(mul(t, set1(0.5f)), exponential(fma(mul(size, set1(-1.0f)), size, p)));
  return mul(x, where_less(x, zero(), tail, add(set1(1.0f), mul(tail, set1(-1.0f)))));
}
