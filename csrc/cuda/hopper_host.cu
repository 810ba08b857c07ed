// The C entry points: argument checks, folded constants, tensor maps.
#include <cuda.h>
#include <cuda_runtime.h>
#include <math.h>

#include "hopper_launch.cuh"

namespace softcap_hopper {

namespace {

// Largest exponent of a probability before the constant shift sets in: 2^92 leaves 2^35 for the number of
// keys times the largest value.
constexpr double kFreeExponent = 92.4;
constexpr double kLog2E = 1.4426950408889634;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

// Through the runtime, so that nothing links against the driver library.
EncodeTiled find_encode() {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(symbol);
}

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
bool aligned(int64_t stride, int64_t size) { return size <= 1 || (stride >= 0 && stride % 8 == 0); }

// tanh(u) ~ u p(u^2) for |u| <= range, minimax in absolute error.
struct Fit {
  double range, error;
  double coefficients[5];
};
constexpr Fit kFits[2] = {
    {0.6, 1.7e-05, {0.99979379, -0.32855240, 0.10491172}},
    {1.25, 1.9e-5, {0.99982321, -0.33082868, 0.12314661, -0.03591542, 0.00538454}},
};

}  // namespace

void fill_polynomial(CapConstants* cap, int coefficients, int keys) {
  const Fit& fit = kFits[coefficients == 5];
  const double inner = cap->inner;
  double factor = cap->outer * inner;
  bool normal = inner != 0;
  for (int i = 0; i < coefficients; ++i) {
    const double c = fit.coefficients[i] * factor;
    cap->polynomial[i] = static_cast<float>(c);
    if (!(fabs(c) > 1e-37 && fabs(c) < 1e37)) normal = false;  // float32 could not hold it
    factor *= inner * inner;
  }
  // A probability at the upper end of the range; and the sum beside which those of all keys at the lower end
  // come to 2^-14.
  const double end = cap->outer * tanh(fit.range);
  const double most = exp2(end - cap->shift), least = exp2(14. - end - cap->shift) * keys;
  const bool usable = normal && most < 1e38 && least < most;
  cap->most = usable ? static_cast<float>(most) : -1.f;
  cap->least = usable ? static_cast<float>(least) : 0.f;
}

int multiprocessors() {
  static std::atomic<int> known[64];  // by device, to ask the driver once
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) device = -1;
  if (device >= 0 && device < 64 && (count = known[device].load(std::memory_order_relaxed)) != 0)
    return count;
  if (device < 0 || cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  if (device < 64) known[device].store(count, std::memory_order_relaxed);
  return count;
}

int allow_shared(const void* kernel, int bytes, std::atomic<uint64_t>* allowed) {
  int device = 64;
  const bool known = cudaGetDevice(&device) == cudaSuccess && device < 64;
  const uint64_t bit = known ? uint64_t{1} << device : 0;
  if (allowed->load(std::memory_order_relaxed) & bit) return kOk;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) {
    cudaGetLastError();
    return kErrorDevice;
  }
  allowed->fetch_or(bit, std::memory_order_relaxed);
  return kOk;
}

int encode_map(CUtensorMap* map, const void* data, int head_dim, int dtype, int64_t tokens, int heads,
               int batch, int64_t stride_token, int64_t stride_head, int64_t stride_batch, int rows) {
  static const EncodeTiled encode = find_encode();
  if (encode == nullptr) return kErrorDriver;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  // The stride of a dimension of size 1 is never used and may be anything; the encoder wants it in order.
  const auto bytes = [](int64_t stride, int64_t n) {
    return static_cast<cuuint64_t>(n > 1 ? stride * 2 : 16);
  };
  const cuuint64_t sizes[5] = {64, size(tokens), size(head_dim / 64), size(heads), size(batch)};
  const cuuint64_t strides[4] = {bytes(stride_token, tokens), 128, bytes(stride_head, heads),
                                 bytes(stride_batch, batch)};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(head_dim / 64), 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const auto type =
      dtype == SOFTCAP_HOPPER_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto try_it = [&] {
    return encode(map, type, 5, const_cast<void*>(data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (try_it()) return kOk;
  // A thread that has made no runtime call yet, as those of an autograd engine, has no context.
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) cudaGetLastError();
  return try_it() ? kOk : kErrorTensorMap;
}

int check(const Args* a) {
  if (a == nullptr || a->struct_size != sizeof(Args)) return kErrorStruct;
  if (a->batch < 0 || a->seqlen_q < 0 || a->seqlen_k < 0 || a->seqlen_q > (1 << 28) ||
      a->seqlen_k > (1 << 28)) {
    return kErrorShape;
  }
  if (a->heads_q < 1 || a->heads_k < 1 || a->heads_q % a->heads_k != 0) return kErrorHeads;
  if (a->head_dim != 64 && a->head_dim != 128 && a->head_dim != 256) return kErrorHeadDim;
  if (a->dtype != SOFTCAP_HOPPER_BF16 && a->dtype != SOFTCAP_HOPPER_FP16) return kErrorDtype;
  if (!(a->softcap > 0.f) || !(a->softcap < 1e30f)) return kErrorSoftcap;
  if (!isfinite(a->scale) || !isfinite(a->scale / a->softcap)) return kErrorScale;
  if (a->window_left < -1 || a->window_right < -1) return kErrorWindow;
  const bool packed = a->cu_seqlens_q != nullptr;
  if (packed != (a->cu_seqlens_k != nullptr)) return kErrorPacked;
  if (packed && (a->total_q < 0 || a->total_k < 0 || a->total_q > (1 << 30) || a->total_k > (1 << 30))) {
    return kErrorPacked;
  }
  const int64_t rows_q = packed ? a->total_q : int64_t{a->batch} * a->seqlen_q;
  const int64_t rows_k = packed ? a->total_k : int64_t{a->batch} * a->seqlen_k;
  const int batch = packed ? 1 : a->batch;
  const int64_t tokens_q = packed ? a->total_q : a->seqlen_q, tokens_k = packed ? a->total_k : a->seqlen_k;
  if (rows_q > 0 && (a->q == nullptr || a->out == nullptr)) return kErrorPointer;
  if (rows_q > 0 && rows_k > 0 && (a->k == nullptr || a->v == nullptr)) return kErrorPointer;
  if (!aligned(a->q) || !aligned(a->k) || !aligned(a->v) || !aligned(a->out)) return kErrorPointer;
  if (!aligned(a->q_stride_token, tokens_q) || !aligned(a->q_stride_head, a->heads_q) ||
      !aligned(a->q_stride_batch, batch) || !aligned(a->k_stride_token, tokens_k) ||
      !aligned(a->k_stride_head, a->heads_k) || !aligned(a->k_stride_batch, batch) ||
      !aligned(a->v_stride_token, tokens_k) || !aligned(a->v_stride_head, a->heads_k) ||
      !aligned(a->v_stride_batch, batch) || !aligned(a->out_stride_token, tokens_q) ||
      !aligned(a->out_stride_head, a->heads_q) || !aligned(a->out_stride_batch, batch)) {
    return kErrorStride;
  }
  return kOk;
}

namespace {

int forward(const Args& args) {
  Args a = args;
  const bool packed = a.cu_seqlens_q != nullptr;
  if ((packed ? a.total_q : int64_t{a.batch} * a.seqlen_q) == 0) return kOk;
  // No keys at all: any valid address serves, nothing is read through it.
  if ((packed ? a.total_k : int64_t{a.seqlen_k}) == 0) a.k = a.v = a.q;

  const Problem p = problem_of<Problem>(a);
  CapConstants cap = {};
  const double exponent = a.softcap * kLog2E;
  cap.inner = a.scale / a.softcap;
  cap.outer = static_cast<float>(exponent);
  const double shift = exponent > kFreeExponent ? exponent - kFreeExponent : 0.;
  // The smallest probability must stay a normal number of float32; those of float16 have no such range.
  if (a.dtype != SOFTCAP_HOPPER_BF16 || exponent + shift > 126.) {
    switch (a.head_dim) {
      case 64:
        return launch_running_max_d64(a, p, cap);
      case 128:
        return launch_running_max_d128(a, p, cap);
      default:
        return launch_running_max_d256(a, p, cap);
    }
  }
  cap.shift = static_cast<float>(shift);
  switch (a.head_dim) {
    case 64:
      return launch_d64(a, p, cap);
    case 128:
      return launch_d128(a, p, cap);
    default:
      return launch_d256(a, p, cap);
  }
}

}  // namespace
}  // namespace softcap_hopper

extern "C" int softcap_hopper_fwd_check(const softcap_hopper_fwd_args* args) {
  return softcap_hopper::check(args);
}

extern "C" int softcap_hopper_fwd(const softcap_hopper_fwd_args* args) {
  const int error = softcap_hopper::check(args);
  return error != softcap_hopper::kOk ? error : softcap_hopper::forward(*args);
}

extern "C" const char* softcap_hopper_error_string(int code) {
  static const char* const kText[] = {
      "ok",
      "args is null or its struct_size is not this build's",
      "batch, seqlen_q or seqlen_k is negative or too large",
      "heads_q is not a positive multiple of heads_k",
      "head_dim is not 64, 128 or 256",
      "dtype is neither bfloat16 nor float16",
      "softcap is not positive and below 1e30",
      "scale, or scale / softcap, is not finite",
      "a window bound is below -1",
      "a data pointer is null or not 16-byte aligned",
      "a stride is negative or not a multiple of 8 elements",
      "cu_seqlens_q and cu_seqlens_k go together, with total_q and total_k from 0 to 2^30",
      "the device could not be queried or refused the shared memory",
      "the driver has no cuTensorMapEncodeTiled",
      "the driver refused a tensor map",
      "the kernel launch failed",
  };
  static_assert(sizeof(kText) / sizeof(kText[0]) == softcap_hopper::kErrorCount);
  return code >= 0 && code < softcap_hopper::kErrorCount ? kText[code] : "unknown error";
}
