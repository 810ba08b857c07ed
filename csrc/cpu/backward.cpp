#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "blocks.h"

namespace softcap_cpu {
namespace {

// A run of query blocks of one group (a sequence and a key head). It finishes the dq of its rows. What it
// adds to dk and dv goes into sums of its own, over the keys that it sees; a run that is alone in its group
// writes them out itself, else they are added up in order afterwards. So the result depends on the number of
// threads, but never on their timing.
struct Run {
  int64_t group;
  int64_t first;  // of the query rows of the group, see kMaxLanes
  int64_t last;
  Range keys;
  int64_t cost;
  int64_t sums;  // where its sums start in the shared workspace; -1 when it is alone
};

struct Group {
  int64_t batch;
  int64_t head_kv;
  int64_t first_run;
  int64_t last_run;
};

struct Plan {
  std::vector<Group> groups;
  std::vector<Run> runs;
  std::vector<int64_t> order;  // of the runs, heaviest first
  int64_t shared_sums = 0;     // elements
  int64_t private_sums = 0;    // elements, for each worker
};

Range join(Range a, Range b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// Cuts the query rows of every group into runs of about `target` cost, counted in visible (query, key) pairs.
Plan cut(const Problem& p, int64_t block_lanes, int64_t target) {
  Plan plan;
  const int64_t heads = p.heads_q / p.heads_kv;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, b);
    const int64_t rows = s.len_q * heads;
    std::vector<Run> runs(1, Run{0, 0, 0, {0, 0}, 0, -1});
    for (int64_t first = 0; first < rows; first += block_lanes) {
      const int64_t last = std::min(first + block_lanes, rows);
      // The ranges of consecutive rows only move to the right, so the first and the last that see anything
      // suffice.
      Range keys{0, 0};
      for (int64_t row = first / heads; row <= (last - 1) / heads && keys.empty(); ++row)
        keys = visible_keys(p, s, row);
      keys = join(keys, visible_keys(p, s, (last - 1) / heads));
      const int64_t cost = (last - first) * (keys.end - keys.begin);
      if (runs.back().cost > 0 && runs.back().cost + cost / 2 > target) {
        runs.push_back({0, first, first, {0, 0}, 0, -1});
      }
      Run& run = runs.back();
      run.last = last;
      run.keys = join(run.keys, keys);
      run.cost += cost;
    }
    for (int64_t head = 0; head < p.heads_kv; ++head) {
      const int64_t first_run = static_cast<int64_t>(plan.runs.size());
      for (Run run : runs) {
        run.group = static_cast<int64_t>(plan.groups.size());
        plan.runs.push_back(run);
      }
      plan.groups.push_back({b, head, first_run, static_cast<int64_t>(plan.runs.size())});
    }
  }
  for (size_t i = 0; i < plan.runs.size(); ++i) plan.order.push_back(static_cast<int64_t>(i));
  std::stable_sort(plan.order.begin(), plan.order.end(), [&](int64_t a, int64_t b) {
    return plan.runs[static_cast<size_t>(a)].cost > plan.runs[static_cast<size_t>(b)].cost;
  });
  return plan;
}

// Cost of the busiest worker when the runs are taken in order.
int64_t makespan(const Plan& plan, int64_t workers) {
  std::vector<int64_t> load(static_cast<size_t>(workers), 0);
  for (int64_t i : plan.order)
    *std::min_element(load.begin(), load.end()) += plan.runs[static_cast<size_t>(i)].cost;
  return *std::max_element(load.begin(), load.end());
}

// The fewest cuts that keep all workers busy: every cut costs memory for another set of sums.
Plan balance(const Problem& p, int64_t block_lanes, int64_t workers) {
  Plan plan = cut(p, block_lanes, std::numeric_limits<int64_t>::max());
  int64_t total = 0;
  for (const Run& run : plan.runs) total += run.cost;
  const int64_t share = total / workers + 1;
  for (int64_t pieces = 1; pieces <= 4 && makespan(plan, workers) > share + share / 8; ++pieces) {
    plan = cut(p, block_lanes, share / pieces);
  }
  return plan;
}

void place_sums(Plan* plan, int64_t row_elements) {
  for (Run& run : plan->runs) {
    const Group& group = plan->groups[static_cast<size_t>(run.group)];
    const int64_t elements = (run.keys.end - run.keys.begin) * row_elements;
    if (group.last_run - group.first_run == 1) {
      plan->private_sums = std::max(plan->private_sums, elements);
    } else {
      run.sums = plan->shared_sums;
      plan->shared_sums += elements;
    }
  }
}

template <typename T>
struct Workspace {
  using Int = typename LaneInt<T>::type;
  QueryMatrix<T> q;          // (head_dim, lanes)
  QueryMatrix<T> dout;       // (head_dim, lanes)
  QueryMatrix<T> q_rows;     // (lanes, padded head_dim)
  QueryMatrix<T> dout_rows;  // (lanes, padded head_dim)
  T* dq;                     // (head_dim, lanes)
  T* tile;                   // (keys, lanes)
  T* dp;                     // (keys, lanes)
  T* row;                    // one row
  T* lse;                    // (lanes), as are the next
  T* delta;
  Int* first;
  Int* last;
  ProductScratch<T> k;
  ProductScratch<T> v;
  T* sums;  // for a run that is alone

  int64_t carve(const Products<T>& products, const Problem& p, int64_t private_sums, char* base) {
    const int64_t lanes = products.block_lanes(), ld = padded<T>(p.head_dim);
    Carver carver(base);
    for (auto* matrix : {&q, &dout}) *matrix = products.carve_matrix(p.head_dim, lanes, &carver);
    for (auto* matrix : {&q_rows, &dout_rows}) *matrix = products.carve_matrix(lanes, ld, &carver);
    dq = carver.take<T>(p.head_dim * lanes);
    for (T** matrix : {&tile, &dp}) *matrix = carver.take<T>(kBlockKeys * lanes);
    row = carver.take<T>(ld);
    for (T** vector : {&lse, &delta}) *vector = carver.take<T>(lanes);
    for (Int** vector : {&first, &last}) *vector = carver.take<Int>(lanes);
    k = products.carve(&carver);
    v = products.carve(&carver);
    sums = carver.take<T>(private_sums);
    return carver.used();
  }
};

// Sums of dk and dv over the keys of one run; null where not wanted.
template <typename T>
struct Sums {
  T* dk;
  T* dv;
  int64_t ld;
};

template <typename T>
class Backward {
 public:
  Backward(const BackwardArgs& args, const Threads& threads)
      : args_(args),
        p_(args.problem),
        threads_(threads),
        products_(args.problem),
        kernel_(products_.kernel),
        cap_(make_cap<T>(p_)),
        ld_(padded<T>(p_.head_dim)),
        size_(element_size(p_.dtype)),
        // Rows of the outputs can be summed in place if they are of type T and end where a vector ends.
        in_place_(p_.dtype == native_dtype<T>() && ld_ == p_.head_dim) {}

  void operator()() {
    plan_ = balance(p_, products_.block_lanes(), threads_.count);
    const int64_t wanted = (args_.dk.data != nullptr) + (args_.dv.data != nullptr);
    place_sums(&plan_, wanted * ld_);
    if (in_place_) plan_.private_sums = 0;

    const int64_t n_runs = static_cast<int64_t>(plan_.runs.size());
    const int64_t n_workers = std::min(n_runs, threads_.count);
    Workspace<T> layout;
    const int64_t bytes = layout.carve(products_, p_, plan_.private_sums, nullptr);
    const Scratch scratch(bytes * n_workers);
    const Scratch shared(plan_.shared_sums * static_cast<int64_t>(sizeof(T)));
    shared_ = reinterpret_cast<T*>(shared.data());

    run_tasks(threads_, n_workers, n_runs, [&](int64_t worker, int64_t i) {
      Workspace<T> workspace;
      workspace.carve(products_, p_, plan_.private_sums, scratch.data() + worker * bytes);
      process(plan_.runs[static_cast<size_t>(plan_.order[static_cast<size_t>(i)])], workspace);
    });
    if (plan_.shared_sums > 0) {
      const int64_t n_groups = static_cast<int64_t>(plan_.groups.size());
      run_tasks(threads_, std::min(n_groups, threads_.count), n_groups, [&](int64_t worker, int64_t i) {
        Workspace<T> workspace;
        workspace.carve(products_, p_, plan_.private_sums, scratch.data() + worker * bytes);
        add_up(plan_.groups[static_cast<size_t>(i)], workspace.row);
      });
    }
    if (p_.cu_seqlens_q != nullptr) {
      const int64_t end_q = p_.cu_seqlens_q[p_.batch], end_kv = p_.cu_seqlens_kv[p_.batch];
      if (args_.dq.data != nullptr)
        clear_rows(args_.dq, size_, 0, end_q, p_.rows_q, 0, p_.heads_q, p_.head_dim);
      for (const Output* out : {&args_.dk, &args_.dv}) {
        if (out->data != nullptr) clear_rows(*out, size_, 0, end_kv, p_.rows_kv, 0, p_.heads_kv, p_.head_dim);
      }
    }
  }

 private:
  bool alone(const Run& run) const { return run.sums < 0; }

  T* in_place(const Output& out, const Sequence& s, const Group& group, const Run& run) const {
    if (out.data == nullptr) return nullptr;
    return reinterpret_cast<T*>(address(out, size_, s.batch, s.first_kv + run.keys.begin, group.head_kv));
  }

  Sums<T> sums_of(const Run& run, const Group& group, const Sequence& s, T* private_sums) const {
    if (alone(run) && in_place_) {
      const int64_t ld = args_.dk.data != nullptr ? args_.dk.strides.seq : args_.dv.strides.seq;
      return {in_place(args_.dk, s, group, run), in_place(args_.dv, s, group, run), ld};
    }
    T* const base = alone(run) ? private_sums : shared_ + run.sums;
    const int64_t elements = (run.keys.end - run.keys.begin) * ld_;
    T* const dk = args_.dk.data != nullptr ? base : nullptr;
    T* const dv = args_.dv.data != nullptr ? base + (dk != nullptr ? elements : 0) : nullptr;
    return {dk, dv, ld_};
  }

  void process(const Run& run, const Workspace<T>& w) const {
    const Group& group = plan_.groups[static_cast<size_t>(run.group)];
    const Sequence s = sequence(p_, group.batch);
    const Sums<T> sums = sums_of(run, group, s, w.sums);
    const int64_t n_keys = run.keys.end - run.keys.begin;
    for (T* sum : {sums.dk, sums.dv}) {
      if (sum == nullptr) continue;
      for (int64_t j = 0; j < n_keys; ++j) {
        std::memset(sum + j * sums.ld, 0, static_cast<size_t>(ld_) * sizeof(T));
      }
    }
    for (int64_t first = run.first; first < run.last; first += products_.block_lanes()) {
      block(run, group, s, first, std::min(first + products_.block_lanes(), run.last), sums, w);
    }
    if (!alone(run)) return;
    for (const Output* out : {&args_.dk, &args_.dv}) {
      if (out->data == nullptr) continue;
      const int64_t head = group.head_kv, first = s.first_kv;
      clear_rows(*out, size_, s.batch, first, first + run.keys.begin, head, head + 1, p_.head_dim);
      clear_rows(*out, size_, s.batch, first + run.keys.end, first + s.len_kv, head, head + 1, p_.head_dim);
      if (in_place_) continue;
      const T* const sum = out == &args_.dk ? sums.dk : sums.dv;
      for (int64_t j = 0; j < n_keys; ++j) {
        char* const dst = address(*out, size_, s.batch, first + run.keys.begin + j, head);
        kernel_.store(p_.dtype, sum + j * sums.ld, 1, p_.head_dim, dst);
      }
    }
  }

  void block(const Run& run, const Group& group, const Sequence& s, int64_t first, int64_t last,
             const Sums<T>& sums, const Workspace<T>& w) const {
    const int64_t d = p_.head_dim, unit = padded<T>(1);
    const Lanes lanes = make_lanes(p_, s, group.head_kv, first, last, unit, {0, s.len_kv});
    const int64_t width = lanes.width;
    for (auto* matrix : {&w.q, &w.dout}) clear_spare_lanes(lanes, d, matrix->data);
    for (int64_t lane = 0; lane < width; ++lane) load_lane(s, lanes, lane, w);
    for (auto* matrix : {&w.q, &w.dout}) products_.make_pairs(*matrix, d, width);
    for (auto* matrix : {&w.q_rows, &w.dout_rows}) products_.make_pairs(*matrix, lanes.count, ld_);
    const bool q_finite = kernel_.all_finite(w.q_rows.data, lanes.count, d, ld_, 1);
    const bool dout_finite = kernel_.all_finite(w.dout_rows.data, lanes.count, d, ld_, 1);
    const bool need_dq = args_.dq.data != nullptr;
    const bool need_ds = need_dq || sums.dk != nullptr;
    if (need_dq) std::fill_n(w.dq, d * width, T(0));

    for_steps(s, lanes, unit, [&](const Step& step) {
      const Visible<T> visible = step_mask<T>(lanes, step, w.first, w.last);
      const KeyBlock<T> k = products_.load_keys(args_.k, s, group.head_kv, step, w.k);
      products_.over_dims(k, w.q, width, step, w.tile);
      if (need_ds) {
        const KeyBlock<T> v = products_.load_keys(args_.v, s, group.head_kv, step, w.v);
        products_.over_dims(v, w.dout, width, step, w.dp);
      }
      kernel_.gradient_tile(w.tile, need_ds ? w.dp : nullptr, step.keys(), step.lanes(), cap_, visible,
                            w.lse + step.first, w.delta + step.first);

      const int64_t offset = (step.begin - run.keys.begin) * sums.ld;
      if (sums.dv != nullptr) {
        products_.over_lanes(w.tile, w.dout_rows, dout_finite, visible, lanes, step, sums.dv + offset,
                             sums.ld, w.v);
      }
      if (sums.dk != nullptr) {
        products_.over_lanes(w.dp, w.q_rows, q_finite, visible, lanes, step, sums.dk + offset, sums.ld, w.v);
      }
      if (need_dq) products_.over_keys(k, w.dp, visible, nullptr, width, step, w.dq, w.k);
    });

    if (args_.dq.data == nullptr) return;
    for (int64_t lane = 0; lane < lanes.count; ++lane) {
      get_lane(w.dq, d, width, lane, w.row);
      char* const dst = address(args_.dq, size_, s.batch, s.first_q + lanes.row[lane], lanes.head[lane]);
      kernel_.store(p_.dtype, w.row, 1, d, dst);
    }
  }

  void load_lane(const Sequence& s, const Lanes& lanes, int64_t lane, const Workspace<T>& w) const {
    if (lane >= lanes.count) {
      w.lse[lane] = w.delta[lane] = 0;
      return;
    }
    const int64_t d = p_.head_dim;
    T* const q = w.q_rows.data + lane * ld_;
    T* const dout = w.dout_rows.data + lane * ld_;
    for (int64_t i = d; i < ld_; ++i) q[i] = dout[i] = 0;
    load_query(kernel_, p_, args_.q, s, lanes, lane, q);
    load_query(kernel_, p_, args_.dout, s, lanes, lane, dout);
    load_query(kernel_, p_, args_.out, s, lanes, lane, w.row);
    set_lane(q, d, lanes.width, lane, w.q.data);
    set_lane(dout, d, lanes.width, lane, w.dout.data);
    const int64_t row = s.first_q + lanes.row[lane], head = lanes.head[lane];
    auto statistic = [&](const Input& x) {
      return *reinterpret_cast<const T*>(address(x, sizeof(T), s.batch, row, head));
    };
    w.lse[lane] = statistic(args_.lse);
    w.delta[lane] = kernel_.dot(dout, w.row, d) - (args_.dlse.data != nullptr ? statistic(args_.dlse) : T(0));
  }

  // dk and dv of a group that was cut into several runs.
  void add_up(const Group& group, T* row) const {
    if (group.last_run - group.first_run == 1) return;
    const Sequence s = sequence(p_, group.batch);
    for (const Output* out : {&args_.dk, &args_.dv}) {
      if (out->data == nullptr) continue;
      for (int64_t j = 0; j < s.len_kv; ++j) {
        std::memset(row, 0, static_cast<size_t>(ld_) * sizeof(T));
        for (int64_t i = group.first_run; i < group.last_run; ++i) {
          const Run& run = plan_.runs[static_cast<size_t>(i)];
          if (j < run.keys.begin || j >= run.keys.end) continue;
          const Sums<T> sums = sums_of(run, group, s, nullptr);
          kernel_.add((out == &args_.dk ? sums.dk : sums.dv) + (j - run.keys.begin) * ld_, ld_, row);
        }
        kernel_.store(p_.dtype, row, 1, p_.head_dim,
                      address(*out, size_, s.batch, s.first_kv + j, group.head_kv));
      }
    }
  }

  const BackwardArgs& args_;
  const Problem& p_;
  const Threads& threads_;
  const Products<T> products_;
  const Kernels<T>& kernel_;
  const Cap<T> cap_;
  const int64_t ld_;
  const int64_t size_;
  const bool in_place_;
  Plan plan_;
  T* shared_ = nullptr;
};

}  // namespace

void attention_backward(const BackwardArgs& args, const Threads& threads) {
  if (args.problem.dtype == DType::kFloat64) {
    Backward<double>(args, threads)();
  } else {
    Backward<float>(args, threads)();
  }
}

}  // namespace softcap_cpu
