// Warpgroup matrix products, m64 x nN x k16, 16-bit operands, float32 accumulators in registers.
//
// Fragments (t = thread of the warpgroup, warp = t / 32, g = t % 32 / 4, q = t % 4):
//   accumulator d[i]: row 16 * warp + g + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * q + i % 2
//   A operand of k16 step s, register r: the same row rule with r % 2, columns 16 * s + 8 * (r / 2) + 2 * q +
//   {0, 1}; so packing neighbours of an accumulator in order gives the A operand of the next product.
//
// Shared-memory tiles are what a bulk copy with 128-byte swizzle writes: chunks of 64 columns, each chunk
// rows x 128 bytes. Every tile starts on a multiple of 1024 bytes, the period of the swizzle.
#pragma once

#include <stdint.h>

namespace softcap_hopper {

// Descriptor of a tile whose rows are the product's m or n and whose columns are its k (q and k).
// Groups of 8 rows lie 1024 bytes apart. Advance 32 bytes a k16 step, rows * 128 bytes a chunk.
__device__ __forceinline__ uint64_t row_descriptor(uint32_t address) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16) | ((address & 0x3ffff) >> 4);
}

// Descriptor of a tile whose rows are the product's k and whose columns are its n (v). Groups of 8 rows lie
// 1024 bytes apart, chunks of 64 columns kRows * 128. Advance 2048 bytes a k16 step.
template <int kRows>
__device__ __forceinline__ uint64_t column_descriptor(uint32_t address) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(kRows * 128 >> 4) << 16) |
         ((address & 0x3ffff) >> 4);
}

// Orders the warpgroup's earlier register accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler does not know that products in flight write and read these registers; this keeps it from
// moving other uses of them across the point of the call.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// An address that the compiler cannot carry over from elsewhere: descriptors are cheaper to make anew than to
// keep in registers.
__device__ __forceinline__ uint32_t fresh(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

// Operand lists, one an n: the registers as the instruction text names them, and as the compiler binds them.
#define SOFTCAP_D8(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define SOFTCAP_D32(i) SOFTCAP_D8(i), SOFTCAP_D8(i + 8), SOFTCAP_D8(i + 16), SOFTCAP_D8(i + 24)
#define SOFTCAP_BIND_32 SOFTCAP_D8(0), SOFTCAP_D8(8)
#define SOFTCAP_BIND_64 SOFTCAP_D32(0)
#define SOFTCAP_BIND_80 SOFTCAP_BIND_64, SOFTCAP_D8(32)
#define SOFTCAP_BIND_96 SOFTCAP_BIND_80, SOFTCAP_D8(40)
#define SOFTCAP_BIND_112 SOFTCAP_BIND_96, SOFTCAP_D8(48)
#define SOFTCAP_BIND_128 SOFTCAP_BIND_112, SOFTCAP_D8(56)
#define SOFTCAP_BIND_144 SOFTCAP_BIND_128, SOFTCAP_D8(64)
#define SOFTCAP_BIND_160 SOFTCAP_BIND_144, SOFTCAP_D8(72)
#define SOFTCAP_BIND_176 SOFTCAP_BIND_160, SOFTCAP_D8(80)
#define SOFTCAP_BIND_192 SOFTCAP_BIND_176, SOFTCAP_D8(88)
#define SOFTCAP_BIND_256 SOFTCAP_BIND_192, SOFTCAP_D32(96)
#define SOFTCAP_NAME_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SOFTCAP_NAME_64                                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%" \
  "28,"                                                                                                     \
  "%29,%30,%31"
#define SOFTCAP_NAME_80 SOFTCAP_NAME_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define SOFTCAP_NAME_96 SOFTCAP_NAME_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define SOFTCAP_NAME_112 SOFTCAP_NAME_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define SOFTCAP_NAME_128 SOFTCAP_NAME_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define SOFTCAP_NAME_144 SOFTCAP_NAME_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define SOFTCAP_NAME_160 SOFTCAP_NAME_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define SOFTCAP_NAME_176 SOFTCAP_NAME_160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define SOFTCAP_NAME_192 SOFTCAP_NAME_176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define SOFTCAP_NAME_256                                                                    \
  SOFTCAP_NAME_192                                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

template <int kN, bool kBf16>
struct Wgmma;

// ss: A and B in shared memory, both k-contiguous, d (+)= a b^T.
// ss_mixed: both in shared memory, A k-contiguous, B n-contiguous, d (+)= a b.
// ss_columns: both in shared memory, A m-contiguous, B n-contiguous, d (+)= a^T b.
// rs, rs_rows: A in registers, B in shared memory, n-contiguous, d (+)= a b; k-contiguous, d (+)= a b^T.
// The operands that follow the accumulators are numbered I0 = N / 2 and on. TRANSPOSED: whether A and B are.
#define SOFTCAP_WGMMA_SS(NAME, TRANSPOSED, N, TYPE, I0, I1, I2)                                           \
  static __device__ __forceinline__ void NAME(float(&d)[N / 2], uint64_t a, uint64_t b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                                 \
                 ", 0;\n"                                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SOFTCAP_NAME_##N    \
                 "}, %" #I0 ", %" #I1 ", p, 1, 1, " TRANSPOSED ";\n}"                                     \
                 : SOFTCAP_BIND_##N                                                                       \
                 : "l"(a), "l"(b), "r"(accumulate)                                                        \
                 : "memory");                                                                             \
  }
#define SOFTCAP_WGMMA_RS(NAME, TRANSPOSED, N, TYPE, I0, I1, I2, I3, I4, I5)                            \
  static __device__ __forceinline__ void NAME(float(&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, \
                                              uint32_t a3, uint64_t b, int accumulate = 1) {           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                              \
                 ", 0;\n"                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SOFTCAP_NAME_##N \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, " TRANSPOSED ";\n}"  \
                 : SOFTCAP_BIND_##N                                                                    \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate)                         \
                 : "memory");                                                                          \
  }
#define SOFTCAP_WGMMA_TYPE(N, BF16, TYPE, I0, I1, I2, I3, I4, I5)   \
  template <>                                                       \
  struct Wgmma<N, BF16> {                                           \
    SOFTCAP_WGMMA_SS(ss, "0, 0", N, TYPE, I0, I1, I2)               \
    SOFTCAP_WGMMA_SS(ss_mixed, "0, 1", N, TYPE, I0, I1, I2)         \
    SOFTCAP_WGMMA_SS(ss_columns, "1, 1", N, TYPE, I0, I1, I2)       \
    SOFTCAP_WGMMA_RS(rs, "1", N, TYPE, I0, I1, I2, I3, I4, I5)      \
    SOFTCAP_WGMMA_RS(rs_rows, "0", N, TYPE, I0, I1, I2, I3, I4, I5) \
  }
#define SOFTCAP_WGMMA(N, I0, I1, I2, I3, I4, I5)               \
  SOFTCAP_WGMMA_TYPE(N, true, "bf16", I0, I1, I2, I3, I4, I5); \
  SOFTCAP_WGMMA_TYPE(N, false, "f16", I0, I1, I2, I3, I4, I5)

SOFTCAP_WGMMA(32, 16, 17, 18, 19, 20, 21);
SOFTCAP_WGMMA(64, 32, 33, 34, 35, 36, 37);
SOFTCAP_WGMMA(80, 40, 41, 42, 43, 44, 45);
SOFTCAP_WGMMA(96, 48, 49, 50, 51, 52, 53);
SOFTCAP_WGMMA(112, 56, 57, 58, 59, 60, 61);
SOFTCAP_WGMMA(128, 64, 65, 66, 67, 68, 69);
SOFTCAP_WGMMA(144, 72, 73, 74, 75, 76, 77);
SOFTCAP_WGMMA(160, 80, 81, 82, 83, 84, 85);
SOFTCAP_WGMMA(176, 88, 89, 90, 91, 92, 93);
SOFTCAP_WGMMA(192, 96, 97, 98, 99, 100, 101);
SOFTCAP_WGMMA(256, 128, 129, 130, 131, 132, 133);

}  // namespace softcap_hopper
