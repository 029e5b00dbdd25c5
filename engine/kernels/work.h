// What all kernels need.
#pragma once
#include "structures.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// What one thread does of a piece of work; the calling thread is thread 0.
typedef void (*Share)(void* work, int thread);

// Call `share` on this thread and, if the pool can spare them, on some of the threads 1 to threads - 1, at most once each;
// return when all of these calls have returned. Any of the other threads may be missing, so a share must neither leave work
// to a certain thread nor wait for one: it takes parts until none are left (Parts).
void run(Share share, void* work, int threads);

// The parts of a piece of work; each goes to the thread that asks next.
struct alignas(64) Parts {  // a cache line of its own
  int64_t count = 0, next = 0;
  bool take(int64_t& part) { return (part = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count; }
};

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
