// The vectorised inner loops, as a table of functions that is compiled once for each instruction set.
//
// Everything works on "lanes": query rows lie along the vector lanes, keys along the rows of a tile. A tile
// of scores is thus S^T, with shape (keys, lanes). Keys and values then enter every product as scalars that
// are broadcast, in place and with any stride, and nothing but the small query block is ever transposed;
// softmax is free of horizontal sums; a NaN in one query cannot leave its lane.
#pragma once

#include <cstdint>

#include "attention.h"

namespace softcap_cpu {

// Lane counts and leading dimensions of scratch matrices are multiples of 64 bytes.
constexpr int64_t kAlignment = 64;

template <typename T>
constexpr int64_t padded(int64_t n) {
  constexpr int64_t unit = kAlignment / static_cast<int64_t>(sizeof(T));
  return (n + unit - 1) / unit * unit;
}

// Integer as wide as T: visible ranges are compared lane by lane.
template <typename T>
struct LaneInt;
template <>
struct LaneInt<float> {
  using type = int32_t;
};
template <>
struct LaneInt<double> {
  using type = int64_t;
};

// Lane i of a tile sees its rows [first[i], last[i]). A null `first` says that every lane sees every row.
template <typename T>
struct Visible {
  const typename LaneInt<T>::type* first = nullptr;
  const typename LaneInt<T>::type* last = nullptr;
};

template <typename T>
struct Cap {
  bool on;
  T cap;    // cap
  T inner;  // scale / cap when on, else scale
  T scale;
};

// c[m, n] = sum over k of a[m, k] * b[k, n], added to the old c (times beta[n] where given) unless
// `overwrite`. n is a multiple of the lane padding; a may have any strides.
template <typename T>
struct Gemm {
  using Sum = T;
  int64_t m, n, k;
  const T* a;
  int64_t a_row, a_col;
  const T* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  bool overwrite = false;
  const T* beta = nullptr;
};

// The same in bfloat16, two terms at a time: k counts pairs of terms. A pair of a lies in two neighbouring
// elements, with a_col from pair to pair; one of b in the two halves of a word, the first in the low one.
struct PairGemm {
  using Sum = float;
  int64_t m, n, k;
  const uint16_t* a;
  int64_t a_row, a_col;
  const uint32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  bool overwrite = false;
  const float* beta = nullptr;
};

// For machines that multiply bfloat16: twice the speed, on operands that are rounded to it.
struct PairKernels {
  void (*gemm)(const PairGemm&);
  // dst[r, c] = (src[2r, c], src[2r + 1, c]); a missing last row is zero. cols is a multiple of 16.
  void (*pair_rows)(const float* src, int64_t ld, int64_t rows, int64_t cols, uint32_t* dst);
  // The same from bfloat16 rows of unit stride, of any number of columns.
  void (*pair_half_rows)(const uint16_t* src, int64_t ld, int64_t rows, int64_t cols, uint32_t* dst);
  // dst[r, c] = (src[r, 2c], src[r, 2c + 1]). cols is a multiple of 16.
  void (*pair_cols)(const float* src, int64_t ld, int64_t rows, int64_t cols, uint32_t* dst);
};

// Keys or values in place, in their own dtype, with unit stride along the head dimension.
struct Rows {
  DType dtype;
  const void* data;
  int64_t stride;  // in elements
  int64_t count;
  int64_t dims;
};

template <typename T>
struct Kernels {
  void (*gemm)(const Gemm<T>&);

  // The same product where b[k, n] counts only if lane n sees row k. For tiles in which a masked zero would
  // meet a NaN or an infinity; slow, and exact.
  void (*gemm_visible_columns)(const Gemm<T>&, const Visible<T>&);
  // The same product where a[m, k] counts only if lane k sees row m.
  void (*gemm_visible_rows)(const Gemm<T>&, const Visible<T>&);

  // One tile of the online softmax, in place: raw products in, probabilities relative to the new row_max out.
  // rescale[lane] is what earlier sums of that lane must be multiplied by; row_sum is updated.
  void (*softmax_tile)(T* tile, int64_t rows, int64_t lanes, const Cap<T>& cap, const Visible<T>& visible,
                       T* row_max, T* row_sum, T* rescale);

  // One tile of the gradient, in place: raw products and dP = dO V^T in, P and dS out. With dp null only P.
  void (*gradient_tile)(T* tile, T* dp, int64_t rows, int64_t lanes, const Cap<T>& cap,
                        const Visible<T>& visible, const T* lse, const T* delta);

  // For few query rows, which then lie along the rows of their matrices, with the head dimension along the
  // vectors. scores[query, key] = sum over the dimensions; queries are zero from keys.dims up to whole
  // vectors.
  void (*row_scores)(const Rows& keys, const T* queries, int64_t ld, int64_t n_queries, T* scores,
                     int64_t ld_scores);
  // One step of one query's online softmax, in place; up to whole vectors of scores are overwritten. Returns
  // what its earlier sums must be multiplied by.
  T (*row_softmax)(T* scores, int64_t n, const Cap<T>& cap, T* row_max, T* row_sum);
  // sums[query, :] = sums[query, :] * beta[query] + sum over the values of weights[query, value] *
  // values[value, :].
  void (*row_sums)(const Rows& values, const T* weights, int64_t ld_weights, const T* beta, int64_t n_queries,
                   T* sums, int64_t ld);

  // n elements of a dtype to and from T. The stride is in elements.
  void (*load)(DType dtype, const void* src, int64_t stride, int64_t n, T* dst);
  void (*store)(DType dtype, const T* src, int64_t stride, int64_t n, void* dst);

  // Divides each column of a (rows, lanes) matrix by its own divisor.
  void (*divide_lanes)(T* matrix, int64_t rows, int64_t lanes, const T* divisor);
  T (*dot)(const T* a, const T* b, int64_t n);
  void (*add)(const T* src, int64_t n, T* dst);
  bool (*all_finite)(const T* a, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride);
};

// The table for the best instruction set of this machine, or the one that SOFTCAP_OPS_CPU_ISA asks for.
template <typename T>
const Kernels<T>& kernels();

// Null where the machine does not multiply bfloat16.
const PairKernels* pair_kernels();

}  // namespace softcap_cpu
