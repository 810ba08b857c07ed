#include <cmath>
#include <limits>
#include <vector>

#include "blocks.h"

namespace softcap_cpu {
namespace {

struct Task {
  int64_t batch;
  int64_t head_kv;
  int64_t first;  // of the query rows of the group, see kBlockLanes
  int64_t last;
};

// Within a head the last rows come first: under a causal mask they are the longest.
std::vector<Task> make_tasks(const Problem& p) {
  std::vector<Task> tasks;
  const int64_t group = p.heads_q / p.heads_kv;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t rows = sequence(p, b).len_q * group;
    const int64_t blocks = (rows + kBlockLanes - 1) / kBlockLanes;
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t i = blocks - 1; i >= 0; --i) {
        tasks.push_back({b, h, i * kBlockLanes, i + 1 < blocks ? (i + 1) * kBlockLanes : rows});
      }
    }
  }
  return tasks;
}

template <typename T>
struct Workspace {
  T* q;        // (head_dim, lanes)
  T* out;      // (head_dim, lanes)
  T* tile;     // (keys, lanes)
  T* keys;     // (keys, head_dim), for k and then v where they need converting
  T* row;      // one row
  T* row_max;  // (lanes), as are the rest
  T* row_sum;
  T* rescale;
  typename LaneInt<T>::type* first;
  typename LaneInt<T>::type* last;

  int64_t carve(const Problem& p, char* base) {
    Carver carver(base);
    q = carver.take<T>(p.head_dim * kBlockLanes);
    out = carver.take<T>(p.head_dim * kBlockLanes);
    tile = carver.take<T>(kBlockKeys * kBlockLanes);
    keys = carver.take<T>(p.dtype == native_dtype<T>() ? 0 : kBlockKeys * p.head_dim);
    row = carver.take<T>(p.head_dim);
    row_max = carver.take<T>(kBlockLanes);
    row_sum = carver.take<T>(kBlockLanes);
    rescale = carver.take<T>(kBlockLanes);
    first = carver.take<typename LaneInt<T>::type>(kBlockLanes);
    last = carver.take<typename LaneInt<T>::type>(kBlockLanes);
    return carver.used();
  }
};

template <typename T>
void run_task(const ForwardArgs& args, const Kernels<T>& kernel, const Task& task, const Workspace<T>& w) {
  const Problem& p = args.problem;
  const Sequence s = sequence(p, task.batch);
  const Lanes<T> lanes = make_lanes<T>(p, s, task.head_kv, task.first, task.last);
  const Cap<T> cap = make_cap<T>(p);
  const int64_t width = lanes.width;

  clear_spare_lanes(lanes, p.head_dim, w.q);
  for (int64_t lane = 0; lane < lanes.count; ++lane) {
    load_query(kernel, p, args.q, s, lanes, lane, w.row);
    set_lane(w.row, p.head_dim, width, lane, w.q);
  }
  for (int64_t lane = 0; lane < width; ++lane) {
    w.row_max[lane] = -std::numeric_limits<T>::infinity();
    w.row_sum[lane] = 0;
  }

  bool fresh = true;
  for_key_blocks(lanes, [&](int64_t begin, int64_t end, bool whole) {
    const int64_t rows = end - begin;
    const Visible<T> visible = whole ? Visible<T>{} : tile_mask(lanes, begin, end, w.first, w.last);

    const KeyBlock<T> k = load_keys(kernel, p, args.k, s, task.head_kv, begin, end, w.keys);
    Gemm<T> scores{rows, width, p.head_dim, k.data, k.row_stride, k.col_stride, w.q, width, w.tile, width};
    scores.overwrite = true;
    kernel.gemm(scores);

    kernel.softmax_tile(w.tile, rows, width, cap, visible, w.row_max, w.row_sum, w.rescale);

    const KeyBlock<T> v = load_keys(kernel, p, args.v, s, task.head_kv, begin, end, w.keys);
    Gemm<T> weighted{p.head_dim,   width,  rows,  v.data, v.col_stride,
                     v.row_stride, w.tile, width, w.out,  width};
    weighted.overwrite = fresh;
    weighted.beta = w.rescale;
    if (!whole && !kernel.all_finite(v.data, rows, p.head_dim, v.row_stride, v.col_stride)) {
      kernel.gemm_visible_columns(weighted, visible);
    } else {
      kernel.gemm(weighted);
    }
    fresh = false;
  });

  const int64_t size = element_size(p.dtype);
  for (int64_t lane = 0; lane < lanes.count; ++lane) {
    const bool blind = lanes.keys[lane].empty();
    const double sum = w.row_sum[lane];
    const double lse = w.row_max[lane] + std::log(sum);
    for (int64_t d = 0; d < p.head_dim; ++d) {
      w.row[d] = blind ? T(0) : static_cast<T>(w.out[d * width + lane] / w.row_sum[lane]);
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
  const Kernels<T>& kernel = kernels<T>();
  const std::vector<Task> tasks = make_tasks(p);
  const int64_t n_tasks = static_cast<int64_t>(tasks.size());
  const int64_t n_workers = n_tasks < threads.count ? n_tasks : threads.count;

  Workspace<T> layout;
  const int64_t bytes = layout.carve(p, nullptr);
  const Scratch scratch(bytes * n_workers);
  run_tasks(threads, n_workers, n_tasks, [&](int64_t worker, int64_t task) {
    Workspace<T> workspace;
    workspace.carve(p, scratch.data() + worker * bytes);
    run_task(args, kernel, tasks[static_cast<size_t>(task)], workspace);
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
