// Backward kernel: one producer warp keeps bulk copies of q and dout in flight, two consumer warpgroups own
// 64 keys each.
//
// Scores are computed transposed, keys by queries: a consumer's probabilities and their gradients are then,
// as they lie in registers, the left operands of dv += P^T dout and dk += dS^T q. Only dq = dS k crosses the
// consumers: dS goes through shared memory, and the product of one tile is issued behind those of the next,
// so that neither consumer waits for the other.
#pragma once

#include "hopper_bwd_problem.cuh"
#include "hopper_fwd_kernel.cuh"
#include "hopper_ptx.cuh"
#include "hopper_softcap.cuh"
#include "hopper_wgmma.cuh"

namespace softcap_hopper {

#ifdef SOFTCAP_HOPPER_RACECHECK
constexpr int kArrivals = 256;
#else
constexpr int kArrivals = 8;  // of two consumers, on a barrier
#endif

template <int kHeadDim_, int kQueries_, int kStages_, bool kBf16_>
struct BackwardConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kQueries = kQueries_;  // a tile
  static constexpr int kStages = kStages_;    // tiles of q, and of dout, in shared memory
  static constexpr bool kBf16 = kBf16_;

  static constexpr bool kWide = kHeadDim > 128;  // see hopper_bwd_wide.cuh
  static constexpr int kKeys = kWide ? 64 : 128;
  static constexpr int kScoreStages = kWide ? 2 : 3;              // tiles of dS
  static constexpr int kScoreTiles = kScoreStages * (1 + kWide);  // and, wide, of P
  static constexpr int kThreads = 384;
  static constexpr int kKeyBytes = kKeys * kHeadDim * 2;
  static constexpr int kQueryBytes = kQueries * kHeadDim * 2;
  static constexpr int kScoreBytes = kKeys * kQueries * 2;
  static constexpr int kStatsBytes = Stats<kQueries>::kWords * 4;
  static constexpr int kSums =
      kQueries * kHeadDim / 256;  // a consumer has half of the columns of a tile of dq
  // Whether registers are too few for more than two kinds of products in flight.
  static constexpr bool kTight = kHeadDim == 128;
  // Whether a consumer holds its keys in registers: shared memory is what head_dim 64 is short of.
  static constexpr bool kHeld = kHeadDim == 64;
  // Whether a tile's place is read with its statistics instead of computed.
  static constexpr bool kNoted = kHeadDim == 64;
  static constexpr int kExp2Fma = kHeadDim == 64 ? 4 : 0;  // see exp2_shared
  static constexpr int kBarriers = 1 + 4 * kStages + 2 * kScoreStages;
  static constexpr int kSharedBytes = 1024 + 2 * kKeyBytes + 2 * kStages * kQueryBytes +
                                      kScoreTiles * kScoreBytes + kStages * kStatsBytes + 8 * kBarriers;
  static_assert(kSharedBytes <= 232448);
  static_assert(kQueries == 64);
};

template <class C>
struct BackwardShared {
  uint32_t base;
  __device__ __forceinline__ explicit BackwardShared(uint32_t raw) : base((raw + 1023) & ~1023u) {}
  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return base + C::kKeyBytes; }
  __device__ __forceinline__ uint32_t q(int stage) const {
    return base + 2 * C::kKeyBytes + stage * C::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t dout(int stage) const { return q(C::kStages + stage); }
  __device__ __forceinline__ uint32_t ds(int stage) const {
    return q(2 * C::kStages) + stage * C::kScoreBytes;
  }
  __device__ __forceinline__ uint32_t p(int stage) const { return ds(C::kScoreStages + stage); }  // wide only
  __device__ __forceinline__ uint32_t stats(int stage) const {
    return ds(C::kScoreTiles) + stage * C::kStatsBytes;
  }
  __device__ __forceinline__ uint32_t keys_full() const { return stats(C::kStages); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return keys_full() + 8 * (1 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return q_full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return q_full(2 * C::kStages + stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const { return q_full(3 * C::kStages + stage); }
  __device__ __forceinline__ uint32_t ds_full(int stage) const { return q_full(4 * C::kStages + stage); }
  __device__ __forceinline__ uint32_t ds_empty(int stage) const { return ds_full(C::kScoreStages + stage); }
};

template <class C>
__device__ __forceinline__ void produce_backward(const BackwardProblem& problem,
                                                 const BackwardShared<C>& shared, const KeyTile& t,
                                                 const CUtensorMap* q_map, const CUtensorMap* k_map,
                                                 const CUtensorMap* v_map, const CUtensorMap* dout_map) {
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int batch = packed ? 0 : t.sequence;
  const int key = t.lengths.start_k + t.tile * C::kKeys;
  barrier_expect_bytes(shared.keys_full(), 2 * C::kKeyBytes);
  copy_box(shared.k(), k_map, shared.keys_full(), 0, key, 0, t.head, batch);
  copy_box(shared.v(), v_map, shared.keys_full(), 0, key, 0, t.head, batch);
  const Queries queries = Queries::of<C::kQueries>(problem, t);
  for (int i = 0; i < queries.count; ++i) {
    const int stage = stage_of<C::kStages>(i);
    const uint32_t free = parity_of<C::kStages>(i) ^ 1;
    const Queries::Place place = queries.at(problem, i);
    const int row = t.lengths.start_q + place.tile * C::kQueries;
    const int head = t.head * problem.heads_per_key + place.head;
    const int64_t index = place.index;
    barrier_wait(shared.q_empty(stage), free);
    barrier_expect_bytes(shared.q_full(stage), C::kQueryBytes);
    copy_box(shared.q(stage), q_map, shared.q_full(stage), 0, row, 0, head, batch);
    barrier_wait(shared.dout_empty(stage), free);
    barrier_expect_bytes(shared.dout_full(stage), C::kQueryBytes + C::kStatsBytes);
    copy_run(shared.stats(stage), problem.stats + index * Stats<C::kQueries>::kWords, C::kStatsBytes,
             shared.dout_full(stage));
    copy_box(shared.dout(stage), dout_map, shared.dout_full(stage), 0, row, 0, head, batch);
  }
}

// Writes 64 rows of a gradient from an accumulator; `row` is the first of this thread's two.
template <int kHeadDim, bool kBf16, int kCount>
__device__ __forceinline__ void write_gradient(void* gradient, int64_t stride, int row, int rows, int column,
                                               const float (&x)[kCount], float factor) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint16_t* to = static_cast<uint16_t*>(gradient) + (row + 8 * r) * stride + column;
#pragma unroll
    for (int b = 0; b < kCount / 4; b += 4) {
      uint32_t y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int d = 4 * (b + j) + 2 * r;
        y[j] = pack<kBf16>(x[d] * factor, x[d + 1] * factor);
      }
      transpose_quad(y[0], y[1], y[2], y[3]);
      if (row + 8 * r < rows)
        *reinterpret_cast<uint4*>(to + 8 * (b + quad)) = make_uint4(y[0], y[1], y[2], y[3]);
    }
  }
}

// What both kinds of consumer share.
template <class C>
class BackwardBase {
 protected:
  using Place = Queries::Place;

  __device__ __forceinline__ BackwardBase(const BackwardProblem& problem, const BackwardShared<C>& shared,
                                          const KeyTile& t)
      : problem_(problem),
        shared_(shared),
        t_(t),
        consumer_(__shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0)),
        queries_(Queries::of<C::kQueries>(problem, t)) {
    const int first_key = t.tile * C::kKeys + (C::kWide ? 0 : 64 * consumer_);
    free_begin_ =
        first_key + 64 <= t.lengths.seqlen_k ? first_key + 63 - t.diagonal - problem.right : kUnlimited;
    free_end_ = first_key - t.diagonal + problem.left + 1;
  }

  // Once the whole warp is done. One arrival stands for it; compute-sanitizer's racecheck, which does not see
  // that through, wants one of every thread.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (kArrivals == 256 || threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }

  // The first of this thread's two keys.
  __device__ __forceinline__ int thread_key() const {
    return t_.tile * C::kKeys + (C::kWide ? 0 : 64 * consumer_) + 16 * (threadIdx.x / 32 % 4) +
           threadIdx.x % 32 / 4;
  }

  // Writes this consumer's part of dk and dv: its keys, or its columns.
  template <int kCount>
  __device__ __forceinline__ void write(const float (&dk)[kCount], const float (&dv)[kCount]) const {
    const int64_t stride = static_cast<int64_t>(problem_.heads_k) * C::kHeadDim;
    const int64_t batch = problem_.cu_seqlens_q == nullptr ? t_.sequence : 0;
    const int64_t offset = (batch * problem_.seqlen_k + t_.lengths.start_k) * stride +
                           static_cast<int64_t>(t_.head) * C::kHeadDim;
    int end = min((t_.tile + 1) * C::kKeys, t_.lengths.seqlen_k);
    // No bound on the lengths covers the rows past the last packed sequence: the last tile goes on to their
    // end.
    if (t_.sequence == problem_.batch && t_.tile == problem_.key_tiles - 1) end = t_.lengths.seqlen_k;
    for (int step = 0; t_.tile * C::kKeys + step < end; step += C::kKeys) {
      const auto write_one = [&](void* gradient, const float(&x)[kCount], float factor) {
        write_gradient<C::kHeadDim, C::kBf16>(static_cast<uint16_t*>(gradient) + offset, stride,
                                              thread_key() + step, end, C::kWide ? consumer_ * 2 * kCount : 0,
                                              x, factor);
      };
      write_one(problem_.dv, dv, 1.f);
      write_one(problem_.dk, dk, problem_.scale);
    }
  }

  // Scores of all queries from `query` on to P, packed as a left operand, and in place to W.
  template <bool kMasked, int kScores>
  __device__ __forceinline__ void to_probabilities_of(float (&s)[kScores], uint32_t (&p)[kScores / 2],
                                                      uint32_t stats, int query) const {
    const int column = 2 * (threadIdx.x % 4);
    int first[2], last[2];  // the columns of the queries that see each of this thread's keys
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = thread_key() + 8 * r, at = key - t_.diagonal - query - column;
      first[r] = key < t_.lengths.seqlen_k ? at - problem_.right : kUnlimited;
      last[r] = at + problem_.left;
    }
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 lse = load_pair(stats + (8 * j + column) * 4);
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float tanh = tanh_unit(s[4 * j + i] * problem_.inner);
        const float exponent = fmaf(problem_.outer, tanh, i % 2 ? -lse.y : -lse.x);
        // 2^-127 comes out as zero, as it must where lse is infinite: in rows that see nothing.
        e[i] = on_fma<C::kExp2Fma>(4 * j + i) ? exp2_fma(max_nan(exponent, -127.f)) : exp2_unit(exponent);
        if constexpr (kMasked) {
          const int at = 8 * j + i % 2;
          if (at < first[i / 2] || at > last[i / 2]) e[i] = 0.f;
        }
        s[4 * j + i] = e[i] * fmaf(-tanh, tanh, 1.f);
      }
      p[2 * j] = pack<C::kBf16>(e[0], e[1]);
      p[2 * j + 1] = pack<C::kBf16>(e[2], e[3]);
    }
  }

  template <int kScores>
  __device__ __forceinline__ void to_probabilities(float (&s)[kScores], uint32_t (&p)[kScores / 2],
                                                   uint32_t stats, int query) const {
    if (query < free_begin_ || query + 2 * kScores > free_end_) {
      to_probabilities_of<true>(s, p, stats, query);
    } else {
      to_probabilities_of<false>(s, p, stats, query);
    }
  }

  // dP and W to dS, packed likewise.
  template <int kScores>
  __device__ __forceinline__ void to_gradients(const float (&w)[kScores], const float (&dp)[kScores],
                                               uint32_t (&ds)[kScores / 2], uint32_t stats) const {
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 delta = load_pair(stats + (Stats<C::kQueries>::kDelta + 8 * j + column) * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * j + 2 * i;
        ds[2 * j + i] = pack<C::kBf16>((dp[at] - delta.x) * w[at], (dp[at + 1] - delta.y) * w[at + 1]);
      }
    }
  }

  // The place of the i-th tile, whose statistics these are, but for its head.
  __device__ __forceinline__ Place place(int i, uint32_t stats) const {
    if constexpr (C::kNoted) {
      const int2 x = load_words(stats + Stats<C::kQueries>::kPlace * 4);
      return {x.x, x.y, 0};
    }
    return queries_.at(problem_, i);
  }

  // Adds this consumer's part of dq of a tile to the workspace.
  __device__ __forceinline__ void add(const float (&dq)[C::kSums], const Place& place) const {
    const int64_t index = place.index;
    const int thread = threadIdx.x % 128;
    float* to = problem_.sums + index * (C::kQueries * C::kHeadDim) + consumer_ * C::kSums * 128 + thread * 4;
    int* turns = problem_.turns + 2 * index + consumer_;
    if (problem_.turns != nullptr) {
      if (thread == 0) wait_for(turns, turn_of<C::kQueries, C::kKeys>(problem_, t_, place.tile));
      named_sync(1 + consumer_, 128);
    }
#pragma unroll
    for (int i = 0; i < C::kSums; i += 4) add_to_global(to + i * 128, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    if (problem_.turns != nullptr) {
      __threadfence();
      named_sync(1 + consumer_, 128);
      if (thread == 0) pass_on(turns);
    }
  }

  const BackwardProblem& problem_;
  const BackwardShared<C>& shared_;
  const KeyTile& t_;
  const int consumer_;
  const Queries queries_;
  int free_begin_, free_end_;  // the queries that see all of this consumer's keys
};

template <class C>
class BackwardConsumer : BackwardBase<C> {
 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardProblem& problem, const BackwardShared<C>& shared,
                                              const KeyTile& t)
      : BackwardBase<C>(problem, shared, t) {}

  __device__ __forceinline__ void run() {
    float dk[C::kHeadDim / 2] = {}, dv[C::kHeadDim / 2] = {};
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
  using typename Base::Place;
  static constexpr int kScores = C::kQueries / 2;
  using Held = uint32_t[C::kHeld ? C::kHeadDim / 16 : 1][4];

  // This consumer's keys, of k or of v, as left operands.
  __device__ __forceinline__ void hold(Held& held, uint32_t keys) const {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = 64 * consumer_ + 16 * (threadIdx.x / 32 % 4) + 8 * (matrix % 2) + lane % 8;
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; ++step) {
      const int unit = 2 * step + matrix / 2;  // of 16 bytes
      load_matrices(keys + row * 128 + ((unit ^ (lane % 8)) << 4), held[step]);
    }
  }

  // keys queries^T; in flight afterwards.
  __device__ __forceinline__ void multiply(float (&s)[kScores], const Held& held, uint32_t keys,
                                           uint32_t queries) const {
    const uint64_t a = row_descriptor(fresh(keys + consumer_ * 64 * 128));
    const uint64_t b = row_descriptor(fresh(queries));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; ++step) {
      const int chunk = step / 4, bytes = step % 4 * 32;
      const uint64_t b_step = b + ((chunk * C::kQueries * 128 + bytes) >> 4);
      if constexpr (C::kHeld) {
        const auto& x = held[step];
        Wgmma<C::kQueries, C::kBf16>::rs_rows(s, x[0], x[1], x[2], x[3], b_step, step != 0);
      } else {
        Wgmma<C::kQueries, C::kBf16>::ss(s, a + ((chunk * C::kKeys * 128 + bytes) >> 4), b_step, step != 0);
      }
    }
    wgmma_commit();
  }

  // sum += p queries, for dv and dk; in flight afterwards.
  __device__ __forceinline__ void accumulate(float (&sum)[C::kHeadDim / 2], uint32_t (&p)[kScores / 2],
                                             uint32_t queries) const {
    const uint64_t b = column_descriptor<C::kQueries>(fresh(queries));
    pin(p);
    pin(sum);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kQueries / 16; ++step) {
      Wgmma<C::kHeadDim, C::kBf16>::rs(sum, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                       b + (step * 2048 >> 4));
    }
    wgmma_commit();
  }

  // This consumer's part of dS k; in flight afterwards.
  __device__ __forceinline__ void multiply_keys(float (&dq)[C::kSums], uint32_t ds) const {
    const uint32_t columns = consumer_ * (C::kHeadDim == 64 ? 64 : C::kKeys * 128);
    const uint64_t a = column_descriptor<C::kKeys>(fresh(ds));
    const uint64_t b = column_descriptor<C::kKeys>(fresh(shared_.k() + columns));
    pin(dq);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step) {
      Wgmma<C::kHeadDim / 2, C::kBf16>::ss_columns(dq, a + (step * 2048 >> 4), b + (step * 2048 >> 4),
                                                   step != 0);
    }
    wgmma_commit();
  }

  // dS to shared memory, keys by queries, in chunks of 64 queries.
  __device__ __forceinline__ void store(const uint32_t (&ds)[kScores / 2], uint32_t to) const {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = 64 * consumer_ + 16 * (threadIdx.x / 32 % 4) + 8 * (matrix % 2) + lane % 8;
#pragma unroll
    for (int step = 0; step < C::kQueries / 16; ++step) {
      const int unit = step % 4 * 2 + matrix / 2;  // of 16 bytes
      const uint32_t address = to + step / 4 * C::kKeys * 128 + row * 128 + ((unit ^ (lane % 8)) << 4);
      store_matrices(address, ds[4 * step], ds[4 * step + 1], ds[4 * step + 2], ds[4 * step + 3]);
    }
  }

  __device__ __forceinline__ void attend(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2]) {
    uint32_t ds[kScores / 2];
    Held k, v;
    barrier_wait(shared_.keys_full(), 0);
    if constexpr (C::kHeld) {
      hold(k, shared_.k());
      hold(v, shared_.v());
    }
    for (int i = 0; i < queries_.count; ++i) turn(i, k, v, dk, dv, ds);
    finish_queries(queries_.count - 1);
    wgmma_wait<0>();
    pin(dk);
    pin(ds);
  }

  // dq of the i-th tile, once both consumers have written their part of dS.
  __device__ __forceinline__ void finish_queries(int i) const {
    float dq[C::kSums];
    const int stage = stage_of<C::kScoreStages>(i);
    barrier_wait(shared_.ds_full(stage), parity_of<C::kScoreStages>(i));
    multiply_keys(dq, shared_.ds(stage));
    wgmma_wait<0>();
    pin(dq);
    release(shared_.ds_empty(stage));
    this->add(dq, before(i));
  }

  // The i-th tile of queries.
  __device__ __forceinline__ void turn(int i, const Held& k, const Held& v, float (&dk)[C::kHeadDim / 2],
                                       float (&dv)[C::kHeadDim / 2], uint32_t (&ds)[kScores / 2]) {
    float s[kScores], dp[kScores];
    uint32_t p[kScores / 2];
    const int stage = stage_of<C::kStages>(i);
    barrier_wait(shared_.q_full(stage), parity_of<C::kStages>(i));
    multiply(s, k, shared_.k(), shared_.q(stage));
    barrier_wait(shared_.dout_full(stage), parity_of<C::kStages>(i));
    multiply(dp, v, shared_.v(), shared_.dout(stage));
    // The scores, and dk of the tile before.
    wgmma_wait<1>();
    pin(s);
    pin(dk);
    pin(ds);
    if (i > 0) release(shared_.q_empty(stage_of<C::kStages>(i - 1)));
    const uint32_t stats = shared_.stats(stage);
    const Place place = this->place(i, stats);
    this->to_probabilities(s, p, stats, place.tile * C::kQueries);
    accumulate(dv, p, shared_.dout(stage));
    if constexpr (C::kTight) {
      wgmma_wait<0>();
      pin(dv);
      pin(p);
    } else {
      wgmma_wait<1>();
    }
    pin(dp);
    this->to_gradients(s, dp, ds, stats);
    const int written = stage_of<C::kScoreStages>(i);
    barrier_wait(shared_.ds_empty(written), parity_of<C::kScoreStages>(i) ^ 1);
    store(ds, shared_.ds(written));
    shared_fence();
    release(shared_.ds_full(written));
    if constexpr (C::kTight) {
      release(shared_.dout_empty(stage));
      if (i > 0) finish_queries(i - 1);
      accumulate(dk, ds, shared_.q(stage));
    } else {
      // With a branch around a product the compiler would let only one be in flight: the first turn's dq is
      // of whatever lies there, and dropped.
      float dq[C::kSums];
      const int read = stage_of<C::kScoreStages>(i + C::kScoreStages - 1);
      if (i > 0) barrier_wait(shared_.ds_full(read), parity_of<C::kScoreStages>(i - 1));
      multiply_keys(dq, shared_.ds(read));
      accumulate(dk, ds, shared_.q(stage));
      wgmma_wait<1>();
      pin(dv);
      pin(p);
      pin(dq);
      release(shared_.dout_empty(stage));
      if (i > 0) {
        release(shared_.ds_empty(read));
        this->add(dq, before(i - 1));
      }
    }
    before_ = place;
  }

  // The i-th tile's, which is the one before.
  __device__ __forceinline__ Place before(int i) const {
    return C::kNoted ? before_ : queries_.at(problem_, i);
  }

  Place before_;
};

}  // namespace softcap_hopper
