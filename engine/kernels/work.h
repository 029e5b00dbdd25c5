// What the Python side hands over, and the threads that the kernels share with torch.
#pragma once
#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// A packed weight. The Python class of the same name has the same fields in the same order.
struct Matrix {
  const void* panels;  // see product.h
  const void* scales;  // of a quantized weight, see quantized.cpp; else null
  const float* bias;   // one panel's width for each panel, or null
  int64_t outputs;     // columns of the result
  int64_t columns;     // numbers in an input row
  int64_t num_panels;
  int32_t gated;  // a panel is half gate, half up: the result is silu(gate) * up
  int32_t wide;   // the result is float32, whatever the input is
};

// One share of a piece of work: thread `thread` of `threads`, which all run it.
typedef void (*Share)(void* work, int thread, int threads);

// Run `share` on up to `threads` threads of the pool, this one among them, and wait.
void run(Share share, void* work, int threads);
// Wait for the other threads of a run.
void meet();

// Memory of this thread, the same at each call as long as it suffices; null when there is none.
void* scratch(int64_t num_bytes);

// The time that kernels take on the threads that call them, by kind: each counts from its entry to its end.
enum Counted { IN_PRODUCTS, IN_ATTENTION, IN_OTHERS, KINDS };
int64_t now();  // nanoseconds
void count(Counted kind, int64_t nanoseconds);

struct Timed {
  const Counted kind;
  const int64_t began = now();
  explicit Timed(Counted kind) : kind(kind) {}
  ~Timed() { count(kind, now() - began); }
};
