// Kernels for what every machine of this architecture has: SSE2 on x86-64, NEON on arm64.
#include "kernels.h"

#define SOFTCAP_ISA baseline
#define SOFTCAP_VECTOR_BYTES 16
#if defined(__aarch64__)
#define SOFTCAP_TILE_VECTORS 4
#else
#define SOFTCAP_TILE_VECTORS 2
#endif
#include "kernels.inc"
