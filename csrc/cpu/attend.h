// The online softmax of one block of query rows over the keys that they see.
#pragma once

#include <algorithm>
#include <limits>

#include "blocks.h"

namespace softcap_cpu {

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

// Leaves in the workspace each lane's sum of weighted values, not yet divided by the sum of its weights, that
// sum, and the maximum from which the weights are measured.
template <typename T>
void attend(const ForwardArgs& args, const Products<T>& products, const Sequence& s, int64_t head_kv,
            const Lanes& lanes, const Workspace<T>& w) {
  const Problem& p = args.problem;
  const Kernels<T>& kernel = products.kernel;
  const int64_t unit = padded<T>(1);
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

  for_steps(s, lanes, unit, [&](const Step& step) {
    const Visible<T> visible = step_mask<T>(lanes, step, w.first, w.last);
    const KeyBlock<T> k = products.load_keys(args.k, s, head_kv, step, w.products);
    products.over_dims(k, w.q, width, step, w.tile);
    kernel.softmax_tile(w.tile, step.keys(), step.lanes(), cap, visible, w.row_max + step.first,
                        w.row_sum + step.first, w.rescale);
    const KeyBlock<T> v = products.load_keys(args.v, s, head_kv, step, w.products);
    products.over_keys(v, w.tile, visible, w.rescale, width, step, w.out, w.products);
  });
}

}  // namespace softcap_cpu
