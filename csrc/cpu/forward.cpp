#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attend.h"

namespace softcap_cpu {
namespace {

struct Task {
  int64_t batch;
  int64_t head_kv;
  int64_t first;  // of the query rows of the group, see kMaxLanes
  int64_t last;
};

// Within a head the last rows come first: under a causal mask they are the longest.
std::vector<Task> make_tasks(const Problem& p, int64_t block_lanes) {
  std::vector<Task> tasks;
  const int64_t group = p.heads_q / p.heads_kv;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t rows = sequence(p, b).len_q * group;
    const int64_t blocks = (rows + block_lanes - 1) / block_lanes;
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t i = blocks - 1; i >= 0; --i) {
        tasks.push_back({b, h, i * block_lanes, i + 1 < blocks ? (i + 1) * block_lanes : rows});
      }
    }
  }
  return tasks;
}

template <typename T>
void run_task(const ForwardArgs& args, const Products<T>& products, const Task& task, const Workspace<T>& w) {
  const Problem& p = args.problem;
  const Kernels<T>& kernel = products.kernel;
  const Sequence s = sequence(p, task.batch);
  const Lanes lanes = make_lanes(p, s, task.head_kv, task.first, task.last, padded<T>(1), {0, s.len_kv});
  const int64_t width = lanes.width;
  attend(args, products, s, task.head_kv, lanes, w);

  kernel.divide_lanes(w.out, p.head_dim, width, w.row_sum);
  const int64_t size = element_size(p.dtype);
  for (int64_t lane = 0; lane < lanes.count; ++lane) {
    const bool blind = lanes.keys[lane].empty();
    const double sum = w.row_sum[lane];
    const double lse = w.row_max[lane] + std::log(sum);
    if (blind) {
      std::fill_n(w.row, p.head_dim, T(0));
    } else {
      get_lane(w.out, p.head_dim, width, lane, w.row);
    }
    const int64_t row = s.first_q + lanes.row[lane], head = lanes.head[lane];
    kernel.store(p.dtype, w.row, 1, p.head_dim, address(args.out, size, s.batch, row, head));
    *reinterpret_cast<T*>(address(args.lse, sizeof(T), s.batch, row, head)) =
        blind ? -std::numeric_limits<T>::infinity() : static_cast<T>(lse);
  }
}

template <typename T>
void forward(const ForwardArgs& args, const Threads& threads) {
  const Problem& p = args.problem;
  const Products<T> products(p);
  const std::vector<Task> tasks = make_tasks(p, products.block_lanes());
  const int64_t n_tasks = static_cast<int64_t>(tasks.size());
  const int64_t n_workers = n_tasks < threads.count ? n_tasks : threads.count;

  Workspace<T> layout;
  const int64_t bytes = layout.carve(products, p, nullptr);
  const Scratch scratch(bytes * n_workers);
  run_tasks(threads, n_workers, n_tasks, [&](int64_t worker, int64_t task) {
    Workspace<T> workspace;
    workspace.carve(products, p, scratch.data() + worker * bytes);
    run_task(args, products, tasks[static_cast<size_t>(task)], workspace);
  });

  if (p.cu_seqlens_q != nullptr) {
    const int64_t end = p.cu_seqlens_q[p.batch];
    clear_rows(args.out, element_size(p.dtype), 0, end, p.rows_q, 0, p.heads_q, p.head_dim);
    for (int64_t head = 0; head < p.heads_q; ++head) {
      for (int64_t row = end; row < p.rows_q; ++row) {
        *reinterpret_cast<T*>(address(args.lse, sizeof(T), 0, row, head)) =
            -std::numeric_limits<T>::infinity();
      }
    }
  }
}

}  // namespace

void attention_forward(const ForwardArgs& args, const Threads& threads) {
  if (args.problem.dtype == DType::kFloat64) {
    forward<double>(args, threads);
  } else {
    forward<float>(args, threads);
  }
}

}  // namespace softcap_cpu
