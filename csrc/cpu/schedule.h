// Which query rows make a block, which keys a row sees, and how blocks are shared out among threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "attention.h"
#include "kernels.h"

namespace softcap_cpu {

// A block of query rows is cut from the rows of all the query heads that share one key head, in one list:
// entry f is row f / group of query head f % group of that group. Decoding with few rows fills its lanes with
// heads this way.
constexpr int64_t kMaxLanes = 128;
constexpr int64_t kBlockKeys = 64;
// At the edges of the mask, where smaller steps leave less to compute in vain.
constexpr int64_t kEdgeKeys = 32;

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
  int64_t block_size = 0;  // of a cache in blocks, else 0

  // The end of the keys that lie in one piece with key j.
  int64_t piece_end(int64_t j) const {
    if (block_size == 0) return len_kv;
    const int64_t end = ((first_kv + j) / block_size + 1) * block_size - first_kv;
    return end < len_kv ? end : len_kv;
  }
};

inline Sequence sequence(const Problem& p, int64_t b) {
  if (p.cache.seqlens != nullptr) {
    const int64_t first = p.cache.leftpad == nullptr ? 0 : p.cache.leftpad[b];
    const int64_t len = p.cache.seqlens[b] - first;
    return {b, 0, first, p.rows_q, len < 0 ? 0 : len, p.cache.block_size};
  }
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

// Address of key j of a sequence.
inline const char* key_address(const Problem& p, const Input& x, const Sequence& s, int64_t j, int64_t head) {
  int64_t batch = s.batch, row = s.first_kv + j;
  if (s.block_size != 0) {
    batch = p.cache.block_table[s.batch * p.cache.table_batch + row / s.block_size * p.cache.table_block];
    row %= s.block_size;
  }
  return address(x, element_size(p.dtype), batch, row, head);
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
struct Lanes {
  int64_t count;            // rows in the block
  int64_t width;            // count, padded to whole vectors
  int64_t row[kMaxLanes];   // query row of the sequence
  int64_t head[kMaxLanes];  // query head
  Range keys[kMaxLanes];
  Range some;  // keys that any lane sees
  Range all;   // keys that every lane sees
};

// The rows [first, last) of a group, as far as they see keys in `within`.
Lanes make_lanes(const Problem& p, const Sequence& s, int64_t head_kv, int64_t first, int64_t last,
                 int64_t unit, Range within);

// Keys [begin, end) against lanes [first, last), whole vectors of them. The other lanes see none of these
// keys. Unless `masked`, these lanes see all of them.
struct Step {
  int64_t begin;
  int64_t end;
  int64_t first;
  int64_t last;
  bool masked;
  int64_t keys() const { return end - begin; }
  int64_t lanes() const { return last - first; }
};

// The lanes, in whole vectors of `unit`, of which any sees any of the keys.
Range lanes_that_see(const Lanes& lanes, int64_t begin, int64_t end, int64_t unit);

// Calls fn(step) for steps that cover what the lanes see, in order of the keys, each within one piece of
// them. The split keeps the masked steps to the edges of the mask.
template <typename Fn>
void for_steps(const Sequence& s, const Lanes& lanes, int64_t unit, const Fn& fn) {
  const Range parts[3] = {
      {lanes.some.begin, lanes.all.begin}, {lanes.all.begin, lanes.all.end}, {lanes.all.end, lanes.some.end}};
  for (int part = 0; part < 3; ++part) {
    const bool masked = part != 1;
    const int64_t size = masked ? kEdgeKeys : kBlockKeys;
    for (int64_t begin = parts[part].begin, end; begin < parts[part].end; begin = end) {
      end = begin + size < parts[part].end ? begin + size : parts[part].end;
      const int64_t piece = s.piece_end(begin);
      if (piece < end) end = piece;
      const Range seeing = masked ? lanes_that_see(lanes, begin, end, unit) : Range{0, lanes.width};
      if (!seeing.empty()) fn(Step{begin, end, seeing.begin, seeing.end, masked});
    }
  }
}

// The mask of one step: each lane's visible keys, counted from the first key of the step.
template <typename T>
Visible<T> step_mask(const Lanes& lanes, const Step& step, typename LaneInt<T>::type* first,
                     typename LaneInt<T>::type* last) {
  using Int = typename LaneInt<T>::type;
  if (!step.masked) return {};
  auto clip = [&](int64_t j) {
    return static_cast<Int>(j < step.begin ? 0 : j > step.end ? step.keys() : j - step.begin);
  };
  for (int64_t i = step.first; i < step.last; ++i) {
    first[i - step.first] = i < lanes.count ? clip(lanes.keys[i].begin) : 0;
    last[i - step.first] = i < lanes.count ? clip(lanes.keys[i].end) : 0;
  }
  return {first, last};
}

}  // namespace softcap_cpu
