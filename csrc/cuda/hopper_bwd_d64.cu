// Backward, head_dim 64.
#include "hopper_bwd_launch.cuh"

namespace softcap_hopper {

int launch_backward_d64(const BackwardArgs& args, const BackwardProblem& problem) {
  return args.dtype == SOFTCAP_HOPPER_BF16 ? launch_backward<BackwardConfig<64, 64, 3, true>>(args, problem)
                                           : launch_backward<BackwardConfig<64, 64, 3, false>>(args, problem);
}

}  // namespace softcap_hopper
