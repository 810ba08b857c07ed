// Kernels for AVX2 and FMA. Empty on other architectures than x86-64.
#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#define SOFTCAP_ISA avx2
#define SOFTCAP_VECTOR_BYTES 32
#define SOFTCAP_TILE_VECTORS 2
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
