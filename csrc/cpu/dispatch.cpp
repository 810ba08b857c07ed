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
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define SOFTCAP_HAS_PAIRS
namespace avx512bf16 {
const PairKernels* table();
}
#endif

namespace {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#endif

// The best that the machine has, or less if SOFTCAP_OPS_CPU_ISA asks for less. Never more: it would crash.
Isa choose() {
#if defined(__x86_64__)
  const char* const wish = std::getenv("SOFTCAP_OPS_CPU_ISA");
  auto stop_at = [wish](const char* isa) { return wish != nullptr && std::strcmp(wish, isa) == 0; };
  if (stop_at("baseline") || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return Isa::kBaseline;
  if (stop_at("avx2") || !has_avx512()) return Isa::kAvx2;
#if defined(SOFTCAP_HAS_PAIRS)
  if (!stop_at("avx512") && __builtin_cpu_supports("avx512bf16")) return Isa::kAvx512Bf16;
#endif
  return Isa::kAvx512;
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
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      return avx512::table<T>();
    case Isa::kAvx2:
      return avx2::table<T>();
    case Isa::kBaseline:
      break;
  }
#endif
  return baseline::table<T>();
}

template const Kernels<float>& kernels<float>();
template const Kernels<double>& kernels<double>();

const PairKernels* pair_kernels() {
#if defined(SOFTCAP_HAS_PAIRS)
  if (isa() == Isa::kAvx512Bf16) return avx512bf16::table();
#endif
  return nullptr;
}

const char* isa_name() {
  switch (isa()) {
    case Isa::kAvx512Bf16:
      return "avx512bf16";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

}  // namespace softcap_cpu
