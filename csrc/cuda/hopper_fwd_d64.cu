// Forward, head_dim 64, bfloat16.
#include "hopper_launch.cuh"

namespace softcap_hopper {
namespace {

template <bool kPacked>
using Chosen = Config<64, 4, 64, 5, true, kPacked, false, Overlap::kApart, false, Tanh::kPolynomial3, 4>;

}  // namespace

int launch_d64(const Args& args, const Problem& problem, const CapConstants& cap) {
  return args.cu_seqlens_q != nullptr ? launch<Chosen<true>>(args, problem, cap)
                                      : launch<Chosen<false>>(args, problem, cap);
}

}  // namespace softcap_hopper
