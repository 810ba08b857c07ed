// The backward's problem: which block sums the gradients of which keys, over which queries.
//
//   P = 2^(outer t - lse log2(e)),  t = tanh(inner s),  W = P (1 - t^2),  dS = (dout v^T - delta) W
//   dv = P^T dout,  dk = scale dS^T q,  dq = scale dS k,  delta = rowsum(dout out) - dlse
//
// A block holds one tile of keys and walks over the queries that see it, those of all heads that share the
// keys. Sums over keys (dq) cross blocks: they are added up in float32 in the workspace, tile by tile of
// queries.
#pragma once

#include <stdint.h>

#include "hopper_schedule.cuh"

namespace softcap_hopper {

struct BackwardProblem {
  const int32_t* cu_seqlens_q;  // null: dense
  const int32_t* cu_seqlens_k;
  const void* out;
  const void* dout;
  const float* lse;
  const float* dlse;  // may be null
  void* dq;
  void* dk;
  void* dv;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t dout_stride_batch, dout_stride_token, dout_stride_head;
  int64_t total_q, total_k;
  int batch, heads_q, heads_k, heads_per_key;
  int seqlen_q, seqlen_k;
  int left, right;  // window around the diagonal, kUnlimited where open; causal is right = 0
  int sequences;    // batch, and one more when packed: the rows past the last sequence, whose gradients are 0
  int query_tiles;  // of one sequence, at most
  int key_tiles;    // likewise
  int tiles_a_head;   // tiles of queries in the workspace: of one sequence's head, packed: of a head
  int group;          // (sequence, head of keys) pairs whose blocks are handed out together
  int group_missing;  // pairs that the first group has fewer
  float inner, outer, scale;
  // The workspace, by tiles of queries.
  float* stats;  // lse log2(e) of a tile's queries, then delta; infinite lse where a query sees nothing or is
                 // none; then, as integers, the tile's place in its sequence and in the workspace
  float* sums;   // dq / scale, in the order of the products' accumulators
  int* turns;    // how many blocks have added to the sums, by consumer; null: blocks add in any order
};

// What the workspace keeps of a tile of queries, in words, a multiple of 16 bytes.
template <int kQueries>
struct Stats {
  static constexpr int kDelta = kQueries, kPlace = 2 * kQueries, kWords = kPlace + 4;
};

// Where the workspace keeps tile `tile` of the queries of a head.
template <int kQueries>
__device__ __forceinline__ int64_t tile_index(const BackwardProblem& p, int sequence, int head, int tile) {
  if (p.cu_seqlens_q == nullptr) {
    return (static_cast<int64_t>(sequence) * p.heads_q + head) * p.tiles_a_head + tile;
  }
  // Every sequence starts a tile of its own.
  return static_cast<int64_t>(head) * p.tiles_a_head + p.cu_seqlens_q[sequence] / kQueries + sequence + tile;
}

struct Lengths {
  int seqlen_q, seqlen_k;
  int start_q, start_k;  // first row in the packed tensors; dense: 0
};

__device__ __forceinline__ Lengths lengths_of(const BackwardProblem& p, int sequence) {
  if (p.cu_seqlens_q == nullptr) return {p.seqlen_q, p.seqlen_k, 0, 0};
  Lengths l;
  l.start_q = p.cu_seqlens_q[sequence];
  l.start_k = p.cu_seqlens_k[sequence];
  if (sequence < p.batch) {
    l.seqlen_q = p.cu_seqlens_q[sequence + 1] - l.start_q;
    l.seqlen_k = p.cu_seqlens_k[sequence + 1] - l.start_k;
  } else {
    l.seqlen_q = static_cast<int>(p.total_q - l.start_q);
    l.seqlen_k = static_cast<int>(p.total_k - l.start_k);
  }
  return l;
}

// One tile of keys of one key head of one sequence, and the tiles of queries that see any of it.
struct KeyTile {
  int tile, head, sequence;
  Lengths lengths;
  int diagonal;                // a query's key is its row and this
  int query_begin, query_end;  // tiles
};

template <int kQueries, int kKeys>
__device__ __forceinline__ KeyTile find_key_tile(const BackwardProblem& p, int index) {
  KeyTile t;
  // The first keys are seen by the most queries: hand them out first, and those of a whole group of heads, so
  // that what is handed out last is short. Blocks that add in turn start from the end, where causal queries
  // see their last key.
  const int group = (index + p.group_missing * p.key_tiles) / (p.group * p.key_tiles);
  const int first = max(group * p.group - p.group_missing, 0);
  const int size = group == 0 ? p.group - p.group_missing : p.group;
  const int within = index - first * p.key_tiles;
  t.tile = within / size;
  const int pair = first + within - t.tile * size;
  if (p.turns != nullptr) t.tile = p.key_tiles - 1 - t.tile;
  t.sequence = pair / p.heads_k;
  t.head = pair - t.sequence * p.heads_k;
  t.lengths = lengths_of(p, t.sequence);
  t.diagonal = t.lengths.seqlen_k - t.lengths.seqlen_q;
  const int key = t.tile * kKeys;
  const int last = min(key + kKeys, t.lengths.seqlen_k) - 1;
  const int begin = max(0, key - t.diagonal - p.right);
  const int end = min(t.lengths.seqlen_q, last - t.diagonal + p.left + 1);
  t.query_begin = begin / kQueries;
  t.query_end = (max(end, 0) + kQueries - 1) / kQueries;
  if (end <= begin || last < key || t.sequence == p.batch) t.query_end = t.query_begin;
  return t;
}

// Which block's turn it is: how many tiles of keys after this one are seen by a tile of queries.
template <int kQueries, int kKeys>
__device__ __forceinline__ int turn_of(const BackwardProblem& p, const KeyTile& t, int query_tile) {
  const int last = min(t.lengths.seqlen_k - 1, (query_tile + 1) * kQueries - 1 + t.diagonal + p.right);
  return last / kKeys - t.tile;
}

// The tiles of queries of one block in order: those of each head that shares the keys.
class Queries {
 public:
  struct Place {
    int tile, index;  // within the sequence; in the workspace
    int head;         // within the group of heads
  };

  template <int kQueries>
  static __device__ __forceinline__ Queries of(const BackwardProblem& p, const KeyTile& t) {
    Queries q;
    q.begin_ = t.query_begin;
    q.tiles_ = t.query_end - t.query_begin;
    q.count = q.tiles_ * p.heads_per_key;
    q.index_ = static_cast<int>(tile_index<kQueries>(p, t.sequence, t.head * p.heads_per_key, 0));
    // Blocks that see all queries start at different ones, so that they do not all add to the same sums at
    // once.
    const bool spread = p.turns == nullptr && p.right == kUnlimited && p.left == kUnlimited;
    q.offset_ = spread ? static_cast<int>(static_cast<int64_t>(t.tile) * q.tiles_ / p.key_tiles) : 0;
    return q;
  }

  // Computed anew wherever it is needed: registers are dearer than a division.
  __device__ __forceinline__ Place at(const BackwardProblem& p, int i) const {
    const int head = i / tiles_;
    int tile = i - head * tiles_ + offset_;
    if (tile >= tiles_) tile -= tiles_;
    tile += begin_;
    return {tile, index_ + head * p.tiles_a_head + tile, head};
  }

  int count;

 private:
  int begin_, tiles_, index_, offset_;
};

// A place in a ring of stages that are used in turn, and the parity of its i-th use.
template <int kStages>
__device__ __forceinline__ int stage_of(int i) {
  return i % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32_t parity_of(int i) {
  return i / kStages & 1;
}

}  // namespace softcap_hopper
