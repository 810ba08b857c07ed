// Blocks of q, k, v and their products, whatever the element type: in T, or in bfloat16 pairs where the
// machine multiplies those.
#pragma once

#include <cstring>
#include <type_traits>

#include "schedule.h"

namespace softcap_cpu {

template <typename T>
Cap<T> make_cap(const Problem& p) {
  const bool on = p.softcap > 0;
  return {on, static_cast<T>(p.softcap), static_cast<T>(on ? p.scale / p.softcap : p.scale),
          static_cast<T>(p.scale)};
}

template <typename T>
constexpr DType native_dtype() {
  return sizeof(T) == sizeof(double) ? DType::kFloat64 : DType::kFloat32;
}

// A block of keys or values, read in place where its layout allows.
template <typename T>
struct KeyBlock {
  int64_t rows;
  const T* data;  // as T: null while only the halves are at hand
  int64_t row_stride;
  int64_t col_stride;
  const uint16_t* half;  // as bfloat16 with unit stride and an even number of columns; null when T is in use
  int64_t half_stride;
};

// A matrix with query rows along its lanes (head_dim, width), or along its rows (width, padded head_dim).
template <typename T>
struct QueryMatrix {
  T* data;
  uint32_t* pairs;  // two rows of data to a row
};

// Scratch for converting keys and tiles.
template <typename T>
struct ProductScratch {
  T* keys;               // (keys, head_dim)
  uint16_t* half;        // (keys, even head_dim)
  uint32_t* key_pairs;   // (keys / 2, head_dim)
  uint32_t* tile_pairs;  // (keys / 2, lanes) or (keys, lanes / 2)
};

template <typename T>
class Products {
 public:
  explicit Products(const Problem& p)
      : kernel(kernels<T>()),
        p_(p),
        pairs_(std::is_same<T, float>::value && p.dtype == DType::kBFloat16 ? pair_kernels() : nullptr) {}

  const Kernels<T>& kernel;

  bool in_pairs() const { return pairs_ != nullptr; }
  // Pairs halve the time of a product, so preparing its operands must serve twice the lanes.
  int64_t block_lanes() const { return in_pairs() ? kMaxLanes : kMaxLanes / 2; }

  ProductScratch<T> carve(Carver* carver) const {
    const int64_t d = p_.head_dim, even = (d + 1) / 2 * 2;
    ProductScratch<T> scratch{};
    if (p_.dtype != native_dtype<T>()) scratch.keys = carver->take<T>(kBlockKeys * d);
    if (in_pairs()) {
      scratch.half = carver->take<uint16_t>(kBlockKeys * even);
      scratch.key_pairs = carver->take<uint32_t>(kBlockKeys / 2 * d);
      scratch.tile_pairs = carver->take<uint32_t>(kBlockKeys * kMaxLanes / 2);
    }
    return scratch;
  }

  QueryMatrix<T> carve_matrix(int64_t rows, int64_t cols, Carver* carver) const {
    return {carver->take<T>(rows * cols), carver->take<uint32_t>(in_pairs() ? (rows + 1) / 2 * cols : 0)};
  }

  void make_pairs(const QueryMatrix<T>& x, int64_t rows, int64_t cols) const {
    if constexpr (std::is_same<T, float>::value) {
      if (in_pairs()) pairs_->pair_rows(x.data, cols, rows, cols, x.pairs);
    }
  }

  KeyBlock<T> load_keys(const Input& x, const Sequence& s, int64_t head, const Step& step,
                        const ProductScratch<T>& scratch) const {
    const int64_t size = element_size(p_.dtype), d = p_.head_dim;
    const char* const src = key_address(p_, x, s, step.begin, head);
    KeyBlock<T> block{step.keys(), nullptr, 0, 0, nullptr, 0};
    // The next block is on its way while this one is multiplied.
    const int64_t left = s.piece_end(step.begin) - step.end, next = left < kBlockKeys ? left : kBlockKeys;
    if (x.strides.dim == 1)
      prefetch(src + step.keys() * x.strides.seq * size, x.strides.seq * size, next, d * size);
    if (in_pairs()) {
      block.half = reinterpret_cast<const uint16_t*>(src);
      block.half_stride = x.strides.seq;
      if (x.strides.dim == 1 && d % 2 == 0) return block;
      block.half = scratch.half;
      block.half_stride = (d + 1) / 2 * 2;
      for (int64_t j = 0; j < block.rows; ++j) {
        uint16_t* const row = scratch.half + j * block.half_stride;
        row[block.half_stride - 1] = 0;
        const uint16_t* const from = reinterpret_cast<const uint16_t*>(src) + j * x.strides.seq;
        for (int64_t i = 0; i < d; ++i) row[i] = from[i * x.strides.dim];
      }
    } else if (p_.dtype == native_dtype<T>()) {
      block.data = reinterpret_cast<const T*>(src);
      block.row_stride = x.strides.seq;
      block.col_stride = x.strides.dim;
    } else {
      convert(src, x.strides.seq, x.strides.dim, scratch.keys, &block);
    }
    return block;
  }

  // tile[key, lane] = sum over the head dimension of keys[key, :] * queries[:, lane].
  void over_dims(const KeyBlock<T>& keys, const QueryMatrix<T>& queries, int64_t width, const Step& step,
                 T* tile) const {
    const int64_t n = step.lanes();
    if constexpr (std::is_same<T, float>::value) {
      if (keys.half != nullptr) {
        PairGemm g{keys.rows,
                   n,
                   (p_.head_dim + 1) / 2,
                   keys.half,
                   keys.half_stride,
                   2,
                   queries.pairs + step.first,
                   width,
                   tile,
                   n};
        g.overwrite = true;
        return pairs_->gemm(g);
      }
    }
    Gemm<T> g{keys.rows,
              n,
              p_.head_dim,
              keys.data,
              keys.row_stride,
              keys.col_stride,
              queries.data + step.first,
              width,
              tile,
              n};
    g.overwrite = true;
    kernel.gemm(g);
  }

  // sums[:, lane] = sums[:, lane] * beta[lane] + sum over the keys that the lane sees of keys[key, :] *
  // tile[key, lane].
  void over_keys(KeyBlock<T> keys, const T* tile, const Visible<T>& visible, const T* beta, int64_t width,
                 const Step& step, T* sums, const ProductScratch<T>& scratch) const {
    const int64_t d = p_.head_dim, n = step.lanes();
    // A masked weight is an exact zero, which masks the product too, unless a NaN or an infinity meets it.
    const bool exact = step.masked && !finite(keys);
    if constexpr (std::is_same<T, float>::value) {
      if (keys.half != nullptr && !exact) {
        pairs_->pair_half_rows(keys.half, keys.half_stride, keys.rows, d, scratch.key_pairs);
        pairs_->pair_rows(tile, n, keys.rows, n, scratch.tile_pairs);
        PairGemm g{d,
                   n,
                   (keys.rows + 1) / 2,
                   reinterpret_cast<const uint16_t*>(scratch.key_pairs),
                   2,
                   2 * d,
                   scratch.tile_pairs,
                   n,
                   sums + step.first,
                   width};
        g.beta = beta;
        return pairs_->gemm(g);
      }
    }
    if (keys.data == nullptr) {
      convert(reinterpret_cast<const char*>(keys.half), keys.half_stride, 1, scratch.keys, &keys);
    }
    Gemm<T> g{d,    n, keys.rows,         keys.data, keys.col_stride, keys.row_stride,
              tile, n, sums + step.first, width};
    g.beta = beta;
    if (exact) {
      kernel.gemm_visible_columns(g, visible);
    } else {
      kernel.gemm(g);
    }
  }

  // sums[key, :] += sum over the lanes that see the key of tile[key, lane] * queries[lane, :].
  // `queries_finite` says that the queries hold no NaN and no infinity.
  void over_lanes(const T* tile, const QueryMatrix<T>& queries, bool queries_finite,
                  const Visible<T>& visible, const Lanes& lanes, const Step& step, T* sums, int64_t ld,
                  const ProductScratch<T>& scratch) const {
    const int64_t n = step.lanes(), cols = padded<T>(p_.head_dim);
    const int64_t count = (step.last < lanes.count ? step.last : lanes.count) - step.first;
    const bool exact = step.masked && !queries_finite;
    if constexpr (std::is_same<T, float>::value) {
      if (in_pairs() && !exact) {
        pairs_->pair_cols(tile, n, step.keys(), n, scratch.tile_pairs);
        return pairs_->gemm({step.keys(), cols, (count + 1) / 2,
                             reinterpret_cast<const uint16_t*>(scratch.tile_pairs), n, 2,
                             queries.pairs + step.first / 2 * cols, cols, sums, ld});
      }
    }
    const Gemm<T> g{step.keys(), cols, count, tile, n, 1, queries.data + step.first * cols, cols, sums, ld};
    if (exact) {
      kernel.gemm_visible_rows(g, visible);
    } else {
      kernel.gemm(g);
    }
  }

 private:
  static void prefetch(const char* src, int64_t stride, int64_t rows, int64_t bytes) {
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t i = 0; i < bytes; i += kAlignment) __builtin_prefetch(src + j * stride + i, 0, 2);
    }
  }

  void convert(const char* src, int64_t row_stride, int64_t col_stride, T* dst, KeyBlock<T>* block) const {
    const int64_t step = row_stride * element_size(p_.dtype);
    for (int64_t j = 0; j < block->rows; ++j) {
      kernel.load(p_.dtype, src + j * step, col_stride, p_.head_dim, dst + j * p_.head_dim);
    }
    block->data = dst;
    block->row_stride = p_.head_dim;
    block->col_stride = 1;
  }

  bool finite(const KeyBlock<T>& keys) const {
    if (keys.half == nullptr) {
      return kernel.all_finite(keys.data, keys.rows, p_.head_dim, keys.row_stride, keys.col_stride);
    }
    bool bad = false;
    for (int64_t j = 0; j < keys.rows; ++j) {
      const uint16_t* const row = keys.half + j * keys.half_stride;
      for (int64_t i = 0; i < p_.head_dim; ++i) bad |= (row[i] & 0x7f80) == 0x7f80;
    }
    return !bad;
  }

  const Problem& p_;
  const PairKernels* pairs_;
};

// One query row as T, into dst.
template <typename T>
void load_query(const Kernels<T>& kernel, const Problem& p, const Input& x, const Sequence& s,
                const Lanes& lanes, int64_t lane, T* dst) {
  const char* src = address(x, element_size(p.dtype), s.batch, s.first_q + lanes.row[lane], lanes.head[lane]);
  kernel.load(p.dtype, src, x.strides.dim, p.head_dim, dst);
}

template <typename T>
void get_lane(const T* matrix, int64_t head_dim, int64_t width, int64_t lane, T* row) {
  for (int64_t d = 0; d < head_dim; ++d) row[d] = matrix[d * width + lane];
}

// Lays a row along lane `lane` of a (head_dim, width) matrix.
template <typename T>
void set_lane(const T* row, int64_t head_dim, int64_t width, int64_t lane, T* matrix) {
  for (int64_t d = 0; d < head_dim; ++d) matrix[d * width + lane] = row[d];
}

template <typename T>
void clear_spare_lanes(const Lanes& lanes, int64_t head_dim, T* matrix) {
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
