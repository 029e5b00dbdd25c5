// The pool without kernels, for test_threads.py: compiled with machine.cpp, also under ThreadSanitizer.
#include <stdlib.h>

#include <thread>
#include <vector>

#include "threads.cpp"

namespace {

// Every part counts once, and is written by whichever thread has taken it.
struct Work {
  Parts parts;
  std::vector<int64_t> written;
  int threads;
};

void share(void* work, int thread) {
  Work& w = *(Work*)work;
  if (thread < 0 || thread >= w.threads) abort();
  for (int64_t part; w.parts.claim(part);) w.written[(size_t)part] += part + 1;
}

// Rounds of different sizes; 0 if each part was computed once and is seen by the caller.
int rounds(int count, int threads) {
  for (int i = 0; i < count; ++i) {
    Work work = {{1 + i % 50}, std::vector<int64_t>((size_t)(1 + i % 50)), threads};
    run(share, &work, threads);
    for (size_t part = 0; part < work.written.size(); ++part)
      if (work.written[part] != (int64_t)part + 1) return 1;
  }
  return 0;
}

int callers(int count, int threads) {
  std::vector<std::thread> all;
  std::atomic<int> wrong{0};
  for (int i = 0; i < count; ++i) all.emplace_back([&] { wrong += rounds(3000, threads); });
  for (auto& each : all) each.join();
  return wrong;
}

}  // namespace

int main(int, char** arguments) {
  pequod_joining = atoi(arguments[1]);
  return rounds(3000, 4) + callers(3, 3) + rounds(100, 5);
}
