// Chooses, once, the instruction set whose kernels run.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace softcap_cpu {

#define SOFTCAP_DECLARE(isa) \
  namespace isa {            \
  template <typename T>      \
  const Kernels<T>& table(); \
  }
SOFTCAP_DECLARE(baseline)
#if defined(__x86_64__)
SOFTCAP_DECLARE(avx2)
SOFTCAP_DECLARE(avx512)
#endif
#undef SOFTCAP_DECLARE

namespace {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The best that the machine has, or less if SOFTCAP_OPS_CPU_ISA asks for less. Never more: it would crash.
Isa choose() {
#if defined(__x86_64__)
  const char* const wish = std::getenv("SOFTCAP_OPS_CPU_ISA");
  auto at_most = [wish](const char* lower) { return wish != nullptr && std::strcmp(wish, lower) == 0; };
  if (at_most("baseline")) return Isa::kBaseline;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kBaseline;
  if (at_most("avx2")) return Isa::kAvx2;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
#else
  return Isa::kBaseline;
#endif
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace

template <typename T>
const Kernels<T>& kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::table<T>();
    case Isa::kAvx2:
      return avx2::table<T>();
    default:
      break;
  }
#endif
  return baseline::table<T>();
}

template const Kernels<float>& kernels<float>();
template const Kernels<double>& kernels<double>();

const char* isa_name() {
  switch (isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace softcap_cpu
