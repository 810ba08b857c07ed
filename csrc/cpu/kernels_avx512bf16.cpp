// Products of bfloat16 pairs, for AVX-512 machines that have BF16. Empty elsewhere.
#include "kernels.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")
#endif

#define SOFTCAP_VECTOR_BYTES 64
#define SOFTCAP_TILE_VECTORS 4
#define SOFTCAP_PAIRS

namespace softcap_cpu {
namespace avx512bf16 {

#include "gemm.inc"

// (low, high) lane by lane, each rounded to nearest even.
SOFTCAP_INLINE __m512i pair(__m512 low, __m512 high) {
  // The conversion puts all of low before all of high; this order interleaves them.
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

void pair_rows(const float* src, int64_t ld, int64_t rows, int64_t cols, uint32_t* dst) {
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t c = 0; c < cols; c += 16) {
      const float* p = src + r * ld + c;
      const __m512 high = r + 1 < rows ? _mm512_loadu_ps(p + ld) : _mm512_setzero_ps();
      _mm512_storeu_si512(dst + r / 2 * cols + c, pair(_mm512_loadu_ps(p), high));
    }
  }
}

void pair_half_rows(const uint16_t* src, int64_t ld, int64_t rows, int64_t cols, uint32_t* dst) {
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t c = 0; c < cols; c += 16) {
      const __mmask16 some = cols - c < 16 ? static_cast<__mmask16>((1u << (cols - c)) - 1) : 0xffff;
      const uint16_t* p = src + r * ld + c;
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p));
      const __m256i next = _mm256_maskz_loadu_epi16(r + 1 < rows ? some : 0, p + (r + 1 < rows ? ld : 0));
      const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(next), 16);
      _mm512_mask_storeu_epi32(dst + r / 2 * cols + c, some, _mm512_or_si512(low, high));
    }
  }
}

void pair_cols(const float* src, int64_t ld, int64_t rows, int64_t cols, uint32_t* dst) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; c += 16) {
      const __m256i half = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(src + r * ld + c));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + (r * cols + c) / 2), half);
    }
  }
}

const PairKernels* table() {
  static const PairKernels kTable = {gemm<PairGemm>, pair_rows, pair_half_rows, pair_cols};
  return &kTable;
}

#undef SOFTCAP_INLINE

}  // namespace avx512bf16
}  // namespace softcap_cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
