// Binds the CPU kernels to torch.ops.softcap_ops. The only file here that knows Torch, and it knows only the
// stable ABI. The checks guard memory; messages meant for users are the business of the Python layer.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "attention.h"

namespace {

using softcap_cpu::DType;
using softcap_cpu::Problem;
using softcap_cpu::Strides;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void parallel_for(int64_t n, softcap_cpu::ParallelBody body, void* context) {
  torch::stable::parallel_for(0, n, 1, [=](int64_t begin, int64_t end) { body(begin, end, context); });
}

softcap_cpu::Threads threads() {
  return {parallel_for, static_cast<int64_t>(torch::stable::get_num_threads())};
}

DType dtype_of(const Tensor& q) {
  switch (q.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "q must be float32, float64, bfloat16 or float16");
  }
}

void check_shape(const char* name, const Tensor& x, std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(x.dim() == static_cast<int64_t>(shape.size()), name, " must have ", shape.size(),
                  " dimensions, got ", x.dim());
  int64_t i = 0;
  for (int64_t size : shape) {
    STD_TORCH_CHECK(x.size(i) == size, name, " must have size ", size, " in dimension ", i, ", got ",
                    x.size(i));
    ++i;
  }
}

void check_kind(const char* name, const Tensor& x, ScalarType dtype) {
  STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has the wrong dtype");
}

const int32_t* check_cu_seqlens(const char* name, const Tensor& x, int64_t batch, int64_t rows) {
  check_kind(name, x, ScalarType::Int);
  check_shape(name, x, {batch + 1});
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
  const auto* cu = static_cast<const int32_t*>(x.const_data_ptr());
  STD_TORCH_CHECK(cu[0] == 0, name, " must start at 0, got ", cu[0]);
  for (int64_t b = 0; b < batch; ++b) {
    STD_TORCH_CHECK(cu[b] <= cu[b + 1], name, " must not decrease, got ", cu[b], " before ", cu[b + 1]);
  }
  STD_TORCH_CHECK(cu[batch] <= rows, name, " must end at most at ", rows, ", the rows there are, got ",
                  cu[batch]);
  return cu;
}

// The shapes that the arguments of a call must agree on.
struct Call {
  Problem problem;
  ScalarType dtype;
  ScalarType lse_dtype;
  bool packed;

  Call(const Tensor& q, const Tensor& k, const std::optional<Tensor>& cu_q, const std::optional<Tensor>& cu_k,
       double softcap, double scale, bool causal, int64_t window_left, int64_t window_right)
      : dtype(q.scalar_type()),
        lse_dtype(q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float),
        packed(cu_q.has_value()) {
    STD_TORCH_CHECK(cu_q.has_value() == cu_k.has_value(), "cu_seqlens_q and cu_seqlens_k must come together");
    const int64_t rank = packed ? 3 : 4;
    STD_TORCH_CHECK(q.dim() == rank, "q must have ", rank, " dimensions, got ", q.dim());
    STD_TORCH_CHECK(k.dim() == rank, "k must have ", rank, " dimensions, got ", k.dim());
    STD_TORCH_CHECK(std::isfinite(softcap) && softcap >= 0, "softcap must be finite and not negative");
    STD_TORCH_CHECK(std::isfinite(scale), "scale must be finite");
    STD_TORCH_CHECK(window_left >= -1 && window_right >= -1, "window must be -1 or more on both sides");
    Problem& p = problem;
    p.dtype = dtype_of(q);
    p.heads_q = q.size(rank - 2);
    p.heads_kv = k.size(rank - 2);
    p.head_dim = q.size(rank - 1);
    p.rows_q = q.size(rank - 3);
    p.rows_kv = k.size(rank - 3);
    p.softcap = softcap;
    p.scale = scale;
    p.causal = causal;
    p.window_left = window_left;
    p.window_right = window_right;
    STD_TORCH_CHECK(p.heads_kv == 0 ? p.heads_q == 0 : p.heads_q % p.heads_kv == 0, "heads of q (", p.heads_q,
                    ") must be a multiple of heads of k (", p.heads_kv, ")");
    p.cu_seqlens_q = p.cu_seqlens_kv = nullptr;
    if (packed) {
      STD_TORCH_CHECK(cu_q->dim() == 1 && cu_q->size(0) >= 1, "cu_seqlens_q must have shape (batch + 1,)");
      p.batch = cu_q->size(0) - 1;
      p.cu_seqlens_q = check_cu_seqlens("cu_seqlens_q", *cu_q, p.batch, p.rows_q);
      p.cu_seqlens_kv = check_cu_seqlens("cu_seqlens_k", *cu_k, p.batch, p.rows_kv);
    } else {
      p.batch = q.size(0);
    }
  }

  // Without a head there is not one element in q, k, v or any result.
  bool has_heads() const { return problem.heads_kv > 0; }

  void check_rows(const char* name, const Tensor& x, int64_t rows, int64_t heads) const {
    check_kind(name, x, dtype);
    if (packed) {
      check_shape(name, x, {rows, heads, problem.head_dim});
    } else {
      check_shape(name, x, {problem.batch, rows, heads, problem.head_dim});
    }
  }

  void check_lse(const char* name, const Tensor& x) const {
    check_kind(name, x, lse_dtype);
    if (packed) {
      check_shape(name, x, {problem.heads_q, problem.rows_q});
    } else {
      check_shape(name, x, {problem.batch, problem.heads_q, problem.rows_q});
    }
  }

  Strides row_strides(const Tensor& x) const {
    if (packed) return {0, x.stride(0), x.stride(1), x.stride(2)};
    return {x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
  }

  Strides lse_strides(const Tensor& x) const {
    if (packed) return {0, x.stride(1), x.stride(0), 0};
    return {x.stride(0), x.stride(2), x.stride(1), 0};
  }

  softcap_cpu::Input query(const char* name, const Tensor& x) const {
    check_rows(name, x, problem.rows_q, problem.heads_q);
    return {x.const_data_ptr(), row_strides(x)};
  }

  softcap_cpu::Input key(const char* name, const Tensor& x) const {
    check_rows(name, x, problem.rows_kv, problem.heads_kv);
    return {x.const_data_ptr(), row_strides(x)};
  }

  softcap_cpu::Input statistic(const char* name, const Tensor& x) const {
    check_lse(name, x);
    return {x.const_data_ptr(), lse_strides(x)};
  }

  softcap_cpu::Output result(const char* name, const std::optional<Tensor>& x, int64_t rows,
                             int64_t heads) const {
    if (!x.has_value()) return {};
    check_rows(name, *x, rows, heads);
    STD_TORCH_CHECK(x->is_contiguous(), name, " must be contiguous");
    return {x->mutable_data_ptr(), row_strides(*x)};
  }
};

void attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                   const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
                   double softcap, double scale, bool causal, int64_t window_left, int64_t window_right,
                   const Tensor& out, const Tensor& lse) {
  const Call call(q, k, cu_seqlens_q, cu_seqlens_k, softcap, scale, causal, window_left, window_right);
  softcap_cpu::ForwardArgs args{};
  args.problem = call.problem;
  args.q = call.query("q", q);
  args.k = call.key("k", k);
  args.v = call.key("v", v);
  args.out = call.result("out", out, call.problem.rows_q, call.problem.heads_q);
  call.check_lse("lse", lse);
  STD_TORCH_CHECK(lse.is_contiguous(), "lse must be contiguous");
  args.lse = {lse.mutable_data_ptr(), call.lse_strides(lse)};
  if (call.has_heads()) softcap_cpu::attention_forward(args, threads());
}

void attention_bwd(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
                   const Tensor& v, const Tensor& out, const Tensor& lse,
                   const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
                   double softcap, double scale, bool causal, int64_t window_left, int64_t window_right,
                   const std::optional<Tensor>& dq, const std::optional<Tensor>& dk,
                   const std::optional<Tensor>& dv) {
  const Call call(q, k, cu_seqlens_q, cu_seqlens_k, softcap, scale, causal, window_left, window_right);
  softcap_cpu::BackwardArgs args{};
  args.problem = call.problem;
  args.q = call.query("q", q);
  args.k = call.key("k", k);
  args.v = call.key("v", v);
  args.dout = call.query("dout", dout);
  args.out = call.query("out", out);
  args.lse = call.statistic("lse", lse);
  if (dlse.has_value()) args.dlse = call.statistic("dlse", *dlse);
  args.dq = call.result("dq", dq, call.problem.rows_q, call.problem.heads_q);
  args.dk = call.result("dk", dk, call.problem.rows_kv, call.problem.heads_kv);
  args.dv = call.result("dv", dv, call.problem.rows_kv, call.problem.heads_kv);
  if (call.has_heads()) softcap_cpu::attention_backward(args, threads());
}

const int32_t* check_lengths(const char* name, const Tensor& x, int64_t batch, int64_t longest) {
  check_kind(name, x, ScalarType::Int);
  check_shape(name, x, {batch});
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
  const auto* lengths = static_cast<const int32_t*>(x.const_data_ptr());
  for (int64_t b = 0; b < batch; ++b) {
    STD_TORCH_CHECK(lengths[b] >= 0 && lengths[b] <= longest, name, " must lie in 0 ... ", longest,
                    ", what the cache holds, got ", lengths[b]);
  }
  return lengths;
}

softcap_cpu::Cache check_cache(const Tensor& k, const Tensor& cache_seqlens,
                               const std::optional<Tensor>& cache_leftpad,
                               const std::optional<Tensor>& block_table, int64_t batch) {
  softcap_cpu::Cache cache{};
  const int64_t block_size = k.size(1);
  int64_t longest = block_size;
  if (block_table.has_value()) {
    check_kind("block_table", *block_table, ScalarType::Int);
    STD_TORCH_CHECK(block_table->dim() == 2 && block_table->size(0) == batch,
                    "block_table must have shape (batch, blocks)");
    longest = block_size * block_table->size(1);
    cache.block_table = static_cast<const int32_t*>(block_table->const_data_ptr());
    cache.table_batch = block_table->stride(0);
    cache.table_block = block_table->stride(1);
    cache.block_size = block_size;
  }
  cache.seqlens = check_lengths("cache_seqlens", cache_seqlens, batch, longest);
  if (cache_leftpad.has_value())
    cache.leftpad = check_lengths("cache_leftpad", *cache_leftpad, batch, longest);
  for (int64_t b = 0; cache.block_table != nullptr && b < batch; ++b) {
    const int64_t first = cache.leftpad == nullptr ? 0 : cache.leftpad[b];
    if (first >= cache.seqlens[b]) continue;
    for (int64_t i = first / block_size; i <= (cache.seqlens[b] - 1) / block_size; ++i) {
      const int32_t block = cache.block_table[b * cache.table_batch + i * cache.table_block];
      STD_TORCH_CHECK(block >= 0 && block < k.size(0), "block_table must name one of the ", k.size(0),
                      " blocks, got ", block, " at entry ", i, " of sequence ", b);
    }
  }
  return cache;
}

void decode_attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache_seqlens,
                          const std::optional<Tensor>& cache_leftpad,
                          const std::optional<Tensor>& block_table, double softcap, double scale, bool causal,
                          int64_t window_left, int64_t window_right, const Tensor& out,
                          const std::optional<Tensor>& lse) {
  const Call call(q, k, {}, {}, softcap, scale, causal, window_left, window_right);
  const Problem& p = call.problem;
  if (!block_table.has_value()) check_shape("k", k, {p.batch, p.rows_kv, p.heads_kv, p.head_dim});
  for (const auto& [name, x] : {std::pair<const char*, const Tensor&>{"k", k}, {"v", v}}) {
    check_kind(name, x, call.dtype);
    check_shape(name, x, {k.size(0), p.rows_kv, p.heads_kv, p.head_dim});
  }
  softcap_cpu::ForwardArgs args{};
  args.problem = p;
  args.problem.cache = check_cache(k, cache_seqlens, cache_leftpad, block_table, p.batch);
  args.q = call.query("q", q);
  args.k = {k.const_data_ptr(), call.row_strides(k)};
  args.v = {v.const_data_ptr(), call.row_strides(v)};
  args.out = call.result("out", out, p.rows_q, p.heads_q);
  if (lse.has_value()) {
    call.check_lse("lse", *lse);
    STD_TORCH_CHECK(lse->is_contiguous(), "lse must be contiguous");
    args.lse = {lse->mutable_data_ptr(), call.lse_strides(*lse)};
  }
  if (call.has_heads()) softcap_cpu::attention_decode(args, threads());
}

std::string cpu_isa() { return softcap_cpu::isa_name(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(softcap_ops, m) {
  m.def(
      "_cpu_attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float "
      "softcap, "
      "float scale, bool causal, int window_left, int window_right, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def(
      "_cpu_attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float softcap, float scale, bool causal, int window_left, "
      "int window_right, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv) -> ()");
  m.def(
      "_cpu_decode_attention_fwd(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? "
      "cache_leftpad, Tensor? block_table, float softcap, float scale, bool causal, int window_left, "
      "int window_right, Tensor(a!) out, Tensor(b!)? lse) -> ()");
  m.def("_cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(softcap_ops, CPU, m) {
  m.impl("_cpu_attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("_cpu_attention_bwd", TORCH_BOX(&attention_bwd));
  m.impl("_cpu_decode_attention_fwd", TORCH_BOX(&decode_attention_fwd));
}

STABLE_TORCH_LIBRARY_IMPL(softcap_ops, CompositeExplicitAutograd, m) {
  m.impl("_cpu_isa", TORCH_BOX(&cpu_isa));
}
