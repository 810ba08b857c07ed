// Host side of one kernel configuration: tensor maps, grid, launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "hopper_fwd_kernel.cuh"
#include "softcap_hopper.h"

namespace softcap_hopper {

enum Error : int {
  kOk = 0,
  kErrorStruct,
  kErrorShape,
  kErrorHeads,
  kErrorHeadDim,
  kErrorDtype,
  kErrorSoftcap,
  kErrorScale,
  kErrorWindow,
  kErrorPointer,
  kErrorStride,
  kErrorPacked,
  kErrorDevice,
  kErrorDriver,
  kErrorTensorMap,
  kErrorLaunch,
  kErrorCount,
};

using Args = softcap_hopper_fwd_args;

// Why the arguments would be refused.
int check(const Args* args);

// One entry a head dimension, each in a file of its own so that they compile side by side.
int launch_d64(const Args& args, const Problem& problem, const CapConstants& cap);
int launch_d128(const Args& args, const Problem& problem, const CapConstants& cap);
int launch_d256(const Args& args, const Problem& problem, const CapConstants& cap);

int launch_running_max_d64(const Args& args, const Problem& problem, const CapConstants& cap);
int launch_running_max_d128(const Args& args, const Problem& problem, const CapConstants& cap);
int launch_running_max_d256(const Args& args, const Problem& problem, const CapConstants& cap);

// Encodes a tensor map whose box is `rows` tokens of one head, laid out in shared memory as hopper_wgmma.cuh
// says.
int encode_map(CUtensorMap* map, const void* data, int head_dim, int dtype, int64_t tokens, int heads,
               int batch, int64_t stride_token, int64_t stride_head, int64_t stride_batch, int rows);

// Folds softcap and scale into a polynomial of 3 or 5 coefficients and the sums that prove it in range.
void fill_polynomial(CapConstants* cap, int coefficients, int keys);

// Multiprocessors of the current device, 0 on failure.
int multiprocessors();

// Lets a kernel have this much shared memory on the current device; `allowed` remembers on which ones it may.
int allow_shared(const void* kernel, int bytes, std::atomic<uint64_t>* allowed);

// The fields that the problems of both directions share, from the arguments of either; the rest is 0.
template <class P, class A>
P problem_of(const A& a) {
  P p = {};
  p.cu_seqlens_q = a.cu_seqlens_q;
  p.cu_seqlens_k = a.cu_seqlens_k;
  p.out = a.out;
  p.lse = a.lse;
  p.out_stride_batch = a.out_stride_batch;
  p.out_stride_token = a.out_stride_token;
  p.out_stride_head = a.out_stride_head;
  p.total_q = a.total_q;
  p.batch = a.batch;
  p.heads_q = a.heads_q;
  p.heads_per_key = a.heads_q / a.heads_k;
  p.seqlen_q = a.seqlen_q;
  p.seqlen_k = a.seqlen_k;
  p.left = a.window_left < 0 || a.window_left > kUnlimited ? kUnlimited : a.window_left;
  p.right = a.window_right < 0 || a.window_right > kUnlimited ? kUnlimited : a.window_right;
  if (a.causal) p.right = 0;
  p.sequences = a.batch + (a.cu_seqlens_q != nullptr ? 1 : 0);
  return p;
}

// The tensor maps of q, whose box is `rows` tokens, and of k and v.
template <class C, class A>
int encode_maps(const A& a, int rows, CUtensorMap* q_map, CUtensorMap* k_map, CUtensorMap* v_map) {
  const bool packed = a.cu_seqlens_q != nullptr;
  const int batch = packed ? 1 : a.batch;
  const int64_t tokens_q = packed ? a.total_q : a.seqlen_q;
  const int64_t tokens_k = packed ? a.total_k : a.seqlen_k;
  int error = encode_map(q_map, a.q, C::kHeadDim, a.dtype, tokens_q, a.heads_q, batch, a.q_stride_token,
                         a.q_stride_head, a.q_stride_batch, rows);
  if (error == kOk) {
    error = encode_map(k_map, a.k, C::kHeadDim, a.dtype, tokens_k, a.heads_k, batch, a.k_stride_token,
                       a.k_stride_head, a.k_stride_batch, C::kKeys);
  }
  if (error == kOk) {
    error = encode_map(v_map, a.v, C::kHeadDim, a.dtype, tokens_k, a.heads_k, batch, a.v_stride_token,
                       a.v_stride_head, a.v_stride_batch, C::kKeys);
  }
  return error;
}

template <class C>
int launch(const Args& a, Problem problem, CapConstants cap) {
  fill_polynomial(&cap, C::kTanh == Tanh::kPolynomial5 ? 5 : 3, a.seqlen_k);
  CUtensorMap q_map, k_map, v_map;
  int error = encode_maps<C>(a, 64, &q_map, &k_map, &v_map);
  if (error != kOk) return error;

  problem.row_tiles = (a.seqlen_q + C::kRows - 1) / C::kRows;
  if (a.cu_seqlens_q != nullptr && problem.row_tiles == 0)
    problem.row_tiles = 1;  // the rows past the last sequence
  const int processors = multiprocessors();
  if (processors == 0) return kErrorDevice;
  // Query heads whose keys and values fill about half of the L2 cache; all heads of one key head together.
  const int64_t key_bytes = int64_t{4} * C::kHeadDim * (a.seqlen_k > 0 ? a.seqlen_k : 1);
  int64_t group = (int64_t{24} << 20) / key_bytes;
  group = (group < 1 ? 1 : group) * problem.heads_per_key;
  const int64_t heads = int64_t{problem.sequences} * a.heads_q;
  problem.group = static_cast<int>(group < heads ? group : heads);
  // Pairs even out rows that see ever more keys, when there are enough of them to fill the last round.
  int64_t tiles = heads * ((problem.row_tiles + 1) / 2);
  const int64_t rounds = (tiles + processors - 1) / processors;
  const bool open_left = problem.left >= a.seqlen_k;
  problem.paired = problem.right != kUnlimited && open_left && problem.row_tiles > 1 &&
                   tiles * 10 >= rounds * processors * 8;
  problem.heavy_first = problem.right != kUnlimited && !problem.paired;
  if (!problem.paired) tiles = heads * problem.row_tiles;
  if (tiles == 0) return kOk;
  if (tiles > (int64_t{1} << 30)) return kErrorShape;
  const int blocks = static_cast<int>(tiles < processors ? tiles : processors);

  const auto kernel = forward_kernel<C>;
  static std::atomic<uint64_t> allowed;
  error = allow_shared(reinterpret_cast<const void*>(kernel), C::kSharedBytes, &allowed);
  if (error != kOk) return error;
  kernel<<<blocks, C::kThreads, C::kSharedBytes, static_cast<cudaStream_t>(a.stream)>>>(
      q_map, k_map, v_map, problem, cap, static_cast<int>(tiles));
  return cudaGetLastError() == cudaSuccess ? kOk : kErrorLaunch;
}

// C<kBf16, kPacked> as the arguments have it.
template <template <bool, bool> class C>
int launch_typed(const Args& args, const Problem& problem, const CapConstants& cap) {
  const bool packed = args.cu_seqlens_q != nullptr;
  if (args.dtype == SOFTCAP_HOPPER_BF16) {
    return packed ? launch<C<true, true>>(args, problem, cap) : launch<C<true, false>>(args, problem, cap);
  }
  return packed ? launch<C<false, true>>(args, problem, cap) : launch<C<false, false>>(args, problem, cap);
}

}  // namespace softcap_hopper
