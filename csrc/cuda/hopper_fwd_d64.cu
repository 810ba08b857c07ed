// Forward, head_dim 64, bfloat16.
#include "hopper_launch.cuh"

// Consumers, keys a tile, stages, consumers in turn, drained output product, tanh, every n-th exp2 on the FMA
// pipes.
#ifndef SOFTCAP_D64_CONFIG
#define SOFTCAP_D64_CONFIG 3, 96, 3, true, false, Tanh::kPolynomial3, 4
#endif

namespace softcap_hopper {
namespace {

template <int kConsumers, int kKeys, int kStages, bool kTurns, bool kDrain, Tanh kTanh, int kExp2Fma>
int choose(const Args& args, const Problem& problem, const CapConstants& cap) {
#ifndef SOFTCAP_DENSE_ONLY
  if (args.cu_seqlens_q != nullptr) {
    return launch<Config<64, kConsumers, kKeys, kStages, true, true, kTurns, kDrain, false, kTanh, kExp2Fma>>(
        args, problem, cap);
  }
#endif
  return launch<Config<64, kConsumers, kKeys, kStages, true, false, kTurns, kDrain, false, kTanh, kExp2Fma>>(
      args, problem, cap);
}

}  // namespace

int launch_d64(const Args& args, const Problem& problem, const CapConstants& cap) {
  return choose<SOFTCAP_D64_CONFIG>(args, problem, cap);
}

}  // namespace softcap_hopper
