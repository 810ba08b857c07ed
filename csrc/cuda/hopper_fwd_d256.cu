// Forward, head_dim 256, bfloat16.
#include "hopper_launch.cuh"

// Consumers, keys a tile, stages, consumers in turn, drained output product, tanh, every n-th exp2 on the FMA
// pipes.
#ifndef SOFTCAP_D256_CONFIG
#define SOFTCAP_D256_CONFIG 2, 80, 2, false, true, Tanh::kUnit, 0
#endif

namespace softcap_hopper {
namespace {

template <int kConsumers, int kKeys, int kStages, bool kTurns, bool kDrain, Tanh kTanh, int kExp2Fma>
int choose(const Args& args, const Problem& problem, const CapConstants& cap) {
#ifndef SOFTCAP_DENSE_ONLY
  if (args.cu_seqlens_q != nullptr) {
    return launch<
        Config<256, kConsumers, kKeys, kStages, true, true, kTurns, kDrain, false, kTanh, kExp2Fma>>(
        args, problem, cap);
  }
#endif
  return launch<Config<256, kConsumers, kKeys, kStages, true, false, kTurns, kDrain, false, kTanh, kExp2Fma>>(
      args, problem, cap);
}

}  // namespace

int launch_d256(const Args& args, const Problem& problem, const CapConstants& cap) {
  return choose<SOFTCAP_D256_CONFIG>(args, problem, cap);
}

}  // namespace softcap_hopper
