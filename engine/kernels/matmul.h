// The matmul y = x W^T with a packed weight, whatever its type: panels, tiles, threads, and the epilogue.
//
// Units. A unit is four bytes of a row of W along k: one float, two bfloat16, four int8 or eight int4, the first in the
// lowest bits. The last unit of a row is padded with zero weights.
//
// Panels. A panel holds 2 * LANES rows of W (columns of y) as P[unit][row], so each step along k reads 2 vectors. Rows
// beyond the end of W are zero. In a gated matrix, where a gate row and an up row make one column of y, a panel's first
// vector holds gate rows and the second the up rows of the same columns.
//
// Order. Each element of y is summed along k from 0 upwards, as its Kind defines; then come bias, gate or activation,
// scale, residual, and one rounding to the result's type. Neither the number of rows nor the tile's height nor the thread
// changes this order, so the bits of a row do not depend on the rest of the batch.
//
// Tiles. A tile is up to TALL rows of x by one panel, or few rows by several panels, so that enough independent sums
// hide the latency of the additions. A tile's rows are packed as X[unit][row]: rows of x are often a power of two
// apart, and read in place they would evict one another from the first-level cache. Where the processor multiplies
// tiles (tiled.h), all tiles have the same height, and the last one is padded with rows of zeros.
#pragma once
#include "numbers.h"
#include "work.h"

// An anonymous namespace, because the linker would merge the variants' inline functions of the same name.
namespace {

const int WIDTH = 2 * LANES;      // rows of W in a panel
const int64_t BLOCK = 44 * HEIGHT;  // rows of x that are packed at once; bounds the scratch memory
const int64_t PARTS = 24;         // approximate number of parts that a thread's panels are divided into
const int64_t ROWS_AT_ONCE = 8;   // that a thread packs for the processor's tiles
// Bytes that a single turn of the processor's tiles prefetches ahead. Without, it read memory a third slower on an
// Emerald Rapids, which follows loads of tiles less far than others.
const int64_t AHEAD_OF_TILES = 16 << 10;
// Bytes of packed x that should stay in the second-level cache beside a panel; processors with tiles have 2 MB of it.
#if defined(HAS_TILES)
const int64_t NEAR = 1 << 20;
#else
const int64_t NEAR = 512 << 10;
#endif
const int64_t SMALL = 1 << 18;    // multiply-adds below which waking other threads costs more than they save
const int64_t SHORT = 1 << 14;    // numbers of x up to which one thread packs faster than several

// The number of panels in a tile of few rows. Each panel is a stream from memory. AMD's processors are a fifth faster
// with one stream per thread; Intel's, which do not use the variant with the bfloat16 dot product, are a third faster
// with four.
constexpr int panels_of_tile(int64_t rows) {
#if defined(HAS_DOT)
  (void)rows;
  return 1;
#else
  return rows == 1 ? 4 : rows == 2 ? 2 : rows == 3 ? LANES / 8 : 1;
#endif
}

// The number of parts of a thread's panels that some thread has started.
struct alignas(64) Started {
  int64_t parts;
};

// -- one matmul -------------------------------------------------------------------------------------------------------

// A Kind defines the type of x and how the sums are computed:
//
//   Number                          of x, the residual and (unless the matrix is wide) y
//   units(columns)                  units in a row of the weight
//   row_bytes(units)                bytes of a packed row of x
//   pack_x(x, columns, units, rows, to)
//   panel_bytes(units)              bytes of a panel
//   EXPANDS                         whether panels are compressed
//   Expanded                        the Kind of expanded panels
//   panels(rows)                    panels of a tile of few rows
//   AHEAD                           bytes that such a tile prefetches ahead of itself; 0: none, because the processor
//                                   follows sequential streams by itself
//   sums<M, P>(matrix, units, panel, w, expanded, xs, ahead, lines, out)
//       M rows by P panels from `panel` on, whose bytes are at `w`. Prefetches `lines` cache lines from `ahead` on for
//       each unit. Writes the panel to `expanded`, unless that is null.
//   TALL                            maximum height of a tile
//   IN_TILES                        whether the processor multiplies tiles; it then has instead of `pack_x` and `sums`:
//
//   pack_row(x, count, units, tall, m, tile)
//       Writes row `m` of a tile of `tall` rows: `count` numbers, then zeros.
//   begin(tall), end()
//       Called by each thread before its first sums and after its last ones.
//   sums(matrix, units, panel, w, expanded, xs, tall, fetch, out)
//       A tile by one panel. Prefetches what `fetch` says, and moves it on.

// The lines to prefetch: `lines` for each step of a tile's sums.
struct Fetch {
  const char* at;
  int64_t lines;
  void next(int64_t count) {
    for (; count > 0; --count, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// A Kind whose panels are computed with as they are.
template <class Kind>
struct InPanels {
  typedef Kind Expanded;
  static const bool EXPANDS = false, IN_TILES = false;
  static const int TALL = HEIGHT;
  static const int64_t AHEAD = 0;
  static int64_t panel_bytes(int64_t units) { return units * WIDTH * 4; }
  static constexpr int panels(int64_t rows) { return panels_of_tile(rows); }
};

template <class Kind>
struct Matmul {
  typedef typename Kind::Number Number;
  const Matrix* matrix;
  const Number* x;
  const Number* residual;  // or null
  void* y;
  int64_t rows;
  // Set by `compute`:
  int64_t units = 0;
  int threads = 1;
  Started* started = nullptr;    // scratch: one for each thread
  char* packed = nullptr;        // scratch: the rows of one block, in tiles
  Number* sorted = nullptr;      // scratch: TALL rows for each thread, if columns have another order
  char* expanded = nullptr;      // scratch: a panel for each thread, if they are compressed
  int64_t start = 0, count = 0;  // the block's first row and number of rows
  Parts to_pack = {};            // parts of the block's rows

  const char* panel_at(int64_t panel) const { return (const char*)matrix->panels + panel * Kind::panel_bytes(units); }
  int64_t expanded_bytes() const { return (units + 1) / 2 * 2 * WIDTH * 4; }

  // Scale a vector of one row of y, add the residual, round and store it.
  void emit(V v, int64_t row, int64_t column) const {
    const int64_t index = row * matrix->stride + column, count = matrix->outputs - column;
    if (matrix->scale != 0) v = mul(v, set1(matrix->scale));
    if (residual) v = add(v, get(residual + index, count));
    if (matrix->wide) put((float*)y + index, v, count);
    else put((Number*)y + index, v, count);
  }

  // The epilogue of one panel and some rows; their sums are `apart` numbers apart. Not inlined, or it would be compiled
  // into every tile size.
  __attribute__((noinline)) void finish(const float* sums, int64_t apart, int64_t height, int64_t panel, int64_t row) const {
    for (int64_t end = row + height; row < end; ++row, sums += apart) {
      V a = load(sums), b = load(sums + LANES);
      if (matrix->bias) {
        a = add(a, load(matrix->bias + panel * WIDTH));
        b = add(b, load(matrix->bias + panel * WIDTH + LANES));
      }
      if (matrix->gated) {
        emit(gated(matrix->gate, a, b), row, panel * LANES);
      } else {
        if (matrix->gate.activation == SQUARED_RELU) a = squared_relu(a), b = squared_relu(b);
        emit(a, row, panel * WIDTH);
        if (panel * WIDTH + LANES < matrix->outputs) emit(b, row, panel * WIDTH + LANES);
      }
    }
  }

  // M rows by P panels, whose bytes are at `w`. `Of`: Kind, or that of the expanded panel.
  template <class Of, int M, int P>
  __attribute__((noinline)) void tile(const char* xs, int64_t panel, const char* w, char* own, int64_t row,
                                      const char* ahead, int lines) const {
    float out[M][P][WIDTH];
    prefetch_results(M, panel, row);
    Of::template sums<M, P>(*matrix, units, panel, w, own, xs, ahead, lines, out);
    for (int p = 0; p < P; ++p) finish(out[0][p], P * WIDTH, M, panel + p, row);
  }

  // `height` rows, up to M, by one panel.
  template <class Of, int M = Of::TALL>
  void any(int height, const char* xs, int64_t panel, const char* w, char* own, int64_t row, const char* ahead,
           int lines) const {
    if constexpr (M > 1)
      if (height < M) return any<Of, M - 1>(height, xs, panel, w, own, row, ahead, lines);
    tile<Of, M, 1>(xs, panel, w, own, row, ahead, lines);
  }

  // Few rows by panels [from, to).
  template <int M>
  void few(int64_t from, int64_t to) const {
    const int P = Kind::panels(M), lines = Kind::AHEAD ? WIDTH * 4 / 64 : 0;
    const char* w = panel_at(from);
    for (; from + P <= to; from += P, w = panel_at(from))
      tile<Kind, M, P>(packed, from, w, nullptr, 0, w + Kind::AHEAD, lines);
    for (; from < to; ++from, w = panel_at(from))
      tile<Kind, M, 1>(packed, from, w, nullptr, 0, w + Kind::AHEAD, lines);
  }

  // The number of tiles of the block. Tiles have nearly equal heights: 16 rows become 8 and 8, not 12 and 4.
  int64_t num_tiles() const { return Kind::IN_TILES ? ceil_div(count, tall()) : ceil_div(count, Kind::TALL); }

  // The height that all of the processor's tiles have here. One of more than 16 rows is two, one below the other.
  int64_t tall() const {
    return count <= Kind::TALL / 2 ? count : ceil_div(ceil_div(count, ceil_div(count, Kind::TALL)), 2) * 2;
  }

  // The first row of a tile; of the number of tiles, the number of rows.
  int64_t row_of(int64_t tile) const {
    return Kind::IN_TILES ? min(tile * tall(), count) : count * tile / num_tiles();
  }

  // The processor's tiles [first, last) of the block by panels [from, to).
  void in_tiles(int thread, int64_t first, int64_t last, int64_t from, int64_t to) const {
    const int64_t height = tall(), row_bytes = Kind::row_bytes(units), turns = last - first;
    // Of a panel's lines, those for one step (16 units) of one turn.
    const int64_t lines = ceil_div(Kind::panel_bytes(units), 64 * ceil_div(units, 16) * turns);
    const bool prefetches_itself = Kind::EXPANDS && turns == 1;
    char* own = Kind::EXPANDS && turns > 1 ? expanded + thread * expanded_bytes() : nullptr;
    for (int64_t panel = from; panel < to; ++panel) {
      const char *w = panel_at(panel), *next = panel_at(panel + 1), *end = panel_at(panel + 2);
      // One turn prefetches just ahead of itself, several prefetch the next panel.
      Fetch fetch = {turns == 1 ? w + AHEAD_OF_TILES : next, prefetches_itself ? 0 : lines};
      for (int64_t t = first; t < last; ++t) {
        const int64_t row = row_of(t), rows_of_tile = row_of(t + 1) - row;
        if (turns > 1 && fetch.at >= end) fetch.lines = 0;
        if (t > first && own)
          one<typename Kind::Expanded>(rows_of_tile, packed + row * row_bytes, panel, own, nullptr, row, height, fetch);
        else one<Kind>(rows_of_tile, packed + row * row_bytes, panel, w, own, row, height, fetch);
      }
    }
  }

  // A tile by one panel, whose bytes are at `w`.
  template <class Of>
  __attribute__((noinline)) void one(int64_t height, const char* xs, int64_t panel, const char* w, char* own, int64_t row,
                                     int64_t padded, Fetch& fetch) const {
    alignas(64) float out[Kind::TALL][WIDTH];
    prefetch_results(height, panel, start + row);
    Of::sums(*matrix, units, panel, w, own, xs, padded, fetch, out);
    finish(out[0], WIDTH, height, panel, start + row);
  }

  // Rows of y are far apart: prefetch the first cache line of each before computing the sums.
  INLINE void prefetch_results(int64_t height, int64_t panel, int64_t row) const {
    const int64_t column = panel * (matrix->gated ? LANES : WIDTH), size = matrix->wide ? 4 : sizeof(Number);
    for (int64_t m = 0; m < height; ++m)
      __builtin_prefetch((char*)y + ((row + m) * matrix->stride + column) * size, 1, 2);
  }

  // Tiles [first, last) of the block by panels [from, to).
  void many(int thread, int64_t first, int64_t last, int64_t from, int64_t to) const {
    const int64_t row_bytes = Kind::row_bytes(units);
    char* own = Kind::EXPANDS && last - first > 1 ? expanded + thread * expanded_bytes() : nullptr;
    for (int64_t panel = from; panel < to; ++panel) {
      const char *w = panel_at(panel), *next = panel_at(panel + 1);
      for (int64_t t = first; t < last; ++t) {
        // Prefetch the next panel while this one is multiplied, a part of it during each of the first two tiles: if the
        // first tile fetched all of it, memory would idle during the second.
        const int64_t row = row_of(t), n = t - first;
        const int lines = last - first == 1 ? 2 : n < 2 ? 1 : 0, height = (int)(row_of(t + 1) - row);
        const char *xs = packed + row * row_bytes, *ahead = next + n * units * 64;
        // The first tile expands a compressed panel for the others.
        if (n && own) any<typename Kind::Expanded>(height, xs, panel, own, nullptr, start + row, ahead, lines);
        else any<Kind>(height, xs, panel, w, own, start + row, ahead, lines);
      }
    }
  }

  void pack(int thread) {
    const int64_t columns = matrix->columns, row_bytes = Kind::row_bytes(units);
    for (int64_t part; to_pack.claim(part);) {
      const int64_t row = first_packed(part), height = first_packed(part + 1) - row;
      const Number* from = x + (start + row) * columns;
      const int64_t given = min(height, count - row);  // the others are padding
      if (matrix->order && given > 0) from = sort(from, given, sorted + thread * Kind::TALL * columns);
      if constexpr (Kind::IN_TILES)
        for (int64_t m = 0, at = row; m < height; ++m, ++at)
          Kind::pack_row(from + m * columns, m < given ? columns : 0, units, tall(), at % tall(),
                         packed + at / tall() * tall() * row_bytes);
      else Kind::pack_x(from, columns, units, height, packed + row * row_bytes);
    }
  }
  // The first row of a part that a thread packs: a tile, or some rows of the processor's tiles.
  int64_t first_packed(int64_t part) const {
    return Kind::IN_TILES ? min(part * ROWS_AT_ONCE, num_tiles() * tall()) : row_of(part);
  }

  // Write rows of x to `to`, in the order of the weight's columns; returns `to`.
  const Number* sort(const Number* from, int64_t rows, Number* to) const {
    const int64_t columns = matrix->columns;
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t k = 0; k < columns; ++k) to[m * columns + k] = from[m * columns + matrix->order[k]];
    return to;
  }

  // Each thread owns a range of the panels, divided into parts. It computes its own parts first, whose memory it may be
  // nearest to, and then those that other threads have not started, so that a thread without a processor delays none.
  void multiply(int thread) const {
    if constexpr (Kind::IN_TILES) Kind::begin(tall());
    for (int i = 0; i < threads; ++i) compute_range(thread, (thread + i) % threads);
    if constexpr (Kind::IN_TILES) Kind::end();
  }

  void compute_range(int thread, int64_t owner) const {
    int64_t* parts_started = &started[owner].parts;
    const int64_t panels = matrix->num_panels, from = panels * owner / threads, to = panels * (owner + 1) / threads;
    const int64_t step = Kind::IN_TILES ? 1 : Kind::panels(rows), size = max((to - from) / PARTS / step, 1) * step;
    const int64_t parts = (to - from + size - 1) / size;
    // A group is the tiles whose rows stay in the second-level cache, or fewer if there are more threads than panels.
    const int64_t tiles = num_tiles();
    int64_t group_tiles = NEAR / (Kind::row_bytes(units) * Kind::TALL);
    if (panels < threads && group_tiles > tiles * panels / threads) group_tiles = tiles * panels / threads;
    const int64_t groups = group_tiles < 1 ? tiles : (tiles + group_tiles - 1) / group_tiles;
    while (__atomic_load_n(parts_started, __ATOMIC_RELAXED) < groups * parts) {
      const int64_t part = __atomic_fetch_add(parts_started, 1, __ATOMIC_RELAXED), group = part / parts;
      if (group >= groups) return;
      const int64_t begin = from + part % parts * size, end = min(begin + size, to);
      const int64_t first = tiles * group / groups, last = tiles * (group + 1) / groups;
      if constexpr (Kind::IN_TILES) in_tiles(thread, first, last, begin, end);
      else if (rows == 1) few<1>(begin, end);
      else if (rows == 2) few<2>(begin, end);
      else if (rows == 3) few<3>(begin, end);
      else many(thread, first, last, begin, end);
    }
  }

  static void packs(void* work, int thread) { ((Matmul*)work)->pack(thread); }
  static void multiplies(void* work, int thread) { ((const Matmul*)work)->multiply(thread); }

  // Returns 0, or 1 if out of memory.
  int32_t compute(int max_threads) {
    if (rows <= 0) return 0;
    units = Kind::units(matrix->columns);
    threads = max_threads < 1 || rows * matrix->columns * matrix->num_panels * WIDTH < SMALL ? 1 : max_threads;
    const int64_t most = min(rows, BLOCK), padded = Kind::IN_TILES ? ceil_div(most, Kind::TALL) * Kind::TALL : most;
    const int64_t packed_bytes = (padded * Kind::row_bytes(units) + 63) / 64 * 64;
    const int64_t sorted_bytes = matrix->order ? threads * Kind::TALL * matrix->columns * (int64_t)sizeof(Number) : 0;
    const int64_t all_expanded = Kind::EXPANDS && rows > Kind::TALL ? threads * expanded_bytes() : 0;
    started = (Started*)scratch(threads * sizeof(Started) + packed_bytes + all_expanded + sorted_bytes);
    if (!started) return 1;
    packed = (char*)(started + threads);
    expanded = packed + packed_bytes;
    sorted = (Number*)(expanded + all_expanded);
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    for (int64_t block = 0; block < blocks; ++block) {
      start = rows * block / blocks, count = rows * (block + 1) / blocks - start;
      to_pack = {Kind::IN_TILES ? ceil_div(num_tiles() * tall(), ROWS_AT_ONCE) : num_tiles()};
      run(packs, this, count * matrix->columns <= SHORT ? 1 : threads);
      memset(started, 0, threads * sizeof(Started));
      run(multiplies, this, threads);
    }
    return 0;
  }
};

// Interleave the units of several rows of x: to[unit][row], or to[unit][EACH][row] if `spread` makes EACH vectors of a
// unit's vector. `read(row, unit)` returns LANES units of a row. Squares of units are transposed in registers. Vectors
// are stored whole, and the next store overwrites their unused lanes; only at the end is the exact number stored.
template <int EACH, class Read, class Spread>
void interleave(int64_t units, int64_t rows, Read read, Spread spread, void* to) {
  uint32_t* out = (uint32_t*)to;
  const uint32_t* end = out + units * EACH * rows;
  for (int64_t start = 0; start < units; start += LANES) {
    const int64_t count = units - start < LANES ? units - start : LANES;
    U square[LANES];
    UNROLLED for (int m = 0; m < LANES; ++m) square[m] = m < rows ? read(m, start) : set1_units(0);
    transpose(square);
    UNROLLED for (int k = 0; k < LANES; ++k) {
      if (k >= count) break;
      for (int i = 0; i < EACH; ++i, out += rows) {
        const U vector = spread(square[k], i);
        if (end - out >= LANES) {
          store_units(out, vector);
        } else {
          uint32_t lanes[LANES];
          store_units(lanes, vector);
          memcpy(out, lanes, (size_t)rows * 4);
        }
      }
    }
  }
}

// -- panels -----------------------------------------------------------------------------------------------------------

// The row of the plain weight, gate before up, that is row `j` of a panel; -1 if there is none.
inline int64_t source_row(int64_t rows, bool gated, int64_t panel, int j) {
  if (!gated) return panel * WIDTH + j < rows ? panel * WIDTH + j : -1;
  const int64_t row = panel * LANES + j % LANES, half = rows / 2;
  return row >= half ? -1 : j < LANES ? row : half + row;
}

}  // namespace
