// From raw scores to unnormalised probabilities: P = 2^(outer * tanh(inner * s) - shift).
//
// The cap bounds the exponent, so one constant shift stands in for the row maximum: nothing is compared
// across threads and the output is never rescaled.
//
// tanh costs the special-function unit as much as exp2 does, and that unit is the bottleneck. Within a range
// an odd polynomial does its work on the multiply-add pipes. Looking at every score to see whether it is in
// range would cost as much again, so the range is checked on the sums instead. With three or five
// coefficients the polynomial rises everywhere and, out of range, leaves tanh on the outer side. So if a sum
// of probabilities is at most what one score at the upper end of the range contributes, no score was above
// the range; and a score below it contributes too little to matter once the sum is at least `least`, since
// sums only grow.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace softcap_hopper {

// Everything the exponent needs, folded on the host.
struct CapConstants {
  float inner;  // scale / softcap
  float outer;  // softcap * log2(e)
  float shift;  // exponent subtracted from every score
  float least,
      most;  // the polynomial holds where a thread's sum of a row is in [least, most]; least > most: never
  float polynomial[5];  // outer * tanh(inner * s) = s * p(s^2) within range, lowest first
};

// How tanh and exp2 share the special-function unit (16 results a clock an SM) and the multiply-add pipes.
enum class Tanh {
  kUnit,         // tanh.approx always
  kPolynomial3,  // this many coefficients where a warp's whole tile is in range, else tanh.approx
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

// The larger one; NaN if either is.
__device__ __forceinline__ float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// 2^x for x in (-126, 127) on the multiply-add pipes, relative error 1.0e-4, exact for whole x: the nearest
// integer goes to the exponent field, a cubic fitted to [-1/2, 1/2] does the rest.
__device__ __forceinline__ float exp2_fma(float x) {
  const float rounded = x + 12582912.f;  // 1.5 * 2^23: the low mantissa bits are now the nearest integer
  const float f = x - (rounded - 12582912.f);
  float p = fmaf(f, 0.05500893f, 0.24221100f);
  p = fmaf(p, f, 0.69328293f);
  p = fmaf(p, f, 1.f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(rounded) << 23));
}

// Every kExp2Fma-th exponential runs on the multiply-add pipes; 0: none.
template <int kExp2Fma>
__device__ __forceinline__ constexpr bool on_fma(int index) {
  return kExp2Fma != 0 && index % (kExp2Fma == 0 ? 1 : kExp2Fma) == 0;
}

template <int kExp2Fma>
__device__ __forceinline__ float exp2_shared(float x, int index) {
  if (on_fma<kExp2Fma>(index)) return exp2_fma(x);
  return exp2_unit(x);
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

// Sums of a thread's two rows: of the probabilities, for lse; and of their roundings, which the output
// products take, to divide the output by.
struct Sums {
  float exact[2], rounded[2];
};

template <bool kBf16>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (kBf16)
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

// Adds to the sums and packs into the A operand of the next product, for a multiple of 8 scores. With
// kRounded off, the exact sums stand in for the rounded ones: over a whole tile of keys the roundings average
// out, and a masked one, where few keys may be left and they do not, takes the slower way.
template <bool kRounded, bool kBf16, int kCount>
__device__ __forceinline__ void sum_and_pack(const float (&e)[kCount], uint32_t* p, Sums& sums) {
  float exact[2][2] = {}, rounded[2][2] = {};
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) {
    const int row = j % 2, part = j / 2 % 2;
    p[j] = pack<kBf16>(e[2 * j], e[2 * j + 1]);
    exact[row][part] += e[2 * j];
    exact[row][part] += e[2 * j + 1];
    if constexpr (kRounded) {
      const float2 back = unpack<kBf16>(p[j]);
      rounded[row][part] += back.x;
      rounded[row][part] += back.y;
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float sum = exact[row][0] + exact[row][1];
    sums.exact[row] += sum;
    sums.rounded[row] += kRounded ? rounded[row][0] + rounded[row][1] : sum;
  }
}

// A chunk of scores by the polynomial.
template <Tanh kTanh, int kCount>
__device__ __forceinline__ void by_polynomial(const float* s, float (&e)[kCount], const CapConstants& cap) {
  constexpr int kTop = kTanh == Tanh::kPolynomial5 ? 4 : 2;
  // A few scores side by side: a warp has little company on its scheduler, so its own code must hide the
  // latencies.
  constexpr int kStep = 2;
#pragma unroll
  for (int begin = 0; begin < kCount; begin += kStep) {
    float v[kStep], x[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) v[i] = s[begin + i] * s[begin + i];
#pragma unroll
    for (int i = 0; i < kStep; ++i) x[i] = fmaf(cap.polynomial[kTop], v[i], cap.polynomial[kTop - 1]);
#pragma unroll
    for (int c = kTop - 2; c >= 0; --c) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) x[i] = fmaf(x[i], v[i], cap.polynomial[c]);
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) e[begin + i] = exp2_unit(fmaf(s[begin + i], x[i], -cap.shift));
  }
}

// A chunk of scores by tanh.approx.
template <int kExp2Fma, int kCount>
__device__ __forceinline__ void by_unit(const float* s, float (&e)[kCount], const CapConstants& cap) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    e[i] = exp2_shared<kExp2Fma>(fmaf(cap.outer, tanh_unit(s[i] * cap.inner), -cap.shift), i);
  }
}

// Scores to capped scores in powers of two, in place.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], const CapConstants& cap) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = cap.outer * tanh_unit(s[i] * cap.inner);
}

}  // namespace softcap_hopper
