// The formats of weights in blocks that blocks.cpp computes with. blocks.py has the same table, with the formats' sizes in
// a file.
#pragma once
#include <stdint.h>

namespace {

// The type's number in a GGUF file. Q4_Z is our own, for quantized safetensors checkpoints: a scale in float16, the
// negated zero point in a byte, and the numbers like those of Q4_0.
enum Type { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, Q4_Z = 256 };

// A number of a weight is scale * (stored - zero) + minimum. Each group of a row has one scale and one minimum.
struct Format {
  Type type;
  int bits;          // of a stored number
  int zero;          // 0 if the format has minimums
  int groups;        // that share a record of scales, see blocks.cpp
  int block_bytes;   // in a file; a block is `groups` groups
  bool has_minimum;
  bool has_zeros;    // the minimum is the scale times a byte
};

const Format FORMATS[] = {
    {Q4_0, 4, 8, 1, 18, false, false},   {Q4_1, 4, 0, 1, 20, true, false},     {Q5_0, 5, 16, 1, 22, false, false},
    {Q5_1, 5, 0, 1, 24, true, false},    {Q8_0, 8, 128, 1, 34, false, false},  {Q4_K, 4, 0, 8, 144, true, false},
    {Q5_K, 5, 0, 8, 176, true, false},   {Q6_K, 6, 32, 16, 210, false, false}, {Q4_Z, 4, 0, 1, 19, true, true},
};

const Format& format_of(int type) {
  const Format* format = FORMATS;
  while (format->type != type) ++format;
  return *format;
}

}  // namespace
