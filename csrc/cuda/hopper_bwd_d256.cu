// Backward, head_dim 256.
#include "hopper_bwd_launch.cuh"

namespace softcap_hopper {

int launch_backward_d256(const BackwardArgs& args, const BackwardProblem& problem) {
  return args.dtype == SOFTCAP_HOPPER_BF16
             ? launch_backward<BackwardConfig<256, 64, 2, true>>(args, problem)
             : launch_backward<BackwardConfig<256, 64, 2, false>>(args, problem);
}

}  // namespace softcap_hopper
