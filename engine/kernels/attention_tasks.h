// The division of a step's attention into tasks, and the tasks' scratch memory.
//
// A task is some tokens of one row, some KV heads and some splits. Tasks are distributed by cost, and a thread
// without work takes tasks from the others. If a row's splits belong to several tasks, the one that ends last merges
// them.
#pragma once
#include "numbers.h"
#include "work.h"

namespace {

const int TILE = 64;
const int64_t SPLIT = 1024;
const int64_t QUERIES = 96;  // of a task; their sums stay in the second-level cache
const int64_t FEW = 16;      // queries of a KV head up to which memory is the limit: a task has several heads

// How a task's queries are computed.
struct Grouping {
  int64_t tall;     // queries of a group, which are computed together
  int64_t reading;  // groups that take as long as reading a tile
  int64_t rounded;  // a task's scratch memory is for a multiple of this number of queries
};

struct Part {  // tokens and heads of a row whose splits belong to several tasks
  int64_t splits, left;
  char* states;
};

struct Task {
  int64_t row, first, count;  // `count` tokens of the row's new ones, from index `first` on
  int64_t head, heads;        // KV heads
  int64_t from, to;           // splits
  Part* part;
};

struct Cursor {  // a thread's tasks, of which other threads may claim some; a cache line of its own
  int64_t next, end, unused[6];
};

struct Space {  // a thread's scratch memory
  char *queries, *total, *current, *cells;
  int64_t* positions;
};

struct Tasks {
  const Call& call;
  const int64_t group;    // query heads of a KV head
  const int64_t padded;   // numbers of a value, see Pages
  const int64_t queries;  // maximum of a task
  const Grouping grouping;
  int threads;
  Task* tasks;
  int64_t num_tasks;
  Cursor* cursors;
  Space* spaces;

  Tasks(const Call& call, int64_t padded, Grouping grouping)
      : call(call),
        group(call.heads / call.kv_heads),
        padded(padded),
        queries(rounded_up(max(QUERIES, group), grouping.rounded)),
        grouping(grouping) {}

  static int64_t rounded_up(int64_t number, int64_t multiple) { return ceil_div(number, multiple) * multiple; }

  // A query's state: the sums of weight * value [padded], the sums of weights [LANES], and the maximum score.
  int64_t state_bytes() const { return (padded + 2 * LANES) * 4; }

  // The states of a task's queries for one split, some of them unused.
  int64_t num_states(const Task& task) const {
    return rounded_up(task.heads * task.count * group, grouping.rounded);
  }

  float* state(char* states, int64_t query) const { return (float*)(states + query * state_bytes()); }
  int64_t length(int64_t row) const { return call.query_start[row + 1] - call.query_start[row]; }
  int64_t position(const Task& task) const { return call.seq_lens[task.row] - length(task.row) + task.first; }
  int64_t end(const Task& task) const { return position(task) + task.count; }
  // The first position that a query sees.
  int64_t first_seen(int64_t position) const { return call.window ? max(0, position - call.window + 1) : 0; }

  int64_t first_split(const Task& task) const { return first_seen(position(task)) / SPLIT; }
  int64_t num_splits(const Task& task) const { return ceil_div(end(task), SPLIT) - first_split(task); }

  // The approximate cost of a task: keys times groups of queries, at least as many as take the time of reading.
  int64_t cost(const Task& task) const {
    const int64_t from = max(first_seen(position(task)), task.from * SPLIT), to = min(end(task), task.to * SPLIT);
    return (to - from + TILE) * task.heads * max(grouping.reading, ceil_div(task.count * group, grouping.tall));
  }

  // Call `visit` with a task for each (row, tokens, KV heads) that covers all splits.
  template <class Visit>
  void divide_rows(Visit visit) const {
    int64_t runs = 0;
    for (int64_t row = 0; row < call.rows; ++row) runs += ceil_div(call.seq_lens[row], SPLIT);
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t tokens = length(row);
      int64_t heads = tokens * group <= FEW ? min(max(1, QUERIES / max(1, tokens * group)), 8) : 1;
      heads = min(heads, call.kv_heads);
      while (heads > 1 && runs * ceil_div(call.kv_heads, heads) < 2 * threads) heads = (heads + 1) / 2;
      const int64_t block = max(1, QUERIES / group);
      for (int64_t head = 0; head < call.kv_heads; head += heads)
        for (int64_t first = 0; first < tokens; first += block) {
          Task task = {row, first, min(block, tokens - first), head, min(heads, call.kv_heads - head), 0, 0, nullptr};
          task.from = first_split(task);
          task.to = task.from + num_splits(task);
          visit(task);
        }
    }
  }

  // The number of tasks to divide a task's splits among, so that none costs much more than `max_cost`.
  int64_t pieces(const Task& task, int64_t max_cost) const {
    return min(num_splits(task), ceil_div(cost(task), max_cost));
  }

  // Lay out tasks and buffers in scratch memory; returns false if out of memory. query_bytes: of a query; cell_bytes: of
  // a tile's cells.
  bool plan(int64_t query_bytes, int64_t cell_bytes) {
    int64_t total_cost = 0, parts = 0, states = 0;
    divide_rows([&](const Task& task) { total_cost += cost(task); });
    const int64_t max_cost = threads == 1 ? INT64_MAX / 2 : total_cost / (4 * threads) + 1;
    num_tasks = 0;
    divide_rows([&](const Task& task) {
      const int64_t count = threads == 1 ? 1 : pieces(task, max_cost);
      num_tasks += ceil_div(num_splits(task), ceil_div(num_splits(task), count));
      if (count > 1) parts += 1, states += num_splits(task) * num_states(task);
    });
    const int64_t sizes[] = {num_tasks * (int64_t)sizeof(Task), parts * (int64_t)sizeof(Part), states * state_bytes(),
                             threads * (int64_t)sizeof(Cursor), threads * (int64_t)sizeof(Space)};
    const int64_t thread_sizes[] = {queries * query_bytes, queries * state_bytes(), queries * state_bytes(), cell_bytes,
                                    queries * 8};
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += ceil_div(size, 64) * 64;
    for (int64_t size : thread_sizes) bytes += threads * ceil_div(size, 64) * 64;
    char* memory = (char*)scratch(bytes);
    if (!memory) return false;
    auto allocate = [&](int64_t size) {
      char* address = memory;
      memory += ceil_div(size, 64) * 64;
      return address;
    };
    tasks = (Task*)allocate(sizes[0]);
    Part* part = (Part*)allocate(sizes[1]);
    char* part_states = allocate(sizes[2]);
    cursors = (Cursor*)allocate(sizes[3]);
    spaces = (Space*)allocate(sizes[4]);
    for (int t = 0; t < threads; ++t) {
      Space& space = spaces[t];
      space.queries = allocate(thread_sizes[0]);
      space.total = allocate(thread_sizes[1]), space.current = allocate(thread_sizes[2]);
      space.cells = allocate(thread_sizes[3]), space.positions = (int64_t*)allocate(thread_sizes[4]);
    }

    int64_t next = 0, so_far = 0;
    int thread = 0;
    cursors[0].next = 0;
    auto add = [&](const Task& task) {
      // A thread's tasks start where the cost of those before reaches its fraction of the total.
      while (thread + 1 < threads && so_far * threads >= total_cost * (thread + 1)) {
        cursors[thread].end = next;
        cursors[++thread].next = next;
      }
      so_far += cost(task);
      tasks[next++] = task;
    };
    divide_rows([&](Task task) {
      const int64_t count = threads == 1 ? 1 : pieces(task, max_cost);
      const int64_t splits = num_splits(task), each = ceil_div(splits, count);
      if (count > 1) {
        *part = {splits, ceil_div(splits, each), part_states};
        part_states += splits * num_states(task) * state_bytes();
        task.part = part++;
      }
      const int64_t from = task.from, to = task.to;
      for (task.from = from; task.from < to; task.from = task.to) {
        task.to = min(to, task.from + each);
        add(task);
      }
    });
    cursors[thread].end = next;
    while (++thread < threads) cursors[thread].next = cursors[thread].end = next;
    return true;
  }
};

}  // namespace
