// Which query rows make a block, which keys a row sees, and how blocks are shared out among threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "attention.h"
#include "kernels.h"

namespace softcap_cpu {

// Query rows of all the query heads that share one key head, in one list: entry f is row f / group of query
// head f % group of that group. Decoding with few rows fills its lanes with heads this way.
constexpr int64_t kBlockLanes = 64;
constexpr int64_t kBlockKeys = 64;

struct Range {
  int64_t begin;
  int64_t end;
  bool empty() const { return begin >= end; }
};

// One sequence of the batch.
struct Sequence {
  int64_t batch;    // index along the batch stride
  int64_t first_q;  // rows to skip, when packed
  int64_t first_kv;
  int64_t len_q;
  int64_t len_kv;
};

inline Sequence sequence(const Problem& p, int64_t b) {
  if (p.cu_seqlens_q == nullptr) return {b, 0, 0, p.rows_q, p.rows_kv};
  const int64_t q = p.cu_seqlens_q[b], kv = p.cu_seqlens_kv[b];
  return {0, q, kv, p.cu_seqlens_q[b + 1] - q, p.cu_seqlens_kv[b + 1] - kv};
}

// Keys that query row i sees. Causal and window masks are aligned to the bottom right corner.
Range visible_keys(const Problem& p, const Sequence& s, int64_t i);

int64_t element_size(DType dtype);

// Address of (row, head) of a sequence, for a tensor whose element type is only known at run time.
template <typename Tensor>
char* address(const Tensor& x, int64_t element_size, int64_t batch, int64_t row, int64_t head) {
  const int64_t offset = batch * x.strides.batch + row * x.strides.seq + head * x.strides.head;
  return const_cast<char*>(static_cast<const char*>(x.data)) + offset * element_size;
}

// Uninitialised memory aligned for any vector; freed with its owner.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : data_(bytes > 0 ? ::operator new(static_cast<size_t>(bytes), std::align_val_t(kAlignment))
                        : nullptr) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t(kAlignment)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_;
};

// Cuts arrays out of one piece of scratch. Run once over a null base to learn the size.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t n) {
    char* here = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (n * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(here);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Calls fn(worker, task) for every task in [0, n_tasks); tasks start in order. `fn` must not throw.
template <typename Fn>
void run_tasks(const Threads& threads, int64_t n_workers, int64_t n_tasks, const Fn& fn) {
  struct Shared {
    std::atomic<int64_t> next;
    int64_t n_tasks;
    const Fn* fn;
  } shared{{0}, n_tasks, &fn};
  auto body = [](int64_t begin, int64_t, void* context) {
    auto* shared = static_cast<Shared*>(context);
    for (int64_t task; (task = shared->next.fetch_add(1, std::memory_order_relaxed)) < shared->n_tasks;)
      (*shared->fn)(begin, task);
  };
  if (n_workers <= 1) {
    body(0, 1, &shared);
  } else {
    threads.parallel_for(n_workers, body, &shared);
  }
}

// The lanes of one block of query rows, and the keys they see.
template <typename T>
struct Lanes {
  int64_t count;              // rows in the block
  int64_t width;              // count, padded to whole vectors
  int64_t row[kBlockLanes];   // query row of the sequence
  int64_t head[kBlockLanes];  // query head
  Range keys[kBlockLanes];
  Range some;  // keys that any lane sees
  Range all;   // keys that every lane sees
};

template <typename T>
Lanes<T> make_lanes(const Problem& p, const Sequence& s, int64_t head_kv, int64_t first, int64_t last) {
  Lanes<T> lanes;
  lanes.count = last - first;
  lanes.width = padded<T>(lanes.count);
  lanes.some = {s.len_kv, 0};
  lanes.all = {0, s.len_kv};
  const int64_t group = p.heads_q / p.heads_kv;
  for (int64_t i = 0; i < lanes.count; ++i) {
    lanes.row[i] = (first + i) / group;
    lanes.head[i] = head_kv * group + (first + i) % group;
    const Range r = visible_keys(p, s, lanes.row[i]);
    lanes.keys[i] = r;
    if (r.begin > lanes.all.begin) lanes.all.begin = r.begin;
    if (r.end < lanes.all.end) lanes.all.end = r.end;
    if (r.empty()) continue;
    if (r.begin < lanes.some.begin) lanes.some.begin = r.begin;
    if (r.end > lanes.some.end) lanes.some.end = r.end;
  }
  if (lanes.all.empty()) lanes.all = {lanes.some.end, lanes.some.end};
  return lanes;
}

// Calls fn(begin, end, whole) for blocks of keys that cover what the lanes see, in order. `whole` blocks are
// seen by every lane and need no mask; the split keeps the masked blocks down to the edges of the mask.
template <typename T, typename Fn>
void for_key_blocks(const Lanes<T>& lanes, const Fn& fn) {
  const Range parts[3] = {
      {lanes.some.begin, lanes.all.begin}, {lanes.all.begin, lanes.all.end}, {lanes.all.end, lanes.some.end}};
  for (int part = 0; part < 3; ++part) {
    for (int64_t j = parts[part].begin; j < parts[part].end; j += kBlockKeys) {
      const int64_t end = j + kBlockKeys < parts[part].end ? j + kBlockKeys : parts[part].end;
      fn(j, end, part == 1);
    }
  }
}

// The mask of one tile: each lane's visible keys relative to the tile.
template <typename T>
Visible<T> tile_mask(const Lanes<T>& lanes, int64_t begin, int64_t end, typename LaneInt<T>::type* first,
                     typename LaneInt<T>::type* last) {
  using Int = typename LaneInt<T>::type;
  const int64_t rows = end - begin;
  auto clip = [&](int64_t j) { return static_cast<Int>(j < begin ? 0 : j > end ? rows : j - begin); };
  for (int64_t i = 0; i < lanes.width; ++i) {
    first[i] = i < lanes.count ? clip(lanes.keys[i].begin) : 0;
    last[i] = i < lanes.count ? clip(lanes.keys[i].end) : 0;
  }
  return {first, last};
}

}  // namespace softcap_cpu
