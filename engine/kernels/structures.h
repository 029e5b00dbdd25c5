// What the Python side hands over. structures.py has a class for each of these structures, with the same fields in the
// same order; when the library is loaded their sizes are compared.
#pragma once
#include <stdint.h>

// A packed weight.
struct Matrix {
  const void* panels;  // see matmul.h
  const void* scales;  // of a quantized weight, see quantized.cpp; else null
  const float* bias;   // one panel's width for each panel, or null
  int64_t outputs;     // columns of the result
  int64_t columns;     // numbers in an input row
  int64_t num_panels;
  int32_t gated;  // a panel is half gate, half up: the result is silu(gate) * up
  int32_t wide;   // the result is float32, whatever the input is
};

// Rows of a plain weight.
struct WeightPart {
  const char* weight;  // [rows, columns]; or null, and they lie in a file
  int64_t rows, offset;
  int32_t file;
};

// How far a packing has come, and why it went no further.
struct Progress {
  int64_t num_bytes;     // of plain weights that are packed
  int32_t error, wrong;  // errno, 0 where a file ends early; the file that could not be read
};

// A plain weight, and where it is to be packed.
struct PlainWeight {
  const WeightPart* parts;  // all of them in memory, or all in files
  void* panels;
  void* scales;  // of a quantized weight
  int64_t num_parts, rows, columns, number_bytes, num_panels;
  int32_t bits;   // of a quantized weight
  int32_t gated;  // gate before up
};

// A step and the shape of a layer, for attention.
struct Call {
  const int32_t* query_start;  // [rows + 1]
  const int32_t* seq_lens;     // [rows]
  const int32_t* block_table;  // [rows, width]
  const int64_t* slots;        // [tokens]
  int64_t rows, width, heads, kv_heads, head_dim, block_size;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // from one to the next, in numbers
  int64_t window;                                             // 0: none
  float scale, softcap;                                       // 0: none
};

// A product and the weight that is its own.
struct Multiplied {
  int32_t (*multiply)(const Matrix*, const void* x, const void* residual, void* y, int64_t rows, int32_t threads);
  const Matrix* matrix;
  int32_t apply(const void* x, const void* residual, void* y, int64_t rows, int32_t threads) const {
    return multiply(matrix, x, residual, y, rows, threads);
  }
};

// A layer of a decoder.
struct Layer {
  Multiplied qkv, output, gate_up, down;
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
  int64_t call;                                             // which of the step's
};

// All layers of a decoder, and a step.
struct Stack {
  const Layer* layers;
  int64_t num_layers, hidden, heads, kv_heads, head_dim;
  int32_t (*attend)(const Call* call, const void* q, const void* k, const void* v, void* cache, void* out,
                    const float* sinks, int32_t threads);
  float eps;
  int32_t threads;
  // The step's.
  int64_t tokens, num_angles;
  const int64_t* positions;
  const float* angles;
  const Call* const* calls;
  void* const* caches;                     // one of each layer
  void *x, *normed, *line, *seen, *inner;  // x: what goes in and comes out; the others are room for what is between
};
