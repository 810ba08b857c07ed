// Forward with a running row maximum, head_dim 128: float16, and caps too large for a constant shift.
#include "hopper_launch.cuh"

namespace softcap_hopper {
namespace {

template <bool kBf16, bool kPacked>
using Running = Config<128, 2, 128, 2, kBf16, kPacked, true, Overlap::kTurn, true, Tanh::kUnit, 0>;

}  // namespace

int launch_running_max_d128(const Args& args, const Problem& problem, const CapConstants& cap) {
  return launch_typed<Running>(args, problem, cap);
}

}  // namespace softcap_hopper
