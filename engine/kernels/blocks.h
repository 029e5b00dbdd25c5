// The formats of weights in blocks that blocks.cpp computes with. blocks.py has the same table, with the formats' sizes in
// a file.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

// The type's number in a GGUF file. Q4_Z is our own, for quantized safetensors checkpoints: a scale in float16, the
// negated zero point in a byte, and the numbers like those of Q4_0. I4, I5 and I8 are what rounding.cpp makes of plain
// weights: each row has a scale and, in I4 and I5, a minimum, in bfloat16, and each of its groups the bytes that multiply
// them.
enum Type {
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, MXFP4 = 39, Q4_Z = 256, I4, I5, I8
};

// A number of a weight is scale * (stored - zero) + minimum. Each group of a row has one scale and one minimum.
struct Format {
  Type type;
  int bits;          // of a stored number
  int zero;          // 0 if the format has minimums
  int groups;        // that share a record of scales, see blocks.cpp; 0: all groups of a row
  int block_bytes;   // in a file; a block is `groups` groups
  bool has_minimum;
  bool has_zeros;    // the minimum is the scale times a byte
  bool is_coded;     // numbers are indices of E2M1, and the scale is a power of two
};

// Twice the floats of 4 bits with two bits of exponent and one of mantissa, by their bits, plus 12.
alignas(16) const uint8_t E2M1[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

const Format FORMATS[] = {
    {Q4_0, 4, 8, 1, 18, false, false, false},   {Q4_1, 4, 0, 1, 20, true, false, false},
    {Q5_0, 5, 16, 1, 22, false, false, false},  {Q5_1, 5, 0, 1, 24, true, false, false},
    {Q8_0, 8, 128, 1, 34, false, false, false}, {Q4_K, 4, 0, 8, 144, true, false, false},
    {Q5_K, 5, 0, 8, 176, true, false, false},   {Q6_K, 6, 32, 16, 210, false, false, false},
    {MXFP4, 4, 12, 1, 17, false, false, true},  {Q4_Z, 4, 0, 1, 19, true, true, false},
    {I4, 4, 0, 0, 0, true, false, false},       {I5, 5, 0, 0, 0, true, false, false},
    {I8, 8, 128, 0, 0, false, false, false},
};

// The number of groups that share a record, of a row's groups.
int64_t groups_of_record(const Format& format, int64_t groups) { return format.groups ? format.groups : groups; }

const Format& format_of(int type) {
  const Format* format = FORMATS;
  while (format->type != type) ++format;
  return *format;
}

// What a block in a file has in one row: stored numbers as bytes, and its scales.
struct Block {
  uint8_t numbers[256];
  uint16_t scale, minimum;  // float16
  uint8_t factors[16], minimums[8];
  uint8_t byte;  // the zero point of Q4_Z; the exponent of MXFP4

  Block(const Format& format, const uint8_t* from) : scale(half(from)), minimum(0), byte(0) {
    switch (format.type) {
      case Q4_0:
        nibbles(from + 2, 16, 0);
        break;
      case Q4_1:
        minimum = half(from + 2);
        nibbles(from + 4, 16, 0);
        break;
      case Q4_Z:
        byte = from[2];
        nibbles(from + 3, 16, 0);
        break;
      case MXFP4:
        byte = from[0];
        nibbles(from + 1, 16, 0);
        break;
      case Q5_0:
        nibbles(from + 6, 16, 0);
        fifth_bits(from + 2);
        break;
      case Q5_1:
        minimum = half(from + 2);
        nibbles(from + 8, 16, 0);
        fifth_bits(from + 4);
        break;
      case Q8_0:
        for (int i = 0; i < 32; ++i) numbers[i] = from[2 + i] ^ 0x80;
        break;
      case Q4_K:
        scales_of_k(from);
        for (int c = 0; c < 4; ++c) nibbles(from + 16 + 32 * c, 32, 64 * c);
        break;
      case Q5_K:
        scales_of_k(from);
        for (int c = 0; c < 4; ++c) nibbles(from + 48 + 32 * c, 32, 64 * c);
        for (int i = 0; i < 256; ++i) numbers[i] |= (from[16 + i % 32] >> (i / 32) & 1) << 4;
        break;
      case Q6_K:
        scale = half(from + 208);
        memcpy(factors, from + 192, 16);
        for (int c = 0; c < 2; ++c) nibbles(from + 64 * c, 64, 128 * c);
        for (int i = 0; i < 256; ++i) numbers[i] |= (from[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) << 4;
        break;
      case I4:
      case I5:
      case I8:
        break;  // in no file
    }
  }

  static uint16_t half(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return bits;
  }
  // The low nibbles of `count` bytes are the numbers from `at` on, and the high nibbles those after them.
  void nibbles(const uint8_t* from, int count, int at) {
    for (int i = 0; i < count; ++i) numbers[at + i] = from[i] & 15, numbers[at + count + i] = from[i] >> 4;
  }
  void fifth_bits(const uint8_t* from) {
    for (int i = 0; i < 32; ++i) numbers[i] |= (from[i / 8] >> (i % 8) & 1) << 4;
  }
  // Twelve bytes have the 6 bits of eight factors and of eight minimums, which are subtracted.
  void scales_of_k(const uint8_t* from) {
    minimum = half(from + 2) ^ 0x8000;
    const uint8_t* q = from + 4;
    for (int i = 0; i < 4; ++i) {
      factors[i] = q[i] & 63, minimums[i] = q[i + 4] & 63;
      factors[i + 4] = (q[i + 8] & 15) | (q[i] >> 6) << 4, minimums[i + 4] = q[i + 8] >> 4 | (q[i + 4] >> 6) << 4;
    }
  }
};

}  // namespace
