// The processor's features, scratch memory, and the kernels' clock. Compiled without -m flags.
#include "work.h"

#include <cpuid.h>
#include <stdlib.h>
#include <time.h>

// -- the processor ----------------------------------------------------------------------------------------------------

static uint64_t enabled_state() {  // the register state that the operating system saves
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

// Bits: 1 AVX2 with FMA, 2 AVX-512 F, BW, DQ and VL, 4 AVX512-BF16, 8 AMX for bfloat16 and int8, 16 AVX-512 VNNI, 512
// AVX-VNNI. Those from 32 to 256 are set in library.py.
EXPORT int32_t pequod_features() {
  uint32_t a, b, c, d, features = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool fma = c >> 12 & 1, f16c = c >> 29 & 1, xsave = c >> 27 & 1;
  if (!xsave) return 0;
  const uint64_t state = enabled_state();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const uint32_t subleaves = a, extended = b, extended_c = c, extended_d = d;
  if (fma && f16c && (extended >> 5 & 1) && (state & 0x6) == 0x6) features |= 1;
  const uint32_t required = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if (features && (extended & required) == required && (state & 0xe6) == 0xe6) features |= 2;
  if ((features & 2) && (extended_c >> 11 & 1)) features |= 16;
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    if ((features & 2) && (a >> 5 & 1)) features |= 4;
#if !defined(NO_AVX_VNNI)
    if ((features & 1) && (a >> 4 & 1)) features |= 512;
#endif
  }
  const uint32_t tiles = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, int8
  if ((extended_d & tiles) == tiles && (state & 0x60000) == 0x60000) features |= 8;
  return (int32_t)features;
}

// -- structures -------------------------------------------------------------------------------------------------------

// In the order of STRUCTURES in structures.py.
EXPORT const int64_t pequod_sizes[] = {sizeof(Matrix),     sizeof(WeightPart), sizeof(Progress), sizeof(PlainWeight),
                                       sizeof(Multiplied), sizeof(Joined),     sizeof(Call),     sizeof(Mixture),
                                       sizeof(Layer),      sizeof(Stack),      sizeof(Delta)};

// -- memory -----------------------------------------------------------------------------------------------------------

struct Buffer {
  void* memory = nullptr;
  int64_t size = 0;
  ~Buffer() { free(memory); }
};

static void* grown(Buffer& buffer, int64_t num_bytes) {
  if (buffer.size < num_bytes) {
    free(buffer.memory);
    buffer.size = (num_bytes + 4095) / 4096 * 4096;
    buffer.memory = aligned_alloc(4096, (size_t)buffer.size);
    if (!buffer.memory) buffer.size = 0;
  }
  return buffer.memory;
}

void* scratch(int64_t num_bytes) {
  static thread_local Buffer buffer;
  return grown(buffer, num_bytes);
}

void* room(int64_t num_bytes) {
  static thread_local Buffer buffer;
  return grown(buffer, num_bytes);
}

// -- time -------------------------------------------------------------------------------------------------------------

EXPORT int64_t pequod_nanoseconds[KINDS] = {};

int64_t now() {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

void add_time(KernelKind kind, int64_t nanoseconds) {
  __atomic_fetch_add(&pequod_nanoseconds[kind], nanoseconds, __ATOMIC_RELAXED);
}
