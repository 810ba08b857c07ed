#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "blocks.h"

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
struct Workspace {
  using Int = typename LaneInt<T>::type;
  QueryMatrix<T> q;  // (head_dim, lanes)
  T* out;            // (head_dim, lanes)
  T* tile;           // (keys, lanes)
  T* row;            // one row
  T* row_max;        // (lanes), as are the rest
  T* row_sum;
  T* rescale;
  Int* first;
  Int* last;
  ProductScratch<T> products;

  int64_t carve(const Products<T>& products_of, const Problem& p, char* base) {
    const int64_t lanes = products_of.block_lanes();
    Carver carver(base);
    q = products_of.carve_matrix(p.head_dim, lanes, &carver);
    out = carver.take<T>(p.head_dim * lanes);
    tile = carver.take<T>(kBlockKeys * lanes);
    row = carver.take<T>(p.head_dim);
    for (T** vector : {&row_max, &row_sum, &rescale}) *vector = carver.take<T>(lanes);
    for (Int** vector : {&first, &last}) *vector = carver.take<Int>(lanes);
    products = products_of.carve(&carver);
    return carver.used();
  }
};

template <typename T>
void run_task(const ForwardArgs& args, const Products<T>& products, const Task& task, const Workspace<T>& w) {
  const Problem& p = args.problem;
  const Kernels<T>& kernel = products.kernel;
  const Sequence s = sequence(p, task.batch);
  const int64_t unit = padded<T>(1);
  const Lanes lanes = make_lanes(p, s, task.head_kv, task.first, task.last, unit);
  const Cap<T> cap = make_cap<T>(p);
  const int64_t width = lanes.width;

  clear_spare_lanes(lanes, p.head_dim, w.q.data);
  for (int64_t lane = 0; lane < lanes.count; ++lane) {
    load_query(kernel, p, args.q, s, lanes, lane, w.row);
    set_lane(w.row, p.head_dim, width, lane, w.q.data);
  }
  products.make_pairs(w.q, p.head_dim, width);
  std::fill_n(w.out, p.head_dim * width, T(0));
  std::fill_n(w.row_max, width, -std::numeric_limits<T>::infinity());
  std::fill_n(w.row_sum, width, T(0));

  for_steps(lanes, unit, [&](const Step& step) {
    const Visible<T> visible = step_mask<T>(lanes, step, w.first, w.last);
    const KeyBlock<T> k = products.load_keys(args.k, s, task.head_kv, step, w.products);
    products.over_dims(k, w.q, width, step, w.tile);
    kernel.softmax_tile(w.tile, step.keys(), step.lanes(), cap, visible, w.row_max + step.first,
                        w.row_sum + step.first, w.rescale);
    const KeyBlock<T> v = products.load_keys(args.v, s, task.head_kv, step, w.products);
    products.over_keys(v, w.tile, visible, w.rescale, width, step, w.out, w.products);
  });

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
