// Forward with a running row maximum, head_dim 64: float16, and caps too large for a constant shift.
#include "hopper_launch.cuh"

namespace softcap_hopper {
namespace {

template <bool kBf16, bool kPacked>
using Running = Config<64, 3, 96, 3, kBf16, kPacked, true, Overlap::kTurn, true, Tanh::kUnit, 0>;

}  // namespace

int launch_running_max_d64(const Args& args, const Problem& problem, const CapConstants& cap) {
  return launch_typed<Running>(args, problem, cap);
}

}  // namespace softcap_hopper
