// From raw scores to unnormalised probabilities: P = 2^(outer * tanh(inner * s) - shift).
//
// The cap bounds the exponent, so one constant shift stands in for the row maximum: nothing is compared
// across threads and the output is never rescaled.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace softcap_hopper {

// Everything the exponent needs, folded on the host.
struct CapConstants {
  float inner;          // scale / softcap
  float outer;          // softcap * log2(e)
  float shift;          // exponent subtracted from every score
  float range;          // raw scores up to this size may take the polynomial
  float polynomial[5];  // outer * tanh(inner * s) = s * p(s^2) within range, lowest power first
};

// How tanh and exp2 share the special-function unit (16 results a clock an SM) and the multiply-add pipes.
enum class Tanh {
  kUnit,         // tanh.approx always
  kPolynomial4,  // 4 coefficients where a whole warp's tile is in range, else tanh.approx
  kPolynomial5,
};

__device__ __forceinline__ float tanh_unit(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp2_unit(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x for x in (-126, 127) on the multiply-add pipes, relative error 7.5e-5: the nearest integer goes to the
// exponent field, a cubic fitted to [-1/2, 1/2] does the rest.
__device__ __forceinline__ float exp2_fma(float x) {
  const float rounded = x + 12582912.f;  // 1.5 * 2^23: the low mantissa bits are now the nearest integer
  const float f = x - (rounded - 12582912.f);
  float p = fmaf(f, 0.05517167f, 0.24261113f);
  p = fmaf(p, f, 0.69326099f);
  p = fmaf(p, f, 0.99992807f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(rounded) << 23));
}

// Every kExp2Fma-th exponential runs on the multiply-add pipes; 0: none.
template <int kExp2Fma>
__device__ __forceinline__ float exp2_shared(float x, int index) {
  if (kExp2Fma != 0 && index % (kExp2Fma == 0 ? 1 : kExp2Fma) == 0) return exp2_fma(x);
  return exp2_unit(x);
}

// Scores to probabilities, in place.
template <Tanh kTanh, int kExp2Fma, int kCount>
__device__ __forceinline__ void exponentiate(float (&s)[kCount], const CapConstants& cap) {
  if constexpr (kTanh != Tanh::kUnit) {
    float largest[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest[i % 4] = fmaxf(largest[i % 4], fabsf(s[i]));
    const float m = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    if (__all_sync(0xffffffff, m <= cap.range)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float v = s[i] * s[i];
        float p;
        if constexpr (kTanh == Tanh::kPolynomial5) {
          p = fmaf(cap.polynomial[4], v, cap.polynomial[3]);
          p = fmaf(p, v, cap.polynomial[2]);
        } else {
          p = fmaf(cap.polynomial[3], v, cap.polynomial[2]);
        }
        p = fmaf(p, v, cap.polynomial[1]);
        p = fmaf(p, v, cap.polynomial[0]);
        s[i] = exp2_unit(fmaf(s[i], p, -cap.shift));
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] = exp2_shared<kExp2Fma>(fmaf(cap.outer, tanh_unit(s[i] * cap.inner), -cap.shift), i);
  }
}

template <bool kBf16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Rounds the probabilities to the A operand of the next product and adds them to the row sums: the rounded
// values, so that the rounding of numerator and denominator is the same.
template <bool kBf16, int kCount>
__device__ __forceinline__ void pack_and_sum(const float (&s)[kCount], uint32_t (&p)[kCount / 2],
                                             float (&sum)[2]) {
  float part[2][2] = {{sum[0], 0.f}, {sum[1], 0.f}};
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) {
    p[j] = pack<kBf16>(s[2 * j], s[2 * j + 1]);
    float low, high;
    if constexpr (kBf16) {
      low = __uint_as_float(p[j] << 16);
      high = __uint_as_float(p[j] & 0xffff0000u);
    } else {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&p[j]));
      low = both.x;
      high = both.y;
    }
    part[j % 2][j / 2 % 2] += low;
    part[j % 2][j / 2 % 2] += high;
  }
  sum[0] = part[0][0] + part[0][1];
  sum[1] = part[1][0] + part[1][1];
}

}  // namespace softcap_hopper
