// Structures that Python passes to the kernels. structures.py has a class for each, with the same fields in the same
// order; their sizes are compared when the library is loaded.
#pragma once
#include <stdint.h>

// How gate and up become one number, or up alone.
const int32_t SQUARED_RELU = 5;
struct Gate {
  int32_t activation;  // 0 SiLU, 1 GELU with tanh, 2 clamped SwiGLU, 3 GELU, 4 ReLU; of up alone, without a gate: 5
  float limit, alpha;  // of clamped SwiGLU
};

// A packed weight.
struct Matrix {
  const void* panels;    // see matmul.h
  const void* scales;    // of a quantized weight, see quantized.cpp; else null
  const float* bias;     // [num_panels, panel width], or null
  const int32_t* order;  // the column of the input that each column of the weight is multiplied by, or null
  int64_t outputs;       // columns of the result
  int64_t stride;        // numbers between two rows of the result, and of the residual
  int64_t columns;       // columns of the input
  int64_t num_panels;
  int32_t gated;  // half of each panel is gate, half up: the result is `gated` of both, see numbers.h
  int32_t wide;   // the result is float32, whatever the input's type
  int32_t format;  // of a weight in blocks, see blocks.h; else 0
  int32_t planes;  // with such a weight: bytes of an activation, 1 or 2
  Gate gate;    // of a gated matrix, or SQUARED_RELU
  float scale;  // of the result, before the residual is added; 0: none
};

// Rows of a plain weight.
struct WeightPart {
  const char* weight;  // [rows, columns], or null if the rows are in a file
  int64_t rows, offset;
  int32_t file;
  int32_t interleaved;  // rows of a head, if its two halves are interleaved, to be separated (only in memory); else 0
};

// The progress of packing, and the error that stopped it.
struct Progress {
  int64_t num_bytes;     // of plain weights packed so far
  int32_t error, wrong;  // errno, or 0 if the file ended early; the descriptor of the file that could not be read
};

// A plain weight, and the memory to pack it into.
struct PlainWeight {
  const WeightPart* parts;  // all in memory, or all in files
  void* panels;
  void* scales;             // of a quantized weight
  const float* importance;  // with 4 or 5 bits: of each column, padded to whole groups; see rounding.cpp
  int64_t num_parts, rows, columns, row_bytes, number_bytes, num_panels;
  int32_t bits;    // of a quantized weight
  int32_t gated;   // gate before up
  int32_t format;  // of rows in GGUF blocks, see blocks.h; else 0
};

// The arguments of attention: the step's rows and the layer's shape.
struct Call {
  const int32_t* query_start;  // [rows + 1]
  const int32_t* seq_lens;     // [rows]
  const int32_t* block_table;  // [rows, width]
  const int64_t* slots;        // [tokens]
  int64_t rows, width, heads, kv_heads, head_dim, v_head_dim, block_size;
  int64_t block_bytes;                                        // from a block of the cache to the next
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides, in numbers
  int64_t window;                                             // 0: none
  float scale, softcap;                                       // 0: none
};

// A matmul kernel and the weight that it multiplies by.
struct Multiplied {
  int32_t (*multiply)(const Matrix*, const void* x, const void* residual, void* y, int64_t rows, int32_t threads);
  const Matrix* matrix;
  int32_t apply(const void* x, const void* residual, void* y, int64_t rows, int32_t threads) const {
    return multiply(matrix, x, residual, y, rows, threads);
  }
};

// Matmuls of the same x whose results are columns of one y. Passed in place of a Matrix.
struct Joined {
  const Multiplied* parts;
  const int64_t* offsets;  // of each part's columns in a row of y, in bytes
  int64_t count;
};

// A mixture of experts.
struct Mixture {
  const Multiplied *gate_ups, *downs;      // of each expert
  Multiplied router;                       // its results are float32
  Multiplied shared_gate_up, shared_down;  // of an MLP for all tokens, if `shared` is not 0
  Multiplied shared_gate;                  // to one float32 number, by whose sigmoid that is multiplied; or null
  const float* correction;                 // [count], added to weights when experts are chosen; or null
  int64_t count, active;                   // experts, and those of a token
  int64_t groups, kept;                    // of experts, and those from which a token's are chosen
  int64_t inner, shared;                   // inner sizes of an expert, and of the MLP
  int32_t sigmoid, normalized;  // weights are sigmoids, else a softmax over all experts; a token's add up to 1
  int32_t wide_router;          // its weight is float32, to which its input is converted, whatever the experts' types
  float scale;                  // of the weights
  float epsilon;                // added to their sum if they add up to 1
};

// A layer of a decoder.
struct Layer {
  Multiplied qkv, output, gate_up, down;  // the last two: of a layer without experts
  const Mixture* experts;                 // or null
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
  int64_t call;                                             // index into the step's calls
  int64_t turn;                                             // index into the step's angles; -1: no rotary embedding
};

// All layers of a decoder, and the step to compute.
struct Stack {
  const Layer* layers;
  int64_t num_layers, hidden, heads, kv_heads, head_dim, turned;  // turned: numbers of a head that are rotated
  int32_t (*attend)(const Call* call, const void* q, const void* k, const void* v, void* cache, void* out,
                    const float* sinks, int32_t threads);
  float eps;
  int32_t threads;
  // The step:
  int64_t tokens, num_angles;
  const int64_t* positions;
  const float* const* angles;  // one table for each kind of rotary embedding
  const Call* const* calls;
  void* const* caches;                     // one for each layer
  void *x, *normed, *line, *seen, *inner;  // x: input and output; scratch for the norms, QKV, attention and the MLP
};

// A layer of linear attention or of Mamba2, and a step to compute, see models/mixers/delta.py and models/mixers/states.py.
struct Delta {
  const int32_t* row_start;  // [rows + 1]
  const int32_t* begin;      // [segments + 1]
  const int32_t* source;     // [segments]
  const int32_t* target;     // [segments]
  const void* weights;       // [channels, taps] of the convolution
  const float* decay;        // [value_heads]
  const float* bias;         // [value_heads]
  const void* norm;          // [value_dim], of Mamba2 [value_heads * value_dim]
  const void* conv_bias;     // Mamba2: [channels], or null
  const float* skip;         // Mamba2: [value_heads]
  void* windows;
  float* matrices;
  int64_t tokens, rows, segments, states;
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  int64_t window_stride, matrix_stride;  // from a state to the next, in numbers
  int64_t qkvz_stride, gates_stride;     // from a token to the next, in numbers
  float eps;
  int32_t is_tiled;                      // see LinearShape in models/mixers/states.py
  float least, most;                     // Mamba2: limits of the time steps
};
