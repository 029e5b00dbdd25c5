// The thread pool that the kernels share.
//
// The calling thread opens a round. Helpers that are awake join it; sleeping ones are woken, and join if they are
// scheduled before the round closes. The caller computes too. When no parts are left it closes the round and waits for
// the helpers that have joined, so that a helper without a processor delays no round. Between rounds helpers spin
// briefly, then sleep.
//
// OpenMP's regions end when every thread of the team has reached their end, even without work, and its threads spin
// for milliseconds: where other processes compete for the processors, each of hundreds of regions in a forward pass
// waits for the scheduler. benchmarks/busy.py measures that.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "work.h"

// For tests. 0: helpers join when they can, 1: none joins, 2: the caller waits until all have joined.
EXPORT int32_t pequod_joining = 0;

static const int MAX_THREADS = 1024;
// Nanoseconds that a thread spins before it sleeps: longer than the gaps between the kernels of a forward pass, shorter
// than the gap between two steps.
static const int64_t SPIN = 100000;

// One word, so that joining is one compare-and-swap: the number of helpers that have joined a round, the number of
// threads that it is for, whether it is open, and the round's number, by which a helper knows that it has joined before.
typedef uint64_t Round;
static const Round THREAD = 1 << 11, OPEN = 1ull << 31, NUMBER = 1ull << 32;
static int joined(Round round) { return (int)(round % THREAD); }
static int threads_of(Round round) { return (int)(round / THREAD % THREAD); }
static uint32_t number(Round round) { return (uint32_t)(round / NUMBER); }

struct alignas(64) Helper {
  std::atomic<uint32_t> sleeps{0};
};
static Helper helpers[MAX_THREADS];  // by thread number; the caller's entry, 0, is unused

static struct {
  alignas(64) std::atomic<Round> round{0};
  alignas(64) std::atomic<uint32_t> done{0};  // helpers that have joined the round and found no parts left
  std::atomic<uint32_t> caller_sleeps{0};
  alignas(64) std::atomic<bool> taken{false};
  // Written only by the caller that has taken the pool. A helper reads them after it has joined a round.
  Share share = nullptr;
  void* work = nullptr;
  int threads = 1;  // the caller and the helpers that were started
} pool;

// A waiting thread announces that it sleeps and then checks its condition again. A waking thread changes the condition
// and then reads the announcement. All of these accesses are sequentially consistent, so one of the two sees the other.
static void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

static void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

// Spin until the condition holds; return false if it does not within SPIN.
template <class Condition>
static bool spin_until(Condition holds) {
  const int64_t end = now() + SPIN;
  do
    for (int i = 0; i < 32; ++i) {
      if (holds()) return true;
      __builtin_ia32_pause();
    }
  while (now() < end);
  return false;
}

// Each thread wakes two others, because waking is a system call and the caller would otherwise make all of them.
static void wake_others(int thread, int threads) {
  for (int other = 2 * thread + 1; other <= 2 * thread + 2 && other < threads; ++other)
    if (helpers[other].sleeps && helpers[other].sleeps.exchange(0)) wake(helpers[other].sleeps);
}

static void* help(void* helper) {
  const int thread = (int)((Helper*)helper - helpers);
  std::atomic<uint32_t>& sleeps = helpers[thread].sleeps;
  uint32_t last = number(pool.round) - 1;  // the last round that it has joined
  Round round;
  auto is_open = [&] {
    round = pool.round;
    return (round & OPEN) && threads_of(round) > thread && number(round) != last;
  };
  for (;;) {
    if (!spin_until(is_open)) {
      sleeps = 1;
      while (!is_open() && sleeps) sleep_while(sleeps, 1);
      sleeps = 0;
      continue;
    }
    if (!pool.round.compare_exchange_strong(round, round + 1)) continue;
    last = number(round);
    wake_others(thread, threads_of(round));
    pool.share(pool.work, thread);
    ++pool.done;
    if (pool.caller_sleeps) wake(pool.done);
  }
  return nullptr;
}

// A forked process has no helpers, and no round that another thread had open.
static void reset_after_fork() {
  for (int thread = 1; thread < pool.threads; ++thread) helpers[thread].sleeps = 0;
  pool.round = pool.round & ~(OPEN | (OPEN - 1));
  pool.done = pool.caller_sleeps = 0;
  pool.threads = 1;
  pool.taken = false;
}

static bool start(int thread) {
  static bool registered = false;
  if (!registered && pthread_atfork(nullptr, nullptr, reset_after_fork)) return false;
  registered = true;
  pthread_attr_t detached;
  if (pthread_attr_init(&detached)) return false;
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  // Helpers block signals, except those that a fault raises in the thread that caused it.
  sigset_t signals, before;
  sigfillset(&signals);
  const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP};
  for (int fault : faults) sigdelset(&signals, fault);
  pthread_sigmask(SIG_SETMASK, &signals, &before);
  pthread_t started;
  const bool failed = pthread_create(&started, &detached, help, &helpers[thread]);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&detached);
  if (!failed) pthread_setname_np(started, "pequod-kernels");
  return !failed;
}

static void open_round(Share share, void* work, int threads) {
  pool.share = share, pool.work = work, pool.done = 0;
  pool.round = (Round)(number(pool.round) + 1) * NUMBER | OPEN | threads * THREAD;
  wake_others(0, threads);
  while (pequod_joining == 2 && joined(pool.round) + 1 < threads) sched_yield();
}

static void close_round() {
  const uint32_t helping = (uint32_t)joined(pool.round.fetch_and(~OPEN));
  if (spin_until([helping] { return pool.done == helping; })) return;
  pool.caller_sleeps = 1;
  for (uint32_t done; (done = pool.done) != helping;) sleep_while(pool.done, done);
  pool.caller_sleeps = 0;
}

void run(Share share, void* work, int threads) {
  if (threads <= 1 || pequod_joining == 1 || pool.taken.exchange(true)) return share(work, 0);
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  while (pool.threads < threads && start(pool.threads)) ++pool.threads;
  if (threads > pool.threads) threads = pool.threads;  // the system refused to start more
  if (threads > 1) open_round(share, work, threads);
  share(work, 0);
  if (threads > 1) close_round();
  pool.taken = false;
}
