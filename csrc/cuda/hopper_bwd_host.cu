// The C entry points of the backward: argument checks, the layout of the workspace.
#include <math.h>

#include "hopper_bwd_launch.cuh"

namespace softcap_hopper {

namespace {

// What the forward would be asked with these arguments, its result at `out`.
Args forward_args(const BackwardArgs& b, const void* out, int64_t batch, int64_t token, int64_t head) {
  Args a = {};
  a.struct_size = sizeof(a);
  a.q = b.q, a.k = b.k, a.v = b.v;
  a.out = const_cast<void*>(out);
  a.cu_seqlens_q = b.cu_seqlens_q, a.cu_seqlens_k = b.cu_seqlens_k;
  a.q_stride_batch = b.q_stride_batch, a.q_stride_token = b.q_stride_token, a.q_stride_head = b.q_stride_head;
  a.k_stride_batch = b.k_stride_batch, a.k_stride_token = b.k_stride_token, a.k_stride_head = b.k_stride_head;
  a.v_stride_batch = b.v_stride_batch, a.v_stride_token = b.v_stride_token, a.v_stride_head = b.v_stride_head;
  a.out_stride_batch = batch, a.out_stride_token = token, a.out_stride_head = head;
  a.total_q = b.total_q, a.total_k = b.total_k;
  a.batch = b.batch, a.seqlen_q = b.seqlen_q, a.seqlen_k = b.seqlen_k;
  a.heads_q = b.heads_q, a.heads_k = b.heads_k, a.head_dim = b.head_dim, a.dtype = b.dtype;
  a.causal = b.causal, a.window_left = b.window_left, a.window_right = b.window_right;
  a.softcap = b.softcap, a.scale = b.scale;
  return a;
}

int check_backward(const BackwardArgs* b) {
  if (b == nullptr || b->struct_size != sizeof(*b)) return kErrorStruct;
  const Args out = forward_args(*b, b->out, b->out_stride_batch, b->out_stride_token, b->out_stride_head);
  const Args dout =
      forward_args(*b, b->dout, b->dout_stride_batch, b->dout_stride_token, b->dout_stride_head);
  int error = check(&out);
  if (error == kOk) error = check(&dout);
  if (error != kOk) return error;
  for (const void* data : {b->dq, b->dk, b->dv, b->workspace}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return kErrorPointer;
  }
  return kOk;
}

int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

struct Workspace {
  int64_t tiles_a_head, stats, sums, turns, bytes;
};

Workspace layout(const BackwardArgs& b) {
  const int queries = kBackwardQueries;
  const bool packed = b.cu_seqlens_q != nullptr;
  Workspace w;
  w.tiles_a_head = packed ? b.total_q / queries + b.batch + 1 : (b.seqlen_q + queries - 1) / queries;
  const int64_t tiles = w.tiles_a_head * b.heads_q * (packed ? 1 : b.batch);
  w.stats = 0;
  w.sums = aligned(tiles * Stats<kBackwardQueries>::kWords * 4);
  w.turns = w.sums + tiles * queries * b.head_dim * 4;
  w.bytes = w.turns + (b.deterministic ? aligned(tiles * 2 * 4) : 0);
  return w;
}

int backward(const BackwardArgs& args) {
  BackwardArgs a = args;
  const bool packed = a.cu_seqlens_q != nullptr;
  const int64_t rows_q = packed ? a.total_q : int64_t{a.batch} * a.seqlen_q;
  const int64_t rows_k = packed ? a.total_k : int64_t{a.batch} * a.seqlen_k;
  if (rows_q == 0 && rows_k == 0) return kOk;
  // Without queries, or keys, any valid address serves: nothing is read through it.
  if (rows_q == 0) a.q = a.dout = a.k;
  if (rows_k == 0) a.k = a.v = a.q;

  const Workspace w = layout(a);
  if (w.tiles_a_head > (1 << 30)) return kErrorShape;
  uint8_t* workspace = static_cast<uint8_t*>(a.workspace);
  BackwardProblem p = problem_of<BackwardProblem>(a);
  p.dout = a.dout;
  p.dlse = a.dlse;
  p.dq = a.dq;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dout_stride_batch = a.dout_stride_batch;
  p.dout_stride_token = a.dout_stride_token;
  p.dout_stride_head = a.dout_stride_head;
  p.total_k = a.total_k;
  p.heads_k = a.heads_k;
  const int queries = kBackwardQueries;
  p.query_tiles = (a.seqlen_q + queries - 1) / queries;
  if (packed && p.query_tiles == 0) p.query_tiles = 1;  // the rows past the last sequence
  p.tiles_a_head = static_cast<int>(w.tiles_a_head);
  p.inner = a.scale / a.softcap;
  p.outer = static_cast<float>(a.softcap * 1.4426950408889634);
  p.scale = a.scale;
  p.stats = reinterpret_cast<float*>(workspace + w.stats);
  p.sums = reinterpret_cast<float*>(workspace + w.sums);
  p.turns = a.deterministic ? reinterpret_cast<int*>(workspace + w.turns) : nullptr;
  switch (a.head_dim) {
    case 64:
      return launch_backward_d64(a, p);
    case 128:
      return launch_backward_d128(a, p);
    default:
      return launch_backward_d256(a, p);
  }
}

}  // namespace
}  // namespace softcap_hopper

extern "C" int64_t softcap_hopper_bwd_workspace(const softcap_hopper_bwd_args* args) {
  if (args == nullptr || args->struct_size != sizeof(*args)) return -softcap_hopper::kErrorStruct;
  return softcap_hopper::layout(*args).bytes;
}

extern "C" int softcap_hopper_bwd(const softcap_hopper_bwd_args* args) {
  const int error = softcap_hopper::check_backward(args);
  return error != softcap_hopper::kOk ? error : softcap_hopper::backward(*args);
}
