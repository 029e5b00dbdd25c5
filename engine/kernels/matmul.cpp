// y = x W^T for packed weights in float32 or bfloat16, see matmul.h.
#include "packing.h"
#include "tiled.h"

EXPORT int32_t NAMED(matmul_float32)(const Matrix* matrix, const float* x, const float* residual, float* y,
                                          int64_t rows, int32_t threads) {
  const Timed timed(MATMUL);
  Matmul<Chain<Floats>> matmul = {matrix, x, residual, y, rows};
  return matmul.compute(threads);
}

EXPORT int32_t NAMED(matmul_bfloat16)(const Matrix* matrix, const uint16_t* x, const uint16_t* residual, void* y,
                                           int64_t rows, int32_t threads) {
  const Timed timed(MATMUL);
  Matmul<PlainHalves> matmul = {matrix, x, residual, y, rows};
  return matmul.compute(threads);
}

#if defined(HAS_DOT)
namespace {

#define UNROLLED_24 _Pragma("GCC unroll 24")

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

}  // namespace

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

struct Plain {
  static int64_t scratch_bytes(const Weight&) { return 0; }

  static void pack(const Rows& rows, char*) {
    const int64_t panel_bytes = (rows.weight.row_bytes + 3) / 4 * WIDTH * 4;
    for (int64_t p = rows.first; p < rows.last; ++p) pack_panel(rows, p, (char*)rows.weight.panels + p * panel_bytes);
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
