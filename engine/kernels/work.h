// The thread pool's interface, scratch memory and timing, which all kernels use.
#pragma once
#include "structures.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// One thread's share of a piece of work; the calling thread is thread 0.
typedef void (*Share)(void* work, int thread);

// Call `share` on this thread and on those of the threads 1 to threads - 1 that the pool can spare, at most once each,
// and return when all calls have returned. Other threads may be missing, so a share must neither leave work to a
// particular thread nor wait for one: it claims parts until none are left (Parts).
void run(Share share, void* work, int threads);

// The parts of a piece of work. Threads claim them one at a time.
struct alignas(64) Parts {  // a cache line of its own
  int64_t count = 0, next = 0;
  bool claim(int64_t& part) { return (part = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count; }
};

// This thread's scratch memory, which the next call reuses; null if the allocation fails.
void* scratch(int64_t num_bytes);

// The same for work that calls kernels, which use the scratch memory.
void* room(int64_t num_bytes);

// Time spent in kernels, by kind, measured on the calling thread from entry to return.
enum KernelKind { MATMUL, ATTENTION, OTHER, KINDS };
int64_t now();  // nanoseconds
void add_time(KernelKind kind, int64_t nanoseconds);

struct Timed {
  const KernelKind kind;
  const int64_t start = now();
  explicit Timed(KernelKind kind) : kind(kind) {}
  ~Timed() { add_time(kind, now() - start); }
};
