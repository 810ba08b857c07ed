// Before and after the backward kernel: the workspace is prepared, and the sums of dq are rounded.
#pragma once

#include "hopper_bwd_kernel.cuh"

namespace softcap_hopper {

constexpr int kEndThreads = 256;

// One block a tile of queries of a head: lse and delta of its rows, zeros to add to.
template <class C>
__global__ void __launch_bounds__(kEndThreads) prepare_kernel(const __grid_constant__ BackwardProblem p) {
  constexpr int kLanes = C::kHeadDim / 8;  // threads a row, 16 bytes each
  const int pair = blockIdx.x / p.query_tiles, tile = blockIdx.x - pair * p.query_tiles;
  const int sequence = pair / p.heads_q, head = pair - sequence * p.heads_q;
  const Lengths l = lengths_of(p, sequence);
  if (tile * C::kQueries >= l.seqlen_q) return;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t index = tile_index<C::kQueries>(p, sequence, head, tile);
  float4* sums = reinterpret_cast<float4*>(p.sums + index * (C::kQueries * C::kHeadDim));
  for (int i = threadIdx.x; i < C::kQueries * C::kHeadDim / 4; i += kEndThreads) sums[i] = float4{};
  if (p.turns != nullptr && threadIdx.x < 2) p.turns[2 * index + threadIdx.x] = 0;

  const int lane = threadIdx.x % kLanes;
  const int64_t batch = packed ? 0 : sequence;
  const uint16_t* out =
      static_cast<const uint16_t*>(p.out) + batch * p.out_stride_batch + head * p.out_stride_head;
  const uint16_t* dout =
      static_cast<const uint16_t*>(p.dout) + batch * p.dout_stride_batch + head * p.dout_stride_head;
  float* stats = p.stats + index * Stats<C::kQueries>::kWords;
  if (threadIdx.x == 0)
    *reinterpret_cast<int4*>(stats + Stats<C::kQueries>::kPlace) =
        make_int4(tile, static_cast<int>(index), 0, 0);
#pragma unroll 4
  for (int i = threadIdx.x / kLanes; i < C::kQueries; i += kEndThreads / kLanes) {
    const int row = tile * C::kQueries + i;
    float dot = 0.f;
    if (row < l.seqlen_q) {
      const int64_t token = l.start_q + row;
      const uint4 a = *reinterpret_cast<const uint4*>(out + token * p.out_stride_token + 8 * lane);
      const uint4 b = *reinterpret_cast<const uint4*>(dout + token * p.dout_stride_token + 8 * lane);
      const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 u = unpack<C::kBf16>(x[j]), w = unpack<C::kBf16>(y[j]);
        dot = fmaf(u.x, w.x, fmaf(u.y, w.y, dot));
      }
    }
#pragma unroll
    for (int bit = kLanes / 2; bit > 0; bit /= 2) dot += __shfl_xor_sync(0xffffffff, dot, bit);
    if (lane == 0) {
      float lse = INFINITY, delta = 0.f;
      if (row < l.seqlen_q) {
        const int64_t at =
            packed ? head * p.total_q + l.start_q + row : (batch * p.heads_q + head) * p.seqlen_q + row;
        const float natural = p.lse[at];
        if (natural != -INFINITY) {
          lse = natural * 1.4426950408889634f;
          delta = p.dlse == nullptr ? dot : dot - p.dlse[at];
        }
      }
      stats[i] = lse;
      stats[Stats<C::kQueries>::kDelta + i] = delta;
    }
  }
}

// One block a tile of queries of a head: the sums become dq. Rows past the last packed sequence become zero.
template <class C>
__global__ void __launch_bounds__(kEndThreads) finish_kernel(const __grid_constant__ BackwardProblem p) {
  const int pair = blockIdx.x / p.query_tiles, tile = blockIdx.x - pair * p.query_tiles;
  const int sequence = pair / p.heads_q, head = pair - sequence * p.heads_q;
  const Lengths l = lengths_of(p, sequence);
  if (tile * C::kQueries >= l.seqlen_q) return;
  const int part = threadIdx.x / 128, thread = threadIdx.x % 128;
  float x[C::kSums] = {};
  const bool tail = sequence == p.batch;
  if (!tail) {
    const int64_t index = tile_index<C::kQueries>(p, sequence, head, tile);
    const float* from = p.sums + index * (C::kQueries * C::kHeadDim) + part * C::kSums * 128 + thread * 4;
#pragma unroll
    for (int i = 0; i < C::kSums; i += 4) {
      const float4 y = *reinterpret_cast<const float4*>(from + i * 128);
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
  }
  const int64_t batch = p.cu_seqlens_q == nullptr ? sequence : 0;
  const int64_t stride = static_cast<int64_t>(p.heads_q) * C::kHeadDim;
  uint16_t* dq =
      static_cast<uint16_t*>(p.dq) + (batch * p.seqlen_q + l.start_q) * stride + head * C::kHeadDim;
  const int column = part * C::kHeadDim / 2;
  const int row = tile * C::kQueries + 16 * (thread / 32) + thread % 32 / 4;
  int end = min((tile + 1) * C::kQueries, l.seqlen_q);
  if (tail && tile == p.query_tiles - 1) end = l.seqlen_q;
  for (int step = 0; tile * C::kQueries + step < end; step += C::kQueries) {
    write_gradient<C::kHeadDim, C::kBf16>(dq, stride, row + step, end, column, x, p.scale);
  }
}

}  // namespace softcap_hopper
