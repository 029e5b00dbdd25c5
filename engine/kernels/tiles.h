// The processor's tiles (AMX), and an emulation of them with the same bits.
//
// A tile is a register of up to 16 rows of 64 bytes; a thread has eight. C += A * B multiplies the rows of A by B, whose
// row k holds unit k (four bytes along the sum) of each of 16 columns. Rows of C never meet, so a row of a product has
// the same bits whatever the other rows are, and however many.
//
// bfloat16. For the 16 pairs of a tile, two chains of fused multiply-adds start at +0: one adds the products of the
// pairs' first numbers, the other those of the second; then C = C + (first + second). Each step rounds once, to nearest
// even. Subnormal inputs are zeros, and a result below 2^-126 after rounding becomes a zero of its sign. MXCSR does not
// matter.
//
// int8. The sums are integers, exact, and wrap.
//
// A process needs the system's permission (trial.cpp) before it uses a tile: without it, the instructions are illegal.
#pragma once
#include "isa.h"

#include <string.h>

namespace {

const int NUM_TILES = 8, TILE_ROWS = 16, TILE_BYTES = 64;

// The memory operand of LDTILECFG: of each tile its rows, and the bytes of a row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int64_t num_rows) { rows[tile] = (uint8_t)num_rows, bytes[tile] = TILE_BYTES; }
};

// Encoded as bytes, because assemblers before binutils 2.36 do not know these instructions. The memory clobbers order
// them with the compiler's own loads and stores. A load and a store address rax + row * rcx.
struct Amx {
  static void configure(const TileShapes& shapes) {  // ldtilecfg [rax]
    __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" ::"a"(&shapes) : "memory");
  }
  static void release() { __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0" ::: "memory"); }  // tilerelease
  template <int T>
  static INLINE void zero() {  // tilezero T
    __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, %c0" ::"i"(0xc0 | T << 3));
  }
  template <int T>
  static INLINE void load(const void* from, int64_t stride) {  // tileloadd T, [rax + rcx]
    __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, %c0, 0x08" ::"i"(0x04 | T << 3), "a"(from), "c"(stride) : "memory");
  }
  template <int T>
  static INLINE void store(void* to, int64_t stride) {  // tilestored [rax + rcx], T
    __asm__ volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, %c0, 0x08" ::"i"(0x04 | T << 3), "a"(to), "c"(stride) : "memory");
  }
  // C += A * B, of bfloat16 or of bytes, signed in A and unsigned in B.
  template <bool BYTES, int C, int A, int B>
  static INLINE void dot() {  // tdpbsud or tdpbf16ps C, A, B
    __asm__ volatile(".byte 0xc4, 0xe2, %c0, %c1, %c2" ::"i"((15 - B) << 3 | 2), "i"(BYTES ? 0x5e : 0x5c),
                     "i"(0xc0 | C << 3 | A));
  }
};

// The same with vectors. Traps where the processor would raise a fault, because of shapes that do not fit each other.
struct EmulatedTile {
  int rows, bytes;
  alignas(64) char data[TILE_ROWS][TILE_BYTES];
};
thread_local EmulatedTile emulated_tiles[NUM_TILES];

struct EmulatedAmx {
  static void configure(const TileShapes& shapes) {
    for (int t = 0; t < NUM_TILES; ++t) {
      if (shapes.rows[t] > TILE_ROWS || shapes.bytes[t] > TILE_BYTES) __builtin_trap();
      emulated_tiles[t].rows = shapes.rows[t], emulated_tiles[t].bytes = shapes.bytes[t];
      memset(emulated_tiles[t].data, 0, sizeof emulated_tiles[t].data);
    }
  }
  static void release() { memset(emulated_tiles, 0, sizeof emulated_tiles); }

  static EmulatedTile& at(int t) {
    if (!emulated_tiles[t].rows || !emulated_tiles[t].bytes) __builtin_trap();
    return emulated_tiles[t];
  }
  template <int T>
  static void zero() { memset(at(T).data, 0, sizeof at(T).data); }
  template <int T>
  static void load(const void* from, int64_t stride) {
    zero<T>();
    EmulatedTile& tile = at(T);
    for (int r = 0; r < tile.rows; ++r) memcpy(tile.data[r], (const char*)from + r * stride, (size_t)tile.bytes);
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    const EmulatedTile& tile = at(T);
    for (int r = 0; r < tile.rows; ++r) memcpy((char*)to + r * stride, tile.data[r], (size_t)tile.bytes);
  }
  template <bool BYTES, int C, int A, int B>
  static void dot() {
    EmulatedTile& c = at(C);
    const EmulatedTile &a = at(A), &b = at(B);
    if (c.rows != a.rows || a.bytes != 4 * b.rows || c.bytes != b.bytes) __builtin_trap();
    if (BYTES) return add_bytes_of(c, a, b);
    // MXCSR: results and inputs are flushed (0x8040), rounding is to nearest, and no exception is raised (0x1f80).
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    add_pairs(c, a, b);
    _mm_setcsr(before);
  }

  static U unit(const EmulatedTile& a, int m, int k) {
    uint32_t bytes;
    memcpy(&bytes, a.data[m] + 4 * k, 4);
    return set1_units(bytes);
  }
  static void add_bytes_of(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
    for (int m = 0; m < c.rows; ++m) {
      U sum = load_units(c.data[m]);
      for (int k = 0; k < b.rows; ++k) add_bytes(sum, load_units(b.data[k]), unit(a, m, k));
      store_units(c.data[m], sum);
    }
  }
  // Not inlined, so that the compiler moves no arithmetic across the changes of MXCSR.
  __attribute__((noinline)) static void add_pairs(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
    for (int m = 0; m < c.rows; ++m) {
      V first = ::zero(), second = ::zero();
      for (int k = 0; k < b.rows; ++k) {
        const U left = unit(a, m, k), right = load_units(b.data[k]);
        first = fma(lower(left), lower(right), first);
        second = fma(upper(left), upper(right), second);
      }
      ::store((float*)c.data[m], add(::load((const float*)c.data[m]), add(first, second)));
    }
  }
};

#if defined(EMULATE)
typedef EmulatedAmx Tiles;
#else
typedef Amx Tiles;
#endif

}  // namespace
