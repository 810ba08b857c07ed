// The backward's consumers at head_dim 256, where one warpgroup cannot hold dk and dv of 64 keys: both
// consumers own the same 64 keys and half of the columns each.
//
// Each computes the scores of half of the queries and hands P and dS to both through shared memory. The three
// products that take them are issued when both halves are there, dq first; dv and dk run on beside the scores
// of the next tile.
#pragma once

#include "hopper_bwd_consumer.cuh"

namespace softcap_hopper {

template <class C>
class WideBackwardConsumer : BackwardBase<C> {
 public:
  __device__ __forceinline__ WideBackwardConsumer(const BackwardProblem& problem,
                                                  const BackwardShared<C>& shared, const KeyTile& t)
      : BackwardBase<C>(problem, shared, t) {}

  __device__ __forceinline__ void run() {
    float dk[kColumns / 2] = {}, dv[kColumns / 2] = {};
    if (queries_.count > 0) attend(dk, dv);
    this->write(dk, dv);
  }

 private:
  using Base = BackwardBase<C>;
  using Base::consumer_;
  using Base::problem_;
  using Base::queries_;
  using Base::release;
  using Base::shared_;
  using Base::t_;
  static constexpr int kColumns = C::kHeadDim / 2;  // of one consumer
  static constexpr int kPart =
      kColumns / 64 * C::kQueries * 128;  // bytes from one consumer's columns to the other's
  static constexpr int kScores = C::kQueries / 4;
  static_assert(C::kKeys == C::kQueries && C::kSums == kColumns / 2);

  // keys queries^T for this consumer's half of the queries; in flight afterwards.
  __device__ __forceinline__ void multiply(float (&s)[kScores], uint32_t keys, uint32_t queries) const {
    const uint64_t a = row_descriptor(fresh(keys));
    const uint64_t b = row_descriptor(fresh(queries + consumer_ * C::kQueries / 2 * 128));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; ++step) {
      const int bytes = step / 4 * 64 * 128 + step % 4 * 32;
      Wgmma<C::kQueries / 2, C::kBf16>::ss(s, a + (bytes >> 4), b + (bytes >> 4), step != 0);
    }
    wgmma_commit();
  }

  // sum += p queries, for dv and dk, or dq = ds^T keys; in flight afterwards.
  template <bool kTransposed>
  __device__ __forceinline__ void accumulate(float (&sum)[kColumns / 2], uint32_t p, uint32_t rows) const {
    const uint64_t a = kTransposed ? column_descriptor<64>(fresh(p)) : row_descriptor(fresh(p));
    const uint64_t b = column_descriptor<64>(fresh(rows + consumer_ * kPart));
    pin(sum);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (kTransposed) {
        Wgmma<kColumns, C::kBf16>::ss_columns(sum, a + (step * 2048 >> 4), b + (step * 2048 >> 4), step != 0);
      } else {
        Wgmma<kColumns, C::kBf16>::ss_mixed(sum, a + (step * 32 >> 4), b + (step * 2048 >> 4), 1);
      }
    }
    wgmma_commit();
  }

  // This consumer's half of P or dS to shared memory, keys by queries.
  __device__ __forceinline__ void store(const uint32_t (&p)[kScores / 2], uint32_t to) const {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = 16 * (threadIdx.x / 32 % 4) + 8 * (matrix % 2) + lane % 8;
#pragma unroll
    for (int step = 0; step < kScores / 8; ++step) {
      const int unit = 4 * consumer_ + 2 * step + matrix / 2;  // of 16 bytes
      store_matrices(to + row * 128 + ((unit ^ (lane % 8)) << 4), p[4 * step], p[4 * step + 1],
                     p[4 * step + 2], p[4 * step + 3]);
    }
  }

  __device__ __forceinline__ void attend(float (&dk)[kColumns / 2], float (&dv)[kColumns / 2]) {
    barrier_wait(shared_.keys_full(), 0);
    turn<true>(0, dk, dv);
    for (int i = 1; i < queries_.count; ++i) turn<false>(i, dk, dv);
    wgmma_wait<0>();
    pin(dv);
    pin(dk);
  }

  // The i-th tile of queries.
  template <bool kFirst>
  __device__ __forceinline__ void turn(int i, float (&dk)[kColumns / 2], float (&dv)[kColumns / 2]) {
    float s[kScores], dp[kScores];
    uint32_t p[kScores / 2], ds[kScores / 2];
    const int stage = stage_of<C::kStages>(i), scores = stage_of<C::kScoreStages>(i);
    barrier_wait(shared_.q_full(stage), parity_of<C::kStages>(i));
    multiply(s, shared_.k(), shared_.q(stage));
    if constexpr (!kFirst) {
      // dv and dk of the tile before.
      wgmma_wait<1>();
      pin(dv);
      pin(dk);
      release(shared_.dout_empty(stage_of<C::kStages>(i - 1)));
      release(shared_.q_empty(stage_of<C::kStages>(i - 1)));
      release(shared_.ds_empty(stage_of<C::kScoreStages>(i - 1)));
    }
    barrier_wait(shared_.dout_full(stage), parity_of<C::kStages>(i));
    multiply(dp, shared_.v(), shared_.dout(stage));
    wgmma_wait<1>();
    pin(s);
    const int query = consumer_ * C::kQueries / 2;
    const uint32_t stats = shared_.stats(stage) + query * 4;
    this->to_probabilities(s, p, stats, queries_.at(problem_, i).tile * C::kQueries + query);
    barrier_wait(shared_.ds_empty(scores), parity_of<C::kScoreStages>(i) ^ 1);
    store(p, shared_.p(scores));
    wgmma_wait<0>();
    pin(dp);
    this->to_gradients(s, dp, ds, stats);
    store(ds, shared_.ds(scores));
    shared_fence();
    release(shared_.ds_full(scores));
    barrier_wait(shared_.ds_full(scores), parity_of<C::kScoreStages>(i));
    float dq[C::kSums];
    accumulate<true>(dq, shared_.ds(scores), shared_.k());
    accumulate<false>(dv, shared_.p(scores), shared_.dout(stage));
    accumulate<false>(dk, shared_.ds(scores), shared_.q(stage));
    wgmma_wait<2>();
    pin(dq);
    this->add(dq, queries_.at(problem_, i));
  }
};

}  // namespace softcap_hopper
