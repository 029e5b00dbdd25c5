// What packs weights while a model is loaded: many of them in one call, so that nothing of Python is needed meanwhile.
//
// A weight may come in parts, rows of one behind those of the other, from memory or from files. Of a file no more is
// held than what the threads work on: a piece is read to where it stays in the second cache until it is packed, which
// takes less than to have the file's pages mapped.
#pragma once
#include <errno.h>
#include <unistd.h>

#include "matmul.h"

namespace {

const int64_t CHUNK = 512 << 10;  // bytes of a plain weight that a thread takes at once, or one panel

struct Weight : PlainWeight {
  int64_t row_bytes() const { return columns * number_bytes; }
  int64_t per_panel() const { return gated ? LANES : WIDTH; }
  int64_t half() const { return gated ? rows / 2 : rows; }
  int64_t chunk_panels() const {
    const int64_t bytes = row_bytes() * WIDTH;
    return bytes > 0 && bytes < CHUNK ? CHUNK / bytes : 1;
  }
  int64_t chunks() const { return (num_panels + chunk_panels() - 1) / chunk_panels(); }
  bool in_memory() const { return parts[0].weight != nullptr; }
};

// Some panels' rows of a plain weight.
struct Rows {
  const Weight& weight;
  const int64_t first, last;  // panels
  char* room;                 // for what comes from files

  static int64_t room_bytes(const Weight& weight) {
    return weight.in_memory() ? 0 : weight.chunk_panels() * WIDTH * weight.row_bytes();
  }

  // Row `j` of a panel; null where it has none.
  const char* row(int64_t panel, int j) const {
    int64_t at = source(weight.rows, weight.gated, panel, j);
    if (at < 0) return nullptr;
    if (!weight.in_memory()) {
      const bool up = weight.gated && at >= weight.half();
      at -= first * weight.per_panel();
      return room + (up ? at - weight.half() + (last - first) * weight.per_panel() : at) * weight.row_bytes();
    }
    const WeightPart* part = weight.parts;
    for (; at >= part->rows; ++part) at -= part->rows;
    return part->weight + at * weight.row_bytes();
  }

  bool read(Progress* progress) const {
    if (weight.in_memory()) return true;
    const int64_t from = first * weight.per_panel(), most = last * weight.per_panel();
    const int64_t to = most < weight.half() ? most : weight.half();
    if (!read(from, to, room, progress)) return false;
    char* second = room + (most - from) * weight.row_bytes();
    return !weight.gated || read(weight.half() + from, weight.half() + to, second, progress);
  }

  bool read(int64_t from, int64_t to, char* place, Progress* progress) const {
    for (const WeightPart* part = weight.parts; from < to; from -= part->rows, to -= part->rows, ++part) {
      if (from >= part->rows) continue;
      int64_t left = ((to < part->rows ? to : part->rows) - from) * weight.row_bytes();
      int64_t at = part->offset + from * weight.row_bytes();
      from = to < part->rows ? to : part->rows;
      while (left > 0) {
        const ssize_t count = pread(part->file, place, (size_t)left, at);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
          progress->error = count ? errno : 0, progress->wrong = part->file;
          return false;
        }
        place += count, at += count, left -= count;
      }
    }
    return true;
  }
};

// A Kind packs: `room_bytes(weight)` of scratch memory that it needs beside the rows, `pack(rows, room)`.
template <class Kind>
struct Packing {
  const Weight* weights;
  int64_t count;
  Progress* progress;
  char* rooms;    // one for each thread
  int64_t room_bytes;
  int32_t failed;
  Parts chunks = {};

  static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  void share(int thread) {
    for (int64_t chunk, i; !__atomic_load_n(&failed, __ATOMIC_RELAXED) && chunks.take(chunk);) {
      for (i = 0; chunk >= weights[i].chunks(); ++i) chunk -= weights[i].chunks();
      const Weight& weight = weights[i];
      const int64_t first = chunk * weight.chunk_panels(), last = first + weight.chunk_panels();
      char* room = rooms + thread * room_bytes;
      const Rows rows = {weight, first, last < weight.num_panels ? last : weight.num_panels, room};
      Progress wrong = {};
      if (!rows.read(&wrong)) {
        if (!__atomic_exchange_n(&failed, 1, __ATOMIC_RELAXED)) progress->error = wrong.error, progress->wrong = wrong.wrong;
        return;
      }
      Kind::pack(rows, room + aligned(Rows::room_bytes(weight)));
      const int64_t bytes = weight.rows * weight.row_bytes();
      __atomic_fetch_add(&progress->num_bytes, bytes * (rows.last - first) / weight.num_panels, __ATOMIC_RELAXED);
    }
  }
  static void share(void* packing, int thread) { ((Packing*)packing)->share(thread); }

  // 0, 1 where memory is short, 2 where a file cannot be read.
  int32_t compute(int threads) {
    room_bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t wanted = aligned(Rows::room_bytes(weights[i])) + aligned(Kind::room_bytes(weights[i]));
      if (wanted > room_bytes) room_bytes = wanted;
      chunks.count += weights[i].chunks();
    }
    rooms = (char*)scratch(room_bytes * threads + 1);
    if (!rooms) return 1;
    run(share, this, threads);
    return failed ? 2 : 0;
  }
};

}  // namespace
