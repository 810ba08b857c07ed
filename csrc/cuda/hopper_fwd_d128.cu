// Forward, head_dim 128, bfloat16.
#include "hopper_launch.cuh"

// Keys a tile, stages, consumers in turn, two sets of probabilities, tanh, every n-th exp2 on the FMA pipes.
#ifndef SOFTCAP_D128_CONFIG
#define SOFTCAP_D128_CONFIG 128, 2, true, true, Tanh::kUnit, 0
#endif

namespace softcap_hopper {
namespace {

template <int kKeys, int kStages, bool kTurns, bool kTwo, Tanh kTanh, int kExp2Fma>
int choose(const Args& args, const Problem& problem, const CapConstants& cap) {
#ifndef SOFTCAP_DENSE_ONLY
  if (args.cu_seqlens_q != nullptr) {
    return launch<Config<128, 2, kKeys, kStages, true, true, kTurns, kTwo, kTanh, kExp2Fma>>(args, problem,
                                                                                             cap);
  }
#endif
  return launch<Config<128, 2, kKeys, kStages, true, false, kTurns, kTwo, kTanh, kExp2Fma>>(args, problem,
                                                                                            cap);
}

}  // namespace

int launch_d128(const Args& args, const Problem& problem, const CapConstants& cap) {
  return choose<SOFTCAP_D128_CONFIG>(args, problem, cap);
}

}  // namespace softcap_hopper
