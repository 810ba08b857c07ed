// Moving blocks of q, k, v and their gradients between tensors and scratch.
#pragma once

#include <cstring>

#include "schedule.h"

namespace softcap_cpu {

template <typename T>
Cap<T> make_cap(const Problem& p) {
  const bool on = p.softcap > 0;
  return {on, static_cast<T>(p.softcap), static_cast<T>(on ? p.scale / p.softcap : p.scale),
          static_cast<T>(p.scale)};
}

// A block of keys or values as the products read it: in place where the type allows, else converted into
// scratch.
template <typename T>
struct KeyBlock {
  const T* data;
  int64_t row_stride;
  int64_t col_stride;
};

template <typename T>
constexpr DType native_dtype() {
  return sizeof(T) == sizeof(double) ? DType::kFloat64 : DType::kFloat32;
}

template <typename T>
KeyBlock<T> load_keys(const Kernels<T>& kernel, const Problem& p, const Input& x, const Sequence& s,
                      int64_t head, int64_t begin, int64_t end, T* scratch) {
  const char* src = address(x, element_size(p.dtype), s.batch, s.first_kv + begin, head);
  if (p.dtype == native_dtype<T>()) return {reinterpret_cast<const T*>(src), x.strides.seq, x.strides.dim};
  const int64_t step = x.strides.seq * element_size(p.dtype);
  for (int64_t j = 0; j < end - begin; ++j) {
    kernel.load(p.dtype, src + j * step, x.strides.dim, p.head_dim, scratch + j * p.head_dim);
  }
  return {scratch, p.head_dim, 1};
}

// One query row as T, into dst.
template <typename T>
void load_query(const Kernels<T>& kernel, const Problem& p, const Input& x, const Sequence& s,
                const Lanes<T>& lanes, int64_t lane, T* dst) {
  const char* src = address(x, element_size(p.dtype), s.batch, s.first_q + lanes.row[lane], lanes.head[lane]);
  kernel.load(p.dtype, src, x.strides.dim, p.head_dim, dst);
}

// Lays a row along lane `lane` of a (head_dim, width) matrix.
template <typename T>
void set_lane(const T* row, int64_t head_dim, int64_t width, int64_t lane, T* matrix) {
  for (int64_t d = 0; d < head_dim; ++d) matrix[d * width + lane] = row[d];
}

template <typename T>
void clear_spare_lanes(const Lanes<T>& lanes, int64_t head_dim, T* matrix) {
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int64_t lane = lanes.count; lane < lanes.width; ++lane) matrix[d * lanes.width + lane] = 0;
  }
}

// Zeroes rows [first, last) of heads [first_head, last_head).
inline void clear_rows(const Output& x, int64_t element_size, int64_t batch, int64_t first, int64_t last,
                       int64_t first_head, int64_t last_head, int64_t head_dim) {
  for (int64_t row = first; row < last; ++row) {
    for (int64_t head = first_head; head < last_head; ++head) {
      std::memset(address(x, element_size, batch, row, head), 0,
                  static_cast<size_t>(head_dim * element_size));
    }
  }
}

}  // namespace softcap_cpu
