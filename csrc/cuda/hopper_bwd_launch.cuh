// Host side of the backward: tensor maps, grids, the three launches.
#pragma once

#include "hopper_bwd_ends.cuh"
#include "hopper_launch.cuh"

namespace softcap_hopper {

using BackwardArgs = softcap_hopper_bwd_args;

constexpr int kBackwardQueries = 64;  // a tile

// One entry a head dimension, each in a file of its own so that they compile side by side.
int launch_backward_d64(const BackwardArgs& args, const BackwardProblem& problem);
int launch_backward_d128(const BackwardArgs& args, const BackwardProblem& problem);
int launch_backward_d256(const BackwardArgs& args, const BackwardProblem& problem);

template <class C>
int launch_backward(const BackwardArgs& a, BackwardProblem p) {
  static_assert(C::kQueries == kBackwardQueries);
  const bool packed = p.cu_seqlens_q != nullptr;
  p.key_tiles = (a.seqlen_k + C::kKeys - 1) / C::kKeys;
  if (packed && p.key_tiles == 0) p.key_tiles = 1;  // the rows past the last sequence
  const int64_t rounds = int64_t{p.sequences} * p.heads_k * p.key_tiles;
  const int64_t prepared = int64_t{p.batch} * p.heads_q * p.query_tiles;
  const int64_t finished = int64_t{p.sequences} * p.heads_q * p.query_tiles;
  if (rounds > (int64_t{1} << 30) || finished > (int64_t{1} << 30)) return kErrorShape;

  CUtensorMap q_map, k_map, v_map, dout_map;
  const int batch = packed ? 1 : a.batch;
  const int64_t tokens_q = packed ? a.total_q : a.seqlen_q;
  const int64_t tokens_k = packed ? a.total_k : a.seqlen_k;
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t tokens, int heads, int64_t token,
                          int64_t head, int64_t sequence, int rows) {
    return encode_map(map, data, C::kHeadDim, a.dtype, tokens, heads, batch, token, head, sequence, rows);
  };
  int error = encode(&q_map, a.q, tokens_q, a.heads_q, a.q_stride_token, a.q_stride_head, a.q_stride_batch,
                     C::kQueries);
  if (error == kOk) {
    error = encode(&dout_map, a.dout, tokens_q, a.heads_q, a.dout_stride_token, a.dout_stride_head,
                   a.dout_stride_batch, C::kQueries);
  }
  if (error == kOk) {
    error = encode(&k_map, a.k, tokens_k, a.heads_k, a.k_stride_token, a.k_stride_head, a.k_stride_batch,
                   C::kKeys);
  }
  if (error == kOk) {
    error = encode(&v_map, a.v, tokens_k, a.heads_k, a.v_stride_token, a.v_stride_head, a.v_stride_batch,
                   C::kKeys);
  }
  if (error != kOk) return error;

  const auto kernel = backward_kernel<C>;
  static std::atomic<uint64_t> allowed;
  error = allow_shared(reinterpret_cast<const void*>(kernel), C::kSharedBytes, &allowed);
  if (error != kOk) return error;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  if (prepared > 0) prepare_kernel<C><<<static_cast<int>(prepared), kEndThreads, 0, stream>>>(p);
  if (rounds > 0) {
    kernel<<<static_cast<int>(rounds), C::kThreads, C::kSharedBytes, stream>>>(q_map, k_map, v_map, dout_map,
                                                                               p);
  }
  if (finished > 0) finish_kernel<C><<<static_cast<int>(finished), kEndThreads, 0, stream>>>(p);
  return cudaGetLastError() == cudaSuccess ? kOk : kErrorLaunch;
}

}  // namespace softcap_hopper
