// Decides whether this process uses the processor's tiles (tiles.h): with the system's permission, after a trial that
// compares their results with the emulation's, and where they multiply faster. Takes a few milliseconds.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <initializer_list>

#include "tiled.h"

typedef int32_t Multiply(const Matrix*, const void* x, const void* residual, void* y, int64_t rows, int32_t threads);
EXPORT Multiply NAMED(matmul_bfloat16), NAMED(matmul_int8_bfloat16), matmul_int8_bfloat16_avx512;

typedef int32_t Attend(const Call*, const void* q, const void* k, const void* v, void* cache, void* out,
                       const float* sinks, int32_t threads);
EXPORT Attend NAMED(attend_bfloat16), NAMED(attend_emulated);

// For tests. 1: one result of the products is wrong, 2: the trial executes an illegal instruction, 3: one result of
// attention is wrong.
EXPORT int32_t NAMED(trial_fault) = 0;

namespace {

const int64_t OUTPUTS = 256, COLUMNS = 512, TIMED_ROWS[] = {1, 16, 128};  // of the measurement
const int TRIALS = 5;
const int PATIENCE_MS = 60000;  // for the trial: another process may have the processor
const int MOST_TRIES = 20, TRY_AGAIN_US = 100000;

// -- numbers ----------------------------------------------------------------------------------------------------------

struct Random {
  uint64_t state = 0x9e3779b97f4a7c15;
  uint32_t operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
  }
  uint32_t up_to(uint32_t limit) { return (*this)() % (limit + 1); }
};

// Exponents of the numbers to multiply (A and B) and of those to add to (C), as stored in a float.
struct Exponents {
  uint32_t a_min, a_max, b_min, b_max, c_min, c_max;
};
const Exponents KINDS_OF_NUMBERS[] = {
    {120, 134, 120, 134, 110, 140},  // ordinary
    {126, 128, 126, 128, 124, 132},  // sums that cancel
    {58, 70, 58, 70, 0, 8},          // results near the smallest normal number
    {0, 1, 100, 254, 0, 2},          // subnormal numbers, and zeros
    {184, 196, 184, 196, 240, 254},  // results near the largest number
    {0, 255, 0, 255, 0, 255},        // anything, with infinities and NaN
};

uint32_t number(Random& random, uint32_t min_exponent, uint32_t max_exponent) {
  return random() << 31 | (min_exponent + random.up_to(max_exponent - min_exponent)) << 23 | (random() & 0x7fffff);
}

bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

// Whether floats have the same bits; all NaN count as the same.
bool are_equal(const uint32_t* a, const uint32_t* b, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (a[i] != b[i] && !(is_nan(a[i]) && is_nan(b[i]))) return false;
  return true;
}

// -- single tiles -----------------------------------------------------------------------------------------------------

const int TILE_UNITS = TILE_ROWS * TILE_BYTES / 4;

struct Operands {
  alignas(64) uint32_t a[TILE_UNITS], b[TILE_UNITS], c[TILE_UNITS];
};

// Multiply one tile of up to 16 rows.
template <class T, bool BYTES>
void multiply_operands(int64_t rows, Operands& operands) {
  TileShapes shapes;
  for (int t = 0; t < NUM_TILES; ++t) shapes.set(t, t >= 6 ? TILE_ROWS : rows);
  T::configure(shapes);
  T::template load<0>(operands.c, TILE_BYTES);
  T::template load<4>(operands.a, TILE_BYTES);
  T::template load<6>(operands.b, TILE_BYTES);
  T::template dot<BYTES, 0, 4, 6>();
  T::template store<0>(operands.c, TILE_BYTES);
  T::release();
}

bool tiles_agree() {
  Random random;
  for (const Exponents& kind : KINDS_OF_NUMBERS)
    for (int64_t rows = 1; rows <= TILE_ROWS; ++rows) {
      Operands own, emulated;
      for (int i = 0; i < TILE_UNITS; ++i) {
        const auto pair = [&](uint32_t min, uint32_t max) {
          return (number(random, min, max) & 0xffff0000) | number(random, min, max) >> 16;
        };
        own.a[i] = pair(kind.a_min, kind.a_max), own.b[i] = pair(kind.b_min, kind.b_max);
        own.c[i] = number(random, kind.c_min, kind.c_max);
      }
      emulated = own;
      multiply_operands<Tiles, false>(rows, own);
      multiply_operands<EmulatedAmx, false>(rows, emulated);
      if (!are_equal(own.c, emulated.c, TILE_UNITS)) return false;
      for (uint32_t& word : own.c) word = random();  // and integers, of which some overflow
      emulated = own;
      multiply_operands<Tiles, true>(rows, own);
      multiply_operands<EmulatedAmx, true>(rows, emulated);
      if (memcmp(&own, &emulated, sizeof own) != 0) return false;
    }
  return true;
}

// -- whole products ---------------------------------------------------------------------------------------------------

// A matrix, and rows to multiply by it, for the kernels here.
struct Problem {
  Matrix matrix = {};
  uint16_t* x;
  float* y;

  Problem(int64_t outputs, int64_t columns, int64_t rows, int64_t number_bytes) {
    const int64_t units = ceil_div(columns * number_bytes, 4);
    matrix.outputs = matrix.stride = outputs, matrix.columns = columns, matrix.num_panels = ceil_div(outputs, WIDTH);
    matrix.panels = allocate(matrix.num_panels * units * WIDTH * 4);
    matrix.scales = allocate(matrix.num_panels * WIDTH * 4);
    x = (uint16_t*)allocate(rows * columns * 2), y = (float*)allocate(rows * outputs * 4);
    if (!is_complete()) return;
    Random random;
    for (int64_t i = 0; i < rows * columns; ++i) x[i] = (uint16_t)(number(random, 120, 130) >> 16);
    for (int64_t i = 0; i < matrix.num_panels * WIDTH; ++i) ((float*)matrix.scales)[i] = 0.001f * (float)(1 + i % 9);
    uint32_t* to = (uint32_t*)matrix.panels;
    for (int64_t i = 0; i < matrix.num_panels * units * WIDTH; ++i)  // for int8: any bytes
      to[i] = (number(random, 120, 130) & 0xffff0000) | number(random, 120, 130) >> 16;
  }
  ~Problem() { free((void*)matrix.panels), free((void*)matrix.scales), free(x), free(y); }
  static void* allocate(int64_t size) { return aligned_alloc(64, (size_t)(ceil_div(size, 64) * 64)); }
  bool is_complete() const { return matrix.panels && matrix.scales && x && y; }
};

int32_t multiply_emulated(const Matrix* matrix, const void* x, const void*, void* y, int64_t rows, int32_t threads) {
  Matmul<Tiled<EmulatedAmx>> matmul = {matrix, (const uint16_t*)x, nullptr, y, rows};
  return matmul.compute(threads);
}

bool products_agree() {
  const int64_t outputs = 77, columns = 150, most = 70;
  for (const bool bytes : {false, true})
    for (const int64_t rows : {1, 5, 16, 17, 33, 70}) {
      Problem own(outputs, columns, most, bytes ? 1 : 2), other(outputs, columns, most, bytes ? 1 : 2);
      if (!own.is_complete() || !other.is_complete()) return false;
      own.matrix.wide = other.matrix.wide = 1;
      Multiply& tested = bytes ? NAMED(matmul_int8_bfloat16) : NAMED(matmul_bfloat16);
      Multiply& known = bytes ? matmul_int8_bfloat16_avx512 : multiply_emulated;
      if (tested(&own.matrix, own.x, nullptr, own.y, rows, 1)) return false;
      if (known(&other.matrix, other.x, nullptr, other.y, rows, 1)) return false;
      if (NAMED(trial_fault) == 1 && bytes && rows == most) ((uint32_t*)own.y)[rows * outputs - 1] ^= 1;
      if (!are_equal((const uint32_t*)own.y, (const uint32_t*)other.y, rows * outputs)) return false;
    }
  return true;
}

// -- attention --------------------------------------------------------------------------------------------------------

// A decode row, and a chunk of a prompt in groups of 32 and of fewer queries. The head size is no multiple of 32.
bool attention_agrees() {
  const int64_t kv_heads = 2, group = 3, head_dim = 80, block_size = 16, width = 10;
  const int32_t query_start[] = {0, 1, 46}, seq_lens[] = {70, 150};
  int32_t block_table[2 * width];
  for (int i = 0; i < 2 * width; ++i) block_table[i] = i;
  Call call = {};
  call.query_start = query_start, call.seq_lens = seq_lens, call.block_table = block_table;
  call.rows = 2, call.width = width, call.heads = kv_heads * group, call.kv_heads = kv_heads;
  call.head_dim = call.v_head_dim = head_dim, call.block_size = block_size, call.scale = 0.1f;
  call.block_bytes = kv_heads * block_size * 2 * head_dim * 2;
  call.q_head = head_dim, call.q_token = call.heads * head_dim;
  const int64_t cached = 2 * width * kv_heads * block_size * 2 * head_dim, size = query_start[2] * call.q_token;
  uint16_t* cache = (uint16_t*)Problem::allocate((cached + 3 * size) * 2);
  if (!cache) return false;
  uint16_t *q = cache + cached, *own = q + size, *other = own + size;
  Random random;
  for (int64_t i = 0; i < cached + size; ++i) cache[i] = (uint16_t)(number(random, 120, 128) >> 16);
  bool agree = !NAMED(attend_bfloat16)(&call, q, nullptr, nullptr, cache, own, nullptr, 1);
  agree &= !NAMED(attend_emulated)(&call, q, nullptr, nullptr, cache, other, nullptr, 1);
  if (NAMED(trial_fault) == 3) own[size - 1] ^= 1;
  agree &= memcmp(own, other, (size_t)size * 2) == 0;
  free(cache);
  return agree;
}

// -- the trial --------------------------------------------------------------------------------------------------------

// Ask the system to save the tiles' registers for this process, from now on; all threads and forked processes may then
// use them. Linux refuses it if the alternate signal stack of a thread is too small for them.
bool is_permitted() {
#if defined(EMULATE)
  return true;
#else
  const long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#endif
}

void try_and_exit(int result) {
  for (const int fault : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) signal(fault, SIG_DFL);  // no report: it is a trial
  const struct rlimit no_core = {};
  setrlimit(RLIMIT_CORE, &no_core);
  if (NAMED(trial_fault) == 2) __builtin_trap();
  const char passed = tiles_agree() && products_agree() && attention_agrees();
  _exit(write(result, &passed, 1) == 1 ? 0 : 1);
}

}  // namespace

// Returns 0 if tiles can be used, 1 if the system refuses them, or 2 if their results are wrong. The trial runs in a
// process of its own, which alone would die of an instruction that is illegal after all.
EXPORT int32_t NAMED(trial)() {
  if (!is_permitted()) return 1;
  int ends[2];
  pid_t child = -1;
  for (int tries = 0; child < 0; ++tries) {  // a busy machine may lack a process or a descriptor for a moment
    if (tries == MOST_TRIES) return 2;
    if (tries) usleep(TRY_AGAIN_US);
    if (pipe2(ends, O_CLOEXEC)) continue;
    if ((child = fork()) < 0) close(ends[0]), close(ends[1]);
  }
  if (child == 0) try_and_exit(ends[1]);
  close(ends[1]);
  char passed = 0;
  {
    struct pollfd result = {ends[0], POLLIN, 0};
    int ready;
    while ((ready = poll(&result, 1, PATIENCE_MS)) < 0 && errno == EINTR) {}
    if (ready != 1 || read(ends[0], &passed, 1) != 1) passed = 0;
    kill(child, SIGKILL);
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {}
  }
  close(ends[0]);
  return passed ? 0 : 2;
}

// Whether products by tiles are faster than those of another kernel for bfloat16, by the geometric mean over a few
// numbers of rows. Compares the shortest of several trials, so that other load does not change the choice.
EXPORT int32_t NAMED(tiles_pay)(Multiply* other) {
  Problem problem(OUTPUTS, COLUMNS, TIMED_ROWS[2], 2);
  if (!problem.is_complete()) return 0;
  double ratio = 1;
  for (const int64_t rows : TIMED_ROWS) {
    int64_t shortest[2] = {INT64_MAX, INT64_MAX};
    for (int trial = 0; trial <= TRIALS; ++trial)
      for (int which = 0; which < 2; ++which) {
        const int64_t started = now();
        if ((which ? other : NAMED(matmul_bfloat16))(&problem.matrix, problem.x, nullptr, problem.y, rows, 1)) return 0;
        if (trial) shortest[which] = min(shortest[which], now() - started);  // the first one warms up
      }
    ratio *= (double)shortest[0] / (double)max(1, shortest[1]);
  }
  return ratio < 1;
}
