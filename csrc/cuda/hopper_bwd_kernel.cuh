// Backward kernel: a producer warp and two consumer warpgroups a block, one tile of keys a block.
#pragma once

#include "hopper_bwd_consumer.cuh"
#include "hopper_bwd_wide.cuh"

namespace softcap_hopper {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                    const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map,
                    const __grid_constant__ BackwardProblem problem) {
  extern __shared__ uint8_t memory[];
  const BackwardShared<C> shared(shared_address(memory));
  const KeyTile t = find_key_tile<C::kQueries, C::kKeys>(problem, blockIdx.x);
  if (t.tile * C::kKeys >= t.lengths.seqlen_k) return;
  if (threadIdx.x == 0) {
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    prefetch_map(&v_map);
    prefetch_map(&dout_map);
    barrier_init(shared.keys_full(), 1);
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(shared.q_full(s), 1);
      barrier_init(shared.dout_full(s), 1);
      barrier_init(shared.q_empty(s), kArrivals);
      barrier_init(shared.dout_empty(s), kArrivals);
    }
    for (int s = 0; s < C::kScoreStages; ++s) {
      barrier_init(shared.ds_full(s), kArrivals);
      barrier_init(shared.ds_empty(s), kArrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x == 0 && t.query_begin < t.query_end) {
      produce_backward<C>(problem, shared, t, &q_map, &k_map, &v_map, &dout_map);
    }
  } else {
    take_registers<240>();
    if constexpr (C::kWide) {
      WideBackwardConsumer<C>(problem, shared, t).run();
    } else {
      BackwardConsumer<C>(problem, shared, t).run();
    }
  }
}

}  // namespace softcap_hopper
