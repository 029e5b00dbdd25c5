// Packs weights while a model is loaded, many in one call, so that the threads do not need Python meanwhile.
//
// A weight may consist of several parts, one after another, from memory or from files. Files are read in chunks that
// stay in the second-level cache until they are packed, which is faster than mapping the files and keeps memory use
// low.
#pragma once
#include <errno.h>
#include <unistd.h>

#include "matmul.h"

namespace {

const int64_t CHUNK = 512 << 10;  // bytes of a plain weight that a thread packs at once, but at least a panel
const int64_t AHEAD = 512;        // bytes of a row to prefetch ahead

struct Weight : PlainWeight {
  int64_t per_panel() const { return gated ? LANES : WIDTH; }
  int64_t half() const { return gated ? rows / 2 : rows; }
  int64_t chunk_panels() const {
    const int64_t bytes = row_bytes * WIDTH;
    return bytes > 0 && bytes < CHUNK ? CHUNK / bytes : 1;
  }
  int64_t chunks() const { return (num_panels + chunk_panels() - 1) / chunk_panels(); }
  bool in_memory() const { return parts[0].weight != nullptr; }
};

// The rows of a plain weight that belong to some panels.
struct Rows {
  const Weight& weight;
  const int64_t first, last;  // panels
  char* buffer;               // for rows read from files

  static int64_t scratch_bytes(const Weight& weight) {
    return weight.in_memory() ? 0 : weight.chunk_panels() * WIDTH * weight.row_bytes;
  }

  // Row `j` of a panel; null if the panel has no such row.
  const char* row(int64_t panel, int j) const {
    int64_t at = source_row(weight.rows, weight.gated, panel, j);
    if (at < 0) return nullptr;
    if (!weight.in_memory()) {
      const bool second_half = weight.gated && at >= weight.half();
      at -= first * weight.per_panel();
      return buffer + (second_half ? at - weight.half() + (last - first) * weight.per_panel() : at) * weight.row_bytes;
    }
    const WeightPart* part = weight.parts;
    for (; at >= part->rows; ++part) at -= part->rows;
    if (const int64_t head = part->interleaved) at = at / head * head + at % (head / 2) * 2 + at % head / (head / 2);
    return part->weight + at * weight.row_bytes;
  }

  bool read(Progress* progress) const {
    if (weight.in_memory()) return true;
    const int64_t from = first * weight.per_panel(), limit = last * weight.per_panel();
    const int64_t to = limit < weight.half() ? limit : weight.half();
    if (!read(from, to, buffer, progress)) return false;
    char* second = buffer + (limit - from) * weight.row_bytes;
    return !weight.gated || read(weight.half() + from, weight.half() + to, second, progress);
  }

  bool read(int64_t from, int64_t to, char* out, Progress* progress) const {
    for (const WeightPart* part = weight.parts; from < to; from -= part->rows, to -= part->rows, ++part) {
      if (from >= part->rows) continue;
      int64_t left = ((to < part->rows ? to : part->rows) - from) * weight.row_bytes;
      int64_t at = part->offset + from * weight.row_bytes;
      from = to < part->rows ? to : part->rows;
      while (left > 0) {
        const ssize_t count = pread(part->file, out, (size_t)left, at);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
          progress->error = count ? errno : 0, progress->wrong = part->file;
          return false;
        }
        out += count, at += count, left -= count;
      }
    }
    return true;
  }
};

// Transpose LANES units of LANES rows. Prefetches, because these are more streams than the processor follows by itself.
void transpose_square(const char* const* from, int64_t u, uint32_t* to) {
  U units[LANES];
  UNROLLED for (int j = 0; j < LANES; ++j) {
    units[j] = from[j] ? load_units(from[j] + 4 * u) : set1_units(0);
    if (from[j]) __builtin_prefetch(from[j] + 4 * u + AHEAD);
  }
  transpose(units);
  UNROLLED for (int k = 0; k < LANES; ++k) store_units(to + (u + k) * WIDTH, units[k]);
}

// Write the numbers of a panel, as they are, to `out`.
void pack_panel(const Rows& rows, int64_t panel, char* out) {
  const int64_t row_bytes = rows.weight.row_bytes, units = (row_bytes + 3) / 4, whole = row_bytes / 4 / LANES * LANES;
  uint32_t* to = (uint32_t*)out;
  const char* from[WIDTH];  // null for a missing row
  for (int j = 0; j < WIDTH; ++j) from[j] = rows.row(panel, j);
  for (int64_t u = 0; u < whole; u += LANES)
    for (int half = 0; half < WIDTH; half += LANES) transpose_square(from + half, u, to + half);
  for (int64_t u = whole; u < units; ++u)
    for (int j = 0; j < WIDTH; ++j) {
      uint32_t unit = 0;
      if (from[j]) memcpy(&unit, from[j] + 4 * u, row_bytes - 4 * u < 4 ? 2 : 4);
      to[u * WIDTH + j] = unit;
    }
}

// A Packer has `scratch_bytes(weight)`, the scratch memory it needs beside the rows, and `pack(rows, buffer)`.
template <class Packer>
struct Packing {
  const Weight* weights;
  int64_t count;
  Progress* progress;
  char* buffers;  // one for each thread
  int64_t scratch_bytes;
  int32_t failed;
  Parts chunks = {};

  static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  void share(int thread) {
    for (int64_t chunk, i; !__atomic_load_n(&failed, __ATOMIC_RELAXED) && chunks.claim(chunk);) {
      for (i = 0; chunk >= weights[i].chunks(); ++i) chunk -= weights[i].chunks();
      const Weight& weight = weights[i];
      const int64_t first = chunk * weight.chunk_panels(), last = first + weight.chunk_panels();
      char* buffer = buffers + thread * scratch_bytes;
      const Rows rows = {weight, first, last < weight.num_panels ? last : weight.num_panels, buffer};
      Progress result = {};
      if (!rows.read(&result)) {
        if (!__atomic_exchange_n(&failed, 1, __ATOMIC_RELAXED))
          progress->error = result.error, progress->wrong = result.wrong;
        return;
      }
      Packer::pack(rows, buffer + aligned(Rows::scratch_bytes(weight)));
      const int64_t bytes = weight.rows * weight.row_bytes;
      __atomic_fetch_add(&progress->num_bytes, bytes * (rows.last - first) / weight.num_panels, __ATOMIC_RELAXED);
    }
  }
  static void share(void* packing, int thread) { ((Packing*)packing)->share(thread); }

  // Returns 0, 1 if out of memory, or 2 if a file cannot be read.
  int32_t compute(int threads) {
    scratch_bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t needed = aligned(Rows::scratch_bytes(weights[i])) + aligned(Packer::scratch_bytes(weights[i]));
      if (needed > scratch_bytes) scratch_bytes = needed;
      chunks.count += weights[i].chunks();
    }
    buffers = (char*)scratch(scratch_bytes * threads + 1);
    if (!buffers) return 1;
    run(share, this, threads);
    return failed ? 2 : 0;
  }
};

}  // namespace
