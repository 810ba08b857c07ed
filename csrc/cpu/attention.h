// Soft-capped attention on raw pointers: out = softmax(mask(cap * tanh(scale * q k^T / cap))) v, and its
// gradient. Nothing here knows Torch; bindings.cpp checks every shape and pointer before it calls in.
#pragma once

#include <cstdint>

namespace softcap_cpu {

enum class DType : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Strides in elements. A packed tensor has batch stride 0: the sequence offset comes from cu_seqlens.
struct Strides {
  int64_t batch = 0;
  int64_t seq = 0;
  int64_t head = 0;
  int64_t dim = 0;
};

struct Input {
  const void* data = nullptr;
  Strides strides;
};

struct Output {
  void* data = nullptr;
  Strides strides;
};

// Where the keys of a batch lie in a cache: those of sequence b are rows [leftpad[b], seqlens[b]) of its
// batch entry, or of the blocks that its row of block_table lists, read as if they lay end to end.
struct Cache {
  const int32_t* seqlens = nullptr;  // null: no cache
  const int32_t* leftpad = nullptr;  // null: zeros
  const int32_t* block_table = nullptr;
  int64_t table_batch = 0;  // strides of block_table
  int64_t table_block = 0;
  int64_t block_size = 0;  // 0: not in blocks
};

struct Problem {
  DType dtype;
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t head_dim;
  // Rows held by the tensors: of each batch entry when dense, of all of them when packed.
  int64_t rows_q;
  int64_t rows_kv;
  const int32_t* cu_seqlens_q;  // null when dense
  const int32_t* cu_seqlens_kv;
  Cache cache;
  double softcap;  // 0: off
  double scale;
  bool causal;
  int64_t window_left;  // -1: unlimited
  int64_t window_right;
};

// lse (and dlse) hold float32, or float64 when dtype is float64; their `dim` stride is unused. A null lse is
// not wanted, when decoding.
struct ForwardArgs {
  Problem problem;
  Input q, k, v;
  Output out, lse;
};

// A null dq, dk or dv is not wanted and costs nothing; a null dlse is zero.
struct BackwardArgs {
  Problem problem;
  Input dout, dlse, q, k, v, out, lse;
  Output dq, dk, dv;
};

// Runs body(begin, end, context) over disjoint ranges that cover [0, n), in parallel where it can.
using ParallelBody = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t n, ParallelBody body, void* context);

struct Threads {
  ParallelFor parallel_for;
  int64_t count;
};

void attention_forward(const ForwardArgs& args, const Threads& threads);
void attention_backward(const BackwardArgs& args, const Threads& threads);
// The forward on a problem with a cache.
void attention_decode(const ForwardArgs& args, const Threads& threads);

// The instruction set in use: "baseline", "avx2", "avx512" or "avx512bf16".
const char* isa_name();

}  // namespace softcap_cpu
