// What packs weights while a model is loaded: many of them in one call, so that nothing of Python is needed meanwhile.
//
// A weight may come in parts, rows of one behind those of the other. Where they are pages of a file, the pages are read
// when their turn has come and given back once they are packed: no more of a file is held than what threads work on.
#pragma once
#include <errno.h>
#include <sys/mman.h>

#include "product.h"

namespace {

const int64_t CHUNK = 4 << 20;    // bytes of a plain weight that a thread takes at once
const int64_t PAGE_BYTES = 4096;
const int READ_NOW = 22;          // madvise's MADV_POPULATE_READ of Linux 5.14: it says so when that is impossible

// The Python classes of the same names have the same fields in the same order.
struct Part {
  const char* weight;  // [rows, columns]
  int64_t rows;
};

struct Weight {
  const Part* parts;
  void* panels;
  void* scales;  // of a quantized weight
  int64_t num_parts, rows, columns, number_bytes, num_panels;
  int32_t bits;      // of a quantized weight
  int32_t gated;     // gate before up
  int32_t from_file;

  int64_t row_bytes() const { return columns * number_bytes; }
  // The row of the plain weight that is row `j` of a panel; null where it has none.
  const char* row(int64_t panel, int j) const {
    int64_t at = source(rows, gated, panel, j);
    for (int64_t p = 0; at >= 0 && p < num_parts; at -= parts[p++].rows)
      if (at < parts[p].rows) return parts[p].weight + at * row_bytes();
    return nullptr;
  }
  int64_t chunk_panels() const {
    const int64_t panels = CHUNK / (row_bytes() * WIDTH + 1);
    return panels < 1 ? 1 : panels;
  }
  int64_t chunks() const { return (num_panels + chunk_panels() - 1) / chunk_panels(); }

  // Advise the system of the pages of rows [from, to). 0, or what it says.
  int advise(int64_t from, int64_t to, int advice) const {
    for (int64_t p = 0, first = 0; p < num_parts; first += parts[p++].rows) {
      const int64_t begin = from > first ? from - first : 0, end = to - first < parts[p].rows ? to - first : parts[p].rows;
      if (begin >= end) continue;
      const uintptr_t start = (uintptr_t)(parts[p].weight + begin * row_bytes()) / PAGE_BYTES * PAGE_BYTES;
      const uintptr_t stop = (uintptr_t)(parts[p].weight + end * row_bytes());
      if (madvise((void*)start, stop - start, advice)) return errno;
    }
    return 0;
  }
  int advise_panels(int64_t from, int64_t to, int advice) const {
    if (!from_file) return 0;
    const int64_t per_panel = gated ? LANES : WIDTH, half = gated ? rows / 2 : rows;
    const int64_t first = from * per_panel, last = to * per_panel < half ? to * per_panel : half;
    const int wrong = advise(first, last, advice);
    return wrong || !gated ? wrong : advise(half + first, half + last, advice);
  }
};

// A Kind packs panels of a weight: `room_bytes(weight)` of scratch memory that it needs, `pack(weight, from, to, room)`.
template <class Kind>
struct Packing {
  const Weight* weights;
  int64_t count;
  int64_t* done;  // bytes of plain weights, for who shows how far it has come
  char* rooms;    // one for each thread
  int64_t room_bytes;
  int64_t next;
  int32_t failed;

  void share(int thread) {
    while (!__atomic_load_n(&failed, __ATOMIC_RELAXED)) {
      int64_t chunk = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED), i = 0;
      while (i < count && chunk >= weights[i].chunks()) chunk -= weights[i++].chunks();
      if (i == count) return;
      const Weight& weight = weights[i];
      const int64_t from = chunk * weight.chunk_panels(), to = from + weight.chunk_panels();
      const int64_t end = to < weight.num_panels ? to : weight.num_panels;
      if (weight.advise_panels(from, end, READ_NOW)) {
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        return;
      }
      Kind::pack(weight, from, end, rooms + thread * room_bytes);
      weight.advise_panels(from, end, MADV_DONTNEED);
      __atomic_fetch_add(done, weight.rows * weight.row_bytes() * (end - from) / weight.num_panels, __ATOMIC_RELAXED);
    }
  }
  static void share(void* packing, int thread, int) { ((Packing*)packing)->share(thread); }

  // 0, 1 where memory is short, 2 where a file cannot be read.
  int32_t compute(int threads) {
    room_bytes = 64;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t wanted = Kind::room_bytes(weights[i]);
      if (wanted > room_bytes) room_bytes = (wanted + 63) / 64 * 64;
    }
    rooms = (char*)scratch(room_bytes * threads);
    if (!rooms) return 1;
    run(share, this, threads);
    return failed ? 2 : 0;
  }
};

}  // namespace
