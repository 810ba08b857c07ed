// C interface of the Hopper (sm_90a) soft-capped attention kernels: raw pointers, no Torch headers.
//
//   out = softmax(mask(softcap * tanh(scale * q k^T / softcap))) v
//   lse = natural log of the sum of exp of those capped, masked scores
#ifndef SOFTCAP_OPS_CSRC_CUDA_SOFTCAP_HOPPER_H_
#define SOFTCAP_OPS_CSRC_CUDA_SOFTCAP_HOPPER_H_

#include <stdint.h>

// Everything else is hidden (-fvisibility=hidden): two builds can then be loaded side by side.
#define SOFTCAP_HOPPER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum softcap_hopper_dtype { SOFTCAP_HOPPER_BF16 = 0, SOFTCAP_HOPPER_FP16 = 1 };

// Zero-initialise, set struct_size = sizeof, then fill in. Every stride is in elements; the last dimension
// (head_dim) of q, k, v and out is contiguous. Fields are only ever added at the end.
typedef struct softcap_hopper_fwd_args {
  uint64_t struct_size;
  const void* q;  // dense (batch, seqlen_q, heads_q, head_dim); packed (total_q, heads_q, head_dim)
  const void* k;  // dense (batch, seqlen_k, heads_k, head_dim); packed (total_k, heads_k, head_dim)
  const void* v;  // like k
  void* out;      // like q
  float* lse;     // dense (batch, heads_q, seqlen_q); packed (heads_q, total_q); contiguous; may be null
  const int32_t* cu_seqlens_q;                            // device, (batch + 1); null means dense
  const int32_t* cu_seqlens_k;                            // device, (batch + 1); null means dense
  int64_t q_stride_batch, q_stride_token, q_stride_head;  // the batch strides are unused when packed
  int64_t k_stride_batch, k_stride_token, k_stride_head;
  int64_t v_stride_batch, v_stride_token, v_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t total_q, total_k;  // packed only: the rows of q, and of k and v
  int32_t batch;
  int32_t seqlen_q, seqlen_k;         // dense: the lengths; packed: upper bounds of the lengths
  int32_t heads_q, heads_k;           // heads_q is a multiple of heads_k
  int32_t head_dim;                   // 64, 128 or 256
  int32_t dtype;                      // softcap_hopper_dtype
  int32_t causal;                     // non-zero: query i sees key j when j <= i + seqlen_k - seqlen_q
  int32_t window_left, window_right;  // inclusive, around the same diagonal; -1: unlimited
  float softcap;                      // finite, > 0
  float scale;                        // finite; multiplies q k^T
  void* stream;                       // cudaStream_t
} softcap_hopper_fwd_args;

// Launches the forward on args->stream of the current device. Returns 0, or a positive code for
// softcap_hopper_error_string. Nothing was launched when the code is not 0.
SOFTCAP_HOPPER_API int softcap_hopper_fwd(const softcap_hopper_fwd_args* args);

// Why softcap_hopper_fwd would refuse these arguments, without touching a device: 0 when it would not.
SOFTCAP_HOPPER_API int softcap_hopper_fwd_check(const softcap_hopper_fwd_args* args);

// The gradients of a loss, given its gradients of out and lse. Zero-initialise, set struct_size = sizeof.
typedef struct softcap_hopper_bwd_args {
  uint64_t struct_size;
  const void* q;  // as in the forward, here and below
  const void* k;
  const void* v;
  const void* out;
  const void* dout;   // like out
  const float* lse;   // what the forward wrote
  const float* dlse;  // like lse; may be null: no loss on lse
  void* dq;           // contiguous, written whole, like q
  void* dk;           // contiguous, written whole, like k
  void* dv;           // contiguous, written whole, like v
  void* workspace;    // softcap_hopper_bwd_workspace() bytes, 128-byte aligned; any contents
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  int64_t q_stride_batch, q_stride_token, q_stride_head;
  int64_t k_stride_batch, k_stride_token, k_stride_head;
  int64_t v_stride_batch, v_stride_token, v_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t dout_stride_batch, dout_stride_token, dout_stride_head;
  int64_t total_q, total_k;
  int32_t batch;
  int32_t seqlen_q, seqlen_k;
  int32_t heads_q, heads_k;
  int32_t head_dim;
  int32_t dtype;
  int32_t causal;
  int32_t window_left, window_right;
  int32_t deterministic;  // non-zero: the same bits every time, at a price
  int32_t reserved;
  float softcap;
  float scale;
  void* stream;
} softcap_hopper_bwd_args;

// Launches the backward, as softcap_hopper_fwd does the forward.
SOFTCAP_HOPPER_API int softcap_hopper_bwd(const softcap_hopper_bwd_args* args);

// Bytes of workspace for these arguments, of whose pointers only cu_seqlens_q being null or not counts;
// negative: struct_size is not this build's.
SOFTCAP_HOPPER_API int64_t softcap_hopper_bwd_workspace(const softcap_hopper_bwd_args* args);

SOFTCAP_HOPPER_API const char* softcap_hopper_error_string(int code);

#ifdef __cplusplus
}
#endif

#endif  // SOFTCAP_OPS_CSRC_CUDA_SOFTCAP_HOPPER_H_
