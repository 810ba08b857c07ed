// Forward kernel: one producer warpgroup keeps bulk copies in flight, each consumer warpgroup owns 64 rows.
//
// A consumer issues the scores of key tile i and, behind them, the output product of tile i - 1, then turns
// the scores into probabilities while that product still runs. Since nothing rescales the output, it need not
// wait for it.
#pragma once

#include "hopper_ptx.cuh"
#include "hopper_schedule.cuh"
#include "hopper_softcap.cuh"
#include "hopper_wgmma.cuh"

namespace softcap_hopper {

// How a consumer's own products overlap with its elementwise work.
enum class Overlap {
  kOpen,  // the output product of tile i - 1 runs beside the elementwise work of tile i, and on into the next
  kTurn,  // likewise, but is waited for at the end of the turn
  kApart,  // none does: probabilities need one set of registers, and other consumers fill the gaps
};

template <int kHeadDim_, int kConsumers_, int kKeys_, int kStages_, bool kBf16_, bool kPacked_,
          bool kTakeTurns_, Overlap kOverlap_, bool kRunningMax_, Tanh kTanh_, int kExp2Fma_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups of 64 rows
  static constexpr int kKeys = kKeys_;            // keys a tile
  static constexpr int kStages = kStages_;        // tiles of k, and of v, in shared memory
  static constexpr bool kBf16 = kBf16_;
  static constexpr bool kPacked = kPacked_;
  static constexpr bool kTakeTurns = kTakeTurns_;  // consumers issue products in turn, not at once
  static constexpr Overlap kOverlap = kOverlap_;
  // Whether consumers pass over tiles of keys that none of their rows sees: not where each awaits its turn,
  // nor where it does not pay.
  static constexpr bool kSkip = !kTakeTurns && kHeadDim != 128;
  static constexpr bool kRunningMax = kRunningMax_;  // where no constant shift keeps exponents in range
  static constexpr Tanh kTanh = kTanh_;
  static constexpr int kExp2Fma = kExp2Fma_;

  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kChunks = kHeadDim / 64;
  static constexpr int kQueryBytes = 64 * kHeadDim * 2;  // one consumer's rows
  static constexpr int kKeyBytes = kKeys * kHeadDim * 2;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : kConsumers == 3 ? 160 : 112;
  static constexpr int kSharedBytes =
      1024 + kConsumers * kQueryBytes + 2 * kStages * kKeyBytes + 8 * (2 * kConsumers + 4 * kStages);
  static_assert(kSharedBytes <= 232448);
  static_assert(!kRunningMax || (kOverlap == Overlap::kTurn && kTanh == Tanh::kUnit && kExp2Fma == 0));
  static_assert(kKeyBytes % 1024 == 0 && kKeys % 16 == 0);
};

// Addresses in shared memory.
template <class C>
struct Shared {
  uint32_t base, barriers;
  __device__ __forceinline__ explicit Shared(uint32_t raw)
      : base((raw + 1023) & ~1023u),
        barriers(base + C::kConsumers * C::kQueryBytes + 2 * C::kStages * C::kKeyBytes) {}
  __device__ __forceinline__ uint32_t q(int consumer) const { return base + consumer * C::kQueryBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + C::kConsumers * C::kQueryBytes + stage * C::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const { return k(C::kStages + stage); }
  __device__ __forceinline__ uint32_t q_full(int consumer) const { return barriers + 8 * consumer; }
  __device__ __forceinline__ uint32_t q_empty(int consumer) const { return q_full(C::kConsumers + consumer); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return q_full(2 * C::kConsumers + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return k_full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return k_full(2 * C::kStages + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return k_full(3 * C::kStages + stage); }
};

// A place in the ring of stages and the parity of its current use.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class C>
__device__ __forceinline__ void produce(const Problem& problem, const Shared<C>& shared,
                                        const CUtensorMap* q_map, const CUtensorMap* k_map,
                                        const CUtensorMap* v_map, int tiles) {
  Ring<C::kStages> ring;
  uint32_t q_parity = 0;
  Walk walk;
  for (int index; walk.next(problem, tiles, &index);) {
    const Tile t = find_tile<C::kPacked, C::kRows, C::kKeys>(problem, index);
    if (t.key_begin >= t.key_end) continue;
    const int batch = C::kPacked ? 0 : t.sequence;
    const int head_k = t.head / problem.heads_per_key;
    const auto load = [&](uint32_t destination, const CUtensorMap* map, uint32_t full, uint32_t empty,
                          int tile) {
      barrier_wait(empty, ring.parity ^ 1);
      barrier_expect_bytes(full, C::kKeyBytes);
      copy_box(destination, map, full, 0, t.start_k + tile * C::kKeys, 0, head_k, batch);
    };
    for (int w = 0; w < C::kConsumers; ++w) {
      barrier_wait(shared.q_empty(w), q_parity ^ 1);
      barrier_expect_bytes(shared.q_full(w), C::kQueryBytes);
      copy_box(shared.q(w), q_map, shared.q_full(w), 0, t.start_q + t.row + 64 * w, 0, t.head, batch);
    }
    q_parity ^= 1;
    int tile = t.key_end - 1;
    load(shared.k(ring.stage), k_map, shared.k_full(ring.stage), shared.k_empty(ring.stage), tile);
    for (; tile > t.key_begin; --tile) {
      const Ring<C::kStages> current = ring;
      ring.advance();
      load(shared.k(ring.stage), k_map, shared.k_full(ring.stage), shared.k_empty(ring.stage), tile - 1);
      const Ring<C::kStages> next = ring;
      ring = current;
      load(shared.v(ring.stage), v_map, shared.v_full(ring.stage), shared.v_empty(ring.stage), tile);
      ring = next;
    }
    load(shared.v(ring.stage), v_map, shared.v_full(ring.stage), shared.v_empty(ring.stage), tile);
    ring.advance();
  }
}

// The keys that a thread's two rows see, as columns of the score tile that starts at key 0.
struct Visible {
  int first[2], last[2];
};

template <int kCount>
__device__ __forceinline__ void mask(float (&p)[kCount], const Visible& visible, int first_key, float value) {
  const int column = first_key + 2 * (threadIdx.x % 4);
  const int last[2] = {visible.last[0] - column, visible.last[1] - column};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 > last[i / 2 % 2]) p[i] = value;
  }
  // Most masks have no left side.
  const int first[2] = {visible.first[0] - column, visible.first[1] - column};
  if (__any_sync(0xffffffff, max(first[0], first[1]) > 0)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (8 * (i / 4) + i % 2 < first[i / 2 % 2]) p[i] = value;
    }
  }
}

// Transposes 4 x 4 words over the four threads of a quad: afterwards thread q holds what each thread had in
// x[q].
__device__ __forceinline__ void transpose_quad(uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3) {
  const auto exchange = [](uint32_t& low, uint32_t& high, int bit) {
    const bool upper = threadIdx.x & bit;
    const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? low : high, bit);
    (upper ? low : high) = received;
  };
  exchange(x0, x1, 1);
  exchange(x2, x3, 1);
  exchange(x0, x2, 2);
  exchange(x1, x3, 2);
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Writes one consumer's 64 rows of out and lse.
template <class C>
__device__ __forceinline__ void write_rows(const Problem& problem, const Tile& t, int row,
                                           const float (&o)[C::kHeadDim / 2], const Sums& sums,
                                           const float (&shift)[2]) {
  const int quad = threadIdx.x % 4;
  const int64_t batch = C::kPacked ? 0 : t.sequence;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(sums.exact[r]), rounded = quad_sum(sums.rounded[r]);
    const float inverse = rounded == 0.f ? 0.f : 1.f / rounded;
    const int i = row + 8 * r;
    const bool valid = i < t.seqlen_q;
    if (valid && quad == 0 && problem.lse != nullptr) {
      const int64_t lse_row = C::kPacked ? t.head * problem.total_q + t.start_q + i
                                         : (batch * problem.heads_q + t.head) * problem.seqlen_q + i;
      problem.lse[lse_row] = total == 0.f ? -INFINITY : 0.69314718f * (shift[r] + log2f(total));
    }
    uint16_t* out = static_cast<uint16_t*>(problem.out) + batch * problem.out_stride_batch +
                    (t.start_q + i) * problem.out_stride_token + t.head * problem.out_stride_head;
#pragma unroll
    for (int b = 0; b < C::kHeadDim / 8; b += 4) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int d = 4 * (b + j) + 2 * r;
        x[j] = pack<C::kBf16>(o[d] * inverse, o[d + 1] * inverse);
      }
      transpose_quad(x[0], x[1], x[2], x[3]);
      if (valid) *reinterpret_cast<uint4*>(out + 8 * (b + quad)) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// One consumer's rows that see no key: out 0, lse -inf. The last tile of the rows past the last packed
// sequence goes on to their end, which no bound on the lengths covers.
template <class C>
__device__ __forceinline__ void write_empty(const Problem& problem, const Tile& t, int row) {
  float o[C::kHeadDim / 2] = {};
  const Sums sums = {};
  const float shift[2] = {};
  int end = min(t.row + C::kRows, t.seqlen_q);
  if (C::kPacked && t.sequence == problem.batch && t.row + C::kRows >= problem.row_tiles * C::kRows)
    end = t.seqlen_q;
  for (int step = 0; t.row + step < end; step += C::kRows)
    write_rows<C>(problem, t, row + step, o, sums, shift);
}

template <class C>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Problem& problem, const CapConstants& cap,
                                      const Shared<C>& shared)
      : problem_(problem),
        cap_(cap),
        shared_(shared),
        consumer_(__shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0)) {
  }  // the shuffle tells the compiler it is uniform

  __device__ __forceinline__ void run(int tiles) {
    if (C::kTakeTurns && consumer_ == C::kConsumers - 1) named_arrive(1, 256);
    float s[kScores];
    float o[C::kHeadDim / 2];
    Walk walk;
    Tile t;
    if (!next(&walk, tiles, &t)) return;
    start(s, &t);
    for (;;) {
      const Sums sums = attend(s, o, t);
      const Tile done = t;
      const float shift[2] = {shift_[0], shift_[1]};
      if (!next(&walk, tiles, &t)) {
        write_rows<C>(problem_, done, thread_row(done), o, sums, shift);
        return;
      }
      // The first scores of the next rows are on their way while these rows are written.
      start(s, &t);
      write_rows<C>(problem_, done, thread_row(done), o, sums, shift);
    }
  }

 private:
  static constexpr int kScores = C::kKeys / 2;
  // Scores between two looks at which of the two ways to take; fewer than all where registers would not do.
  static constexpr int kChunk = kScores == 64 ? 32 : kScores;
  static_assert(kScores % kChunk == 0 && kChunk % 8 == 0);

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }

  // The first of this thread's two rows.
  __device__ __forceinline__ int thread_row(const Tile& t) const {
    return t.row + 64 * consumer_ + 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
  }

  // The next tile that sees any key; writes the rows of those before it, which see none.
  __device__ __forceinline__ bool next(Walk* walk, int tiles, Tile* t) const {
    for (int index; walk->next(problem_, tiles, &index);) {
      *t = find_tile<C::kPacked, C::kRows, C::kKeys>(problem_, index);
      if (t->key_begin < t->key_end) return true;
      write_empty<C>(problem_, *t, thread_row(*t));
    }
    return false;
  }

  // Passes over the tiles of keys that only later rows of the block see; where these rows see none, one is
  // left.
  __device__ __forceinline__ void skip(Tile* t) {
    const int last_row = min(t->row + 64 * consumer_ + 63, t->seqlen_q - 1);
    const int end = min(t->seqlen_k, last_row + t->seqlen_k - t->seqlen_q + problem_.right + 1);
    const int key_end = max(t->key_begin + 1, (end + C::kKeys - 1) / C::kKeys);
    for (; t->key_end > key_end; --t->key_end) {
      barrier_wait(shared_.k_full(ring_.stage), ring_.parity);
      release(shared_.k_empty(ring_.stage));
      barrier_wait(shared_.v_full(ring_.stage), ring_.parity);
      release(shared_.v_empty(ring_.stage));
      ring_.advance();
    }
  }

  // Issues the first scores of a tile of rows.
  __device__ __forceinline__ void start(float (&s)[kScores], Tile* t) {
    if constexpr (C::kSkip) skip(t);
    barrier_wait(shared_.q_full(consumer_), q_parity_);
    q_parity_ ^= 1;
    barrier_wait(shared_.k_full(ring_.stage), ring_.parity);
    score(s, ring_.stage);
  }

  // Scores of one key tile; the products are in flight afterwards.
  __device__ __forceinline__ void score(float (&s)[kScores], int stage) const {
    const uint64_t a = row_descriptor(shared_.q(consumer_));
    const uint64_t b = row_descriptor(shared_.k(stage));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; ++step) {
      const int chunk = step / 4, bytes = step % 4 * 32;
      Wgmma<C::kKeys, C::kBf16>::ss(s, a + ((chunk * 64 * 128 + bytes) >> 4),
                                    b + ((chunk * C::kKeys * 128 + bytes) >> 4), step != 0);
    }
    wgmma_commit();
  }

  // Once a tile's scores are there: its keys are let go, and with the last ones the queries.
  __device__ __forceinline__ void release_scored(bool last) const {
    release(shared_.k_empty(ring_.stage));
    if (last) release(shared_.q_empty(consumer_));
  }

  // Adds one value tile to the output; the products are in flight afterwards.
  __device__ __forceinline__ void accumulate(float (&o)[C::kHeadDim / 2], uint32_t (&p)[kScores / 2],
                                             int stage) const {
    const uint64_t b = column_descriptor<C::kKeys>(shared_.v(stage));
    pin(p);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step) {
      Wgmma<C::kHeadDim, C::kBf16>::rs(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                       b + (step * 2048 >> 4));
    }
    wgmma_commit();
  }

  // Scores to probabilities in the A operand of the next product, and onto the row sums.
  __device__ __forceinline__ void to_probabilities(float (&s)[kScores], uint32_t (&p)[kScores / 2],
                                                   Sums& sums, int tile) {
    const int key = tile * C::kKeys;
    const bool masked = key < free_begin_ || key + C::kKeys > free_end_;
    if constexpr (C::kRunningMax) {
      cap_scores(s, cap_);
      if (masked) mask(s, visible_, key, -INFINITY);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < kScores; i += 4) largest = fmaxf(largest, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
        const float shift = fmaxf(shift_[r], largest);
        // A row that has seen nothing yet has nothing to rescale, and any finite shift will do.
        const float finite = shift == -INFINITY ? 0.f : shift;
        rescale_[r] = exp2_unit(shift_[r] - finite);
        shift_[r] = shift;
        sums.exact[r] *= rescale_[r];
        sums.rounded[r] *= rescale_[r];
#pragma unroll
        for (int i = 0; i < kScores; i += 4) {
          s[i + 2 * r] = exp2_unit(s[i + 2 * r] - finite);
          s[i + 2 * r + 1] = exp2_unit(s[i + 2 * r + 1] - finite);
        }
      }
      sum_and_pack<true, C::kBf16>(s, p, sums);
    } else if constexpr (C::kTanh == Tanh::kUnit) {
      by_unit<C::kExp2Fma>(s, s, cap_);
      if (masked) {
        mask(s, visible_, key, 0.f);
        sum_and_pack<true, C::kBf16>(s, p, sums);
      } else {
        sum_and_pack<false, C::kBf16>(s, p, sums);
      }
    } else {
      bool unit = masked || hot_;
      // Twice at most. One body for both attempts, so that p has one definition and needs no second set of
      // registers.
      for (;;) {
        // Nothing of one attempt is worth keeping in registers for the other.
        pin(s);
        int first_key = key;
        asm volatile("" : "+r"(first_key));
        Sums trial = sums;
#pragma unroll
        for (int begin = 0; begin < kScores; begin += kChunk) {
          float e[kChunk];
          if (unit) {
            by_unit<C::kExp2Fma>(s + begin, e, cap_);
            if (masked) {
              mask(e, visible_, first_key + 2 * begin, 0.f);
              sum_and_pack<true, C::kBf16>(e, p + begin / 2, trial);
            } else {
              sum_and_pack<false, C::kBf16>(e, p + begin / 2, trial);
            }
          } else {
            by_polynomial<C::kTanh>(s + begin, e, cap_);
            sum_and_pack<false, C::kBf16>(e, p + begin / 2, trial);
          }
        }
        // A NaN is neither.
        const bool small = trial.exact[0] <= cap_.most && trial.exact[1] <= cap_.most;
        const bool large = trial.exact[0] >= cap_.least && trial.exact[1] >= cap_.least;
        if (unit || __all_sync(0xffffffff, small && large)) {
          sums = trial;
          break;
        }
        hot_ = !__all_sync(0xffffffff, small);  // a sum that is too large stays so for the rest of these rows
        unit = true;
      }
    }
  }

  // One turn of the loop: the scores of `tile` beside the output product of the tile before it, then from
  // scores to probabilities while that product runs.
  __device__ __forceinline__ void step(float (&s)[kScores], float (&o)[C::kHeadDim / 2],
                                       uint32_t (&p)[kScores / 2], uint32_t (&p_next)[kScores / 2],
                                       Sums& sums, int tile, int key_begin) {
    const int before = ring_.stage;
    const uint32_t before_parity = ring_.parity;
    ring_.advance();
    barrier_wait(shared_.k_full(ring_.stage), ring_.parity);
    if constexpr (C::kTakeTurns) named_sync(1 + consumer_, 256);
    score(s, ring_.stage);
    barrier_wait(shared_.v_full(before), before_parity);
    accumulate(o, p, before);
    if constexpr (C::kTakeTurns) named_arrive(1 + (consumer_ + 1) % C::kConsumers, 256);
    wgmma_wait<C::kOverlap == Overlap::kApart ? 0 : 1>();
    pin(s);
    pin(p_next);
    release_scored(tile == key_begin);
    if constexpr (C::kOverlap == Overlap::kApart) {
      pin(o);
      release(shared_.v_empty(before));
    }
    if constexpr (C::kOverlap == Overlap::kOpen) {
      // The wait also covered the output product of the turn before.
      if (pending_ >= 0) release(shared_.v_empty(pending_));
      pending_ = before;
    }
    to_probabilities(s, p_next, sums, tile);
    if constexpr (C::kOverlap == Overlap::kTurn) {
      wgmma_wait<0>();
      pin(o);
      pin(p);
      release(shared_.v_empty(before));
    }
    if constexpr (C::kRunningMax) {
      if (__any_sync(0xffffffff, rescale_[0] != 1.f || rescale_[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < C::kHeadDim / 2; ++i) o[i] *= rescale_[i / 2 % 2];
      }
    }
  }

  __device__ __forceinline__ void finish(float (&o)[C::kHeadDim / 2], uint32_t (&p)[kScores / 2]) {
    barrier_wait(shared_.v_full(ring_.stage), ring_.parity);
    accumulate(o, p, ring_.stage);
    wgmma_wait<0>();
    pin(o);
    pin(p);
    if (C::kOverlap == Overlap::kOpen && pending_ >= 0) release(shared_.v_empty(pending_));
    release(shared_.v_empty(ring_.stage));
    ring_.advance();
  }

  // One tile of rows whose first scores are in flight.
  __device__ __forceinline__ Sums attend(float (&s)[kScores], float (&o)[C::kHeadDim / 2], const Tile& t) {
    const int row = thread_row(t);
    const int diagonal = t.seqlen_k - t.seqlen_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      visible_.first[r] = row + 8 * r + diagonal - problem_.left;
      visible_.last[r] = min(row + 8 * r + diagonal + problem_.right, t.seqlen_k - 1);
    }
    // Keys [free_begin, free_end) are seen by all 64 rows.
    const int first_row = t.row + 64 * consumer_;
    free_begin_ = first_row + 63 + diagonal - problem_.left;
    free_end_ = min(first_row + diagonal + problem_.right + 1, t.seqlen_k);
    pending_ = -1;
    hot_ = cap_.least > cap_.most;
    shift_[0] = shift_[1] = C::kRunningMax ? -INFINITY : cap_.shift;

#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; ++i) o[i] = 0.f;
    uint32_t p[kScores / 2] = {};
    Sums sums = {};
    int tile = t.key_end - 1;
    wgmma_wait<0>();
    pin(s);
    release_scored(tile == t.key_begin);
    to_probabilities(s, p, sums, tile);
    if constexpr (C::kOverlap == Overlap::kApart) {
      while (tile-- != t.key_begin) step(s, o, p, p, sums, tile, t.key_begin);
      finish(o, p);
      return sums;
    }
    // Two sets of probabilities, in turn: one is still being read while the other is written.
    uint32_t p_other[kScores / 2] = {};
    for (;;) {
      if (tile-- == t.key_begin) {
        finish(o, p);
        break;
      }
      step(s, o, p, p_other, sums, tile, t.key_begin);
      if (tile-- == t.key_begin) {
        finish(o, p_other);
        break;
      }
      step(s, o, p_other, p, sums, tile, t.key_begin);
    }
    return sums;
  }

  const Problem& problem_;
  const CapConstants& cap_;
  const Shared<C>& shared_;
  const int consumer_;
  Ring<C::kStages> ring_;
  uint32_t q_parity_ = 0;
  Visible visible_;
  int free_begin_, free_end_;
  float shift_[2];    // exponent subtracted from the scores of each row
  float rescale_[2];  // what a change of it means for the sums and the output so far
  bool hot_;          // these rows have left the polynomial's range
  int pending_;       // stage of the value tile whose product was in flight before this turn, or -1
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ Problem problem,
                   const __grid_constant__ CapConstants cap, int tiles) {
  extern __shared__ uint8_t memory[];
  const Shared<C> shared(shared_address(memory));
  if (threadIdx.x == 0) {
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    prefetch_map(&v_map);
    for (int w = 0; w < C::kConsumers; ++w) {
      barrier_init(shared.q_full(w), 1);
      barrier_init(shared.q_empty(w), 4);
    }
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(shared.k_full(s), 1);
      barrier_init(shared.v_full(s), 1);
      barrier_init(shared.k_empty(s), 4 * C::kConsumers);  // one arrival a warp
      barrier_init(shared.v_empty(s), 4 * C::kConsumers);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce<C>(problem, shared, &q_map, &k_map, &v_map, tiles);
  } else {
    take_registers<C::kConsumerRegisters>();
    Consumer<C>(problem, cap, shared).run(tiles);
  }
}

}  // namespace softcap_hopper
