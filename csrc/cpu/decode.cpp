// Decoding: queries against a cache of keys and values, read where it lies.
//
// A step of decoding has a few query rows and reads every key once, so memory sets its time. Rows are then
// kept as rows, with the head dimension along the vectors (a lane for each would leave most lanes empty), and
// a sequence's keys are split among the threads; each split leaves unfinished sums, which a second pass joins
// (Flash-Decoding, Dao et al. 2023). Splits have one size, so that results do not depend on the number of
// threads. Many rows, as in a prefill, take the way of the forward, without splits.
#include <cmath>
#include <vector>

#include "attend.h"

namespace softcap_cpu {
namespace {

constexpr int64_t kSplitKeys = 512;
constexpr int64_t kFewRows = 16;

// A block of query rows: what one task, or one task for each split of the keys, computes.
struct Block {
  int64_t batch;
  int64_t head_kv;
  int64_t first;  // of the query rows of the group, see kMaxLanes
  int64_t last;
  Range keys;  // that any of its rows sees
  int64_t splits;
  int64_t slot;  // of its first unfinished row, where it has more splits than one
  int64_t rows() const { return last - first; }
};

struct Task {
  int64_t block;
  int64_t split;
};

struct Plan {
  std::vector<Block> blocks;
  std::vector<Task> tasks;
  int64_t slots = 0;
};

Plan make_plan(const Problem& p, int64_t block_lanes) {
  Plan plan;
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t rows = p.rows_q * group;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, b);
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t first = 0; first < rows; first += block_lanes) {
        const int64_t last = first + block_lanes < rows ? first + block_lanes : rows;
        const Range keys = make_lanes(p, s, h, first, last, 1, {0, s.len_kv}).some;
        int64_t splits = 1;
        if (rows <= block_lanes && keys.end - keys.begin > kSplitKeys)
          splits = (keys.end - keys.begin + kSplitKeys - 1) / kSplitKeys;
        const int64_t block = static_cast<int64_t>(plan.blocks.size());
        plan.blocks.push_back({b, h, first, last, keys, splits, plan.slots});
        for (int64_t i = 0; i < splits; ++i) plan.tasks.push_back({block, i});
        if (splits > 1) plan.slots += splits * (last - first);
      }
    }
  }
  return plan;
}

// The sums of rows that are not finished yet.
template <typename T>
struct Unfinished {
  T* sums;  // (slots, head_dim)
  T* row_max;
  T* row_sum;

  int64_t carve(const Problem& p, int64_t slots, char* base) {
    Carver carver(base);
    sums = carver.take<T>(slots * p.head_dim);
    row_max = carver.take<T>(slots);
    row_sum = carver.take<T>(slots);
    return carver.used();
  }
};

template <typename T>
struct RowWorkspace {
  T* q;       // (rows, ld)
  T* sums;    // (rows, ld)
  T* scores;  // (rows, keys)
  T* row_max;
  T* row_sum;
  T* rescale;
  int64_t ld;

  int64_t carve(const Problem& p, char* base) {
    Carver carver(base);
    ld = padded<T>(p.head_dim);
    q = carver.take<T>(kFewRows * ld);
    sums = carver.take<T>(kFewRows * ld);
    scores = carver.take<T>(kFewRows * kBlockKeys);
    for (T** vector : {&row_max, &row_sum, &rescale}) *vector = carver.take<T>(kFewRows);
    return carver.used();
  }
};

template <typename T>
class Decoder {
 public:
  Decoder(const ForwardArgs& args, const Threads& threads)
      : args_(args), p_(args.problem), threads_(threads), products_(p_), kernel_(products_.kernel) {}

  void run() const {
    const int64_t group = p_.heads_q / p_.heads_kv;
    const bool few = p_.rows_q * group <= kFewRows && args_.k.strides.dim == 1 && args_.v.strides.dim == 1;
    const Plan plan = make_plan(p_, products_.block_lanes());

    Unfinished<T> unfinished;
    const Scratch slots(unfinished.carve(p_, plan.slots, nullptr));
    unfinished.carve(p_, plan.slots, slots.data());

    const int64_t n_tasks = static_cast<int64_t>(plan.tasks.size());
    const int64_t n_workers = n_tasks < threads_.count ? n_tasks : threads_.count;
    Workspace<T> lanes_layout;
    RowWorkspace<T> rows_layout;
    const int64_t bytes = few ? rows_layout.carve(p_, nullptr) : lanes_layout.carve(products_, p_, nullptr);
    const Scratch scratch(bytes * n_workers);
    run_tasks(threads_, n_workers, n_tasks, [&](int64_t worker, int64_t i) {
      char* const base = scratch.data() + worker * bytes;
      // The last rows first: under a causal mask they are the longest.
      const Task& task = plan.tasks[static_cast<size_t>(n_tasks - 1 - i)];
      const Block& block = plan.blocks[static_cast<size_t>(task.block)];
      if (few) {
        RowWorkspace<T> w;
        w.carve(p_, base);
        run_rows(block, task.split, w, unfinished);
      } else {
        Workspace<T> w;
        w.carve(products_, p_, base);
        run_lanes(block, task.split, w, unfinished);
      }
    });

    if (plan.slots == 0) return;
    const int64_t n_blocks = static_cast<int64_t>(plan.blocks.size());
    run_tasks(threads_, n_blocks < threads_.count ? n_blocks : threads_.count, n_blocks,
              [&](int64_t, int64_t i) { join(plan.blocks[static_cast<size_t>(i)], unfinished); });
  }

 private:
  Range keys_of(const Block& block, int64_t split) const {
    if (block.splits == 1) return block.keys;
    const int64_t begin = block.keys.begin + split * kSplitKeys, end = begin + kSplitKeys;
    return {begin, end < block.keys.end ? end : block.keys.end};
  }

  void run_rows(const Block& block, int64_t split, const RowWorkspace<T>& w,
                const Unfinished<T>& unfinished) const {
    const Sequence s = sequence(p_, block.batch);
    const Lanes lanes = make_lanes(p_, s, block.head_kv, block.first, block.last, 1, keys_of(block, split));
    const Cap<T> cap = make_cap<T>(p_);
    const int64_t n = lanes.count;
    for (int64_t i = 0; i < n; ++i) {
      load_query(kernel_, p_, args_.q, s, lanes, i, w.q + i * w.ld);
      std::fill(w.q + i * w.ld + p_.head_dim, w.q + (i + 1) * w.ld, T(0));
    }
    std::fill_n(w.sums, n * w.ld, T(0));
    std::fill_n(w.row_max, n, -std::numeric_limits<T>::infinity());
    std::fill_n(w.row_sum, n, T(0));

    auto attend_to = [&](Range keys, int64_t first, int64_t count) {
      const Rows k{p_.dtype, key_address(p_, args_.k, s, keys.begin, block.head_kv), args_.k.strides.seq,
                   keys.end - keys.begin, p_.head_dim};
      const Rows v{p_.dtype, key_address(p_, args_.v, s, keys.begin, block.head_kv), args_.v.strides.seq,
                   keys.end - keys.begin, p_.head_dim};
      kernel_.row_scores(k, w.q + first * w.ld, w.ld, count, w.scores, kBlockKeys);
      for (int64_t i = 0; i < count; ++i) {
        w.rescale[i] = kernel_.row_softmax(w.scores + i * kBlockKeys, k.count, cap, w.row_max + first + i,
                                           w.row_sum + first + i);
      }
      kernel_.row_sums(v, w.scores, kBlockKeys, w.rescale, count, w.sums + first * w.ld, w.ld);
    };
    for_steps(s, lanes, 1, [&](const Step& step) {
      if (!step.masked) return attend_to({step.begin, step.end}, 0, n);
      for (int64_t i = step.first; i < step.last; ++i) {
        const Range keys{std::max(step.begin, lanes.keys[i].begin), std::min(step.end, lanes.keys[i].end)};
        if (!keys.empty()) attend_to(keys, i, 1);
      }
    });
    for (int64_t i = 0; i < n; ++i) {
      leave(block, split, s, i, w.sums + i * w.ld, w.row_max[i], w.row_sum[i], unfinished);
    }
  }

  void run_lanes(const Block& block, int64_t split, const Workspace<T>& w,
                 const Unfinished<T>& unfinished) const {
    const Sequence s = sequence(p_, block.batch);
    const Lanes lanes =
        make_lanes(p_, s, block.head_kv, block.first, block.last, padded<T>(1), keys_of(block, split));
    attend(args_, products_, s, block.head_kv, lanes, w);
    for (int64_t i = 0; i < lanes.count; ++i) {
      get_lane(w.out, p_.head_dim, lanes.width, i, w.row);
      leave(block, split, s, i, w.row, w.row_max[i], w.row_sum[i], unfinished);
    }
  }

  // Takes what a task has summed up for row i of its block: the end of it, or one split of more.
  void leave(const Block& block, int64_t split, const Sequence& s, int64_t i, T* sums, T row_max, T row_sum,
             const Unfinished<T>& unfinished) const {
    if (block.splits == 1) return finish(block, s, i, sums, row_max, row_sum);
    const int64_t slot = block.slot + split * block.rows() + i;
    std::copy_n(sums, p_.head_dim, unfinished.sums + slot * p_.head_dim);
    unfinished.row_max[slot] = row_max;
    unfinished.row_sum[slot] = row_sum;
  }

  // Joins the splits of a block: each is brought to the largest maximum, then they add up.
  void join(const Block& block, const Unfinished<T>& unfinished) const {
    if (block.splits == 1) return;
    const Sequence s = sequence(p_, block.batch);
    const int64_t d = p_.head_dim;
    for (int64_t i = 0; i < block.rows(); ++i) {
      const int64_t slot = block.slot + i;
      T top = -std::numeric_limits<T>::infinity();
      for (int64_t j = 0; j < block.splits; ++j)
        top = std::max(top, unfinished.row_max[slot + j * block.rows()]);
      const T base = top == -std::numeric_limits<T>::infinity() ? T(0) : top;
      T* const sums = unfinished.sums + slot * d;
      T sum = 0;
      for (int64_t j = 0; j < block.splits; ++j) {
        const int64_t from = slot + j * block.rows();
        const T factor = std::exp(unfinished.row_max[from] - base);
        sum += factor * unfinished.row_sum[from];
        const T* const add = unfinished.sums + from * d;
        for (int64_t x = 0; x < d; ++x) sums[x] = (j == 0 ? T(0) : sums[x]) + factor * add[x];
      }
      finish(block, s, i, sums, top, sum);
    }
  }

  // Writes out and lse of row i of a block.
  void finish(const Block& block, const Sequence& s, int64_t i, T* sums, T row_max, T row_sum) const {
    const int64_t group = p_.heads_q / p_.heads_kv;
    const int64_t row = (block.first + i) / group, head = block.head_kv * group + (block.first + i) % group;
    const bool blind = visible_keys(p_, s, row).empty();
    for (int64_t x = 0; x < p_.head_dim; ++x) sums[x] = blind ? T(0) : sums[x] / row_sum;
    kernel_.store(p_.dtype, sums, 1, p_.head_dim,
                  address(args_.out, element_size(p_.dtype), s.batch, row, head));
    if (args_.lse.data == nullptr) return;
    const double lse = row_max + std::log(static_cast<double>(row_sum));
    *reinterpret_cast<T*>(address(args_.lse, sizeof(T), s.batch, row, head)) =
        blind ? -std::numeric_limits<T>::infinity() : static_cast<T>(lse);
  }

  const ForwardArgs& args_;
  const Problem& p_;
  const Threads& threads_;
  const Products<T> products_;
  const Kernels<T>& kernel_;
};

}  // namespace

void attention_decode(const ForwardArgs& args, const Threads& threads) {
  if (args.problem.dtype == DType::kFloat64) {
    Decoder<double>(args, threads).run();
  } else {
    Decoder<float>(args, threads).run();
  }
}

}  // namespace softcap_cpu
