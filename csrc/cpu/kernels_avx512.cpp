// Kernels for AVX-512 (F, DQ, BW, VL). Empty on other architectures than x86-64.
#include "kernels.h"

#if defined(__x86_64__)
// GCC takes the unset inputs of its own intrinsics for uses of uninitialised variables.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#define SOFTCAP_ISA avx512
#define SOFTCAP_VECTOR_BYTES 64
#define SOFTCAP_TILE_VECTORS 4
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
