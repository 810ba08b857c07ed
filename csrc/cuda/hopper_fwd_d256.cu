// Forward, head_dim 256, bfloat16.
#include "hopper_launch.cuh"

namespace softcap_hopper {
namespace {

template <bool kPacked>
using Chosen = Config<256, 2, 64, 2, true, kPacked, false, Overlap::kTurn, false, Tanh::kUnit, 0>;

}  // namespace

int launch_d256(const Args& args, const Problem& problem, const CapConstants& cap) {
  return args.cu_seqlens_q != nullptr ? launch<Chosen<true>>(args, problem, cap)
                                      : launch<Chosen<false>>(args, problem, cap);
}

}  // namespace softcap_hopper
