// Forward, head_dim 64, bfloat16.
#include "hopper_launch.cuh"

// Keys a tile, stages, consumers in turn, two sets of probabilities, tanh, every n-th exp2 on the FMA pipes.
#ifndef SOFTCAP_D64_CONFIG
#define SOFTCAP_D64_CONFIG 128, 3, false, true, Tanh::kPolynomial4, 2
#endif

namespace softcap_hopper {
namespace {

template <int kKeys, int kStages, bool kTurns, bool kTwo, Tanh kTanh, int kExp2Fma>
int choose(const Args& args, const Problem& problem, const CapConstants& cap) {
#ifndef SOFTCAP_DENSE_ONLY
  if (args.cu_seqlens_q != nullptr) {
    return launch<Config<64, 3, kKeys, kStages, true, true, kTurns, kTwo, kTanh, kExp2Fma>>(args, problem,
                                                                                            cap);
  }
#endif
  return launch<Config<64, 3, kKeys, kStages, true, false, kTurns, kTwo, kTanh, kExp2Fma>>(args, problem,
                                                                                           cap);
}

}  // namespace

int launch_d64(const Args& args, const Problem& problem, const CapConstants& cap) {
  return choose<SOFTCAP_D64_CONFIG>(args, problem, cap);
}

}  // namespace softcap_hopper
