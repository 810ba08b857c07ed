// Forward, head_dim 128, bfloat16.
#include "hopper_launch.cuh"

namespace softcap_hopper {
namespace {

template <bool kPacked>
using Long = Config<128, 2, 112, 3, true, kPacked, false, Overlap::kOpen, false, Tanh::kPolynomial3, 0>;
// As many keys a tile as rows: a short causal problem is mostly diagonal, and that meets the fewest tiles so.
template <bool kPacked>
using Short = Config<128, 2, 128, 3, true, kPacked, false, Overlap::kOpen, false, Tanh::kPolynomial3, 4>;

template <bool kPacked>
int choose(const Args& args, const Problem& problem, const CapConstants& cap) {
  if (args.causal && args.seqlen_k <= 2048) return launch<Short<kPacked>>(args, problem, cap);
  return launch<Long<kPacked>>(args, problem, cap);
}

}  // namespace

int launch_d128(const Args& args, const Problem& problem, const CapConstants& cap) {
  return args.cu_seqlens_q != nullptr ? choose<true>(args, problem, cap) : choose<false>(args, problem, cap);
}

}  // namespace softcap_hopper
