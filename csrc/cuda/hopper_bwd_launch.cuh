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

// Which pairs of sequence and key head to hand out together: where later keys are seen by fewer queries, as
// many as have their queries, gradients and sums of dq in the L2 cache, in groups of about one size. The
// smaller one comes first: the last must go round all multiprocessors more than once to end evenly.
inline void group_pairs(BackwardProblem* p, int head_dim) {
  p->group = 1;
  if (p->right != kUnlimited && p->left == kUnlimited) {
    const int64_t pairs = int64_t{p->sequences} * p->heads_k;
    const int64_t bytes = int64_t{8} * head_dim * p->heads_per_key * (p->seqlen_q > 0 ? p->seqlen_q : 1);
    const int64_t fit = (int64_t{40} << 20) / bytes;
    const int64_t groups = fit < 2 ? pairs : (pairs + fit - 1) / fit;
    p->group = static_cast<int>((pairs + groups - 1) / groups);
    p->group_missing = static_cast<int>((p->group - pairs % p->group) % p->group);
  }
}

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
  group_pairs(&p, C::kHeadDim);

  CUtensorMap q_map, k_map, v_map, dout_map;
  int error = encode_maps<C>(a, C::kQueries, &q_map, &k_map, &v_map);
  if (error == kOk) {
    error = encode_map(&dout_map, a.dout, C::kHeadDim, a.dtype, packed ? a.total_q : a.seqlen_q, a.heads_q,
                       packed ? 1 : a.batch, a.dout_stride_token, a.dout_stride_head, a.dout_stride_batch,
                       C::kQueries);
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
