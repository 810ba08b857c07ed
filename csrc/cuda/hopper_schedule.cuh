// Which block computes which rows, in which order, and which keys those rows see.
#pragma once

#include <stdint.h>

namespace softcap_hopper {

constexpr int kUnlimited = 1 << 30;

struct Problem {
  const int32_t* cu_seqlens_q;  // null: dense
  const int32_t* cu_seqlens_k;
  void* out;
  float* lse;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t total_q;
  int batch, heads_q, heads_per_key;
  int seqlen_q, seqlen_k;
  int left, right;  // window around the diagonal, kUnlimited where open; causal is right = 0
  int row_tiles;    // tiles of rows a sequence
  int sequences;    // batch, and one more when packed: the rows past cu_seqlens_q[batch], which see nothing
  int group;        // (sequence, head) pairs walked together, so that their keys stay in the L2 cache
  int paired;       // a block takes the r-th tile of rows from the end and from the start together
  int heavy_first;  // later rows see more keys: hand them out first
};

// One tile of rows of one head of one sequence.
struct Tile {
  int row;  // first row, within the sequence
  int head, sequence;
  int seqlen_q, seqlen_k;
  int start_q, start_k;    // first row of the sequence in the packed tensors; dense: 0
  int key_begin, key_end;  // key tiles [begin, end)
};

// The tiles of one block, in order. Causal rows see the more keys the later they come. Paired, the r-th tile
// from the end goes with the r-th from the start, so that every block has the same work in every round and
// neighbouring blocks share the keys of a head. Otherwise blocks take tiles back and forth (0 1 2 3, 7 6 5 4,
// ...).
class Walk {
 public:
  // Finds the next tile's place in the order; false when there is none left.
  __device__ __forceinline__ bool next(const Problem& p, int tiles, int* index) {
    const int blocks = gridDim.x;
    for (;;) {
      if (round_ * blocks >= tiles) return false;
      int place = round_ * blocks;
      if (p.paired) {
        const int pairs = (p.row_tiles + 1) / 2;  // of one head; tiles counts pairs
        place += blockIdx.x;
        if (place >= tiles) return false;
        const int head = place / pairs, r = place - head * pairs;
        const int row = second_ ? r : p.row_tiles - 1 - r;
        const bool middle = second_ && 2 * r == p.row_tiles - 1;
        round_ += second_;
        second_ = !second_;
        if (middle) continue;
        *index = head * p.row_tiles + row;
        return true;
      }
      place += round_ & 1 ? blocks - 1 - blockIdx.x : blockIdx.x;
      ++round_;
      if (place >= tiles) continue;
      *index = place;
      return true;
    }
  }

 private:
  int round_ = 0;
  bool second_ = false;
};

template <bool kPacked, int kRows, int kKeys>
__device__ __forceinline__ Tile find_tile(const Problem& p, int index) {
  const int pairs = p.sequences * p.heads_q;
  const int per_group = p.group * p.row_tiles;
  const int g = index / per_group;
  const int within = index - g * per_group;
  const int size = min(p.group, pairs - g * p.group);
  int tile_row, member;
  if (p.heavy_first) {
    tile_row = within / size;
    member = within - tile_row * size;
    tile_row = p.row_tiles - 1 - tile_row;
  } else {
    member = within / p.row_tiles;
    tile_row = within - member * p.row_tiles;
  }
  const int pair = g * p.group + member;
  Tile t;
  t.sequence = pair / p.heads_q;
  t.head = pair - t.sequence * p.heads_q;
  t.row = tile_row * kRows;
  t.start_q = t.start_k = 0;
  t.seqlen_q = p.seqlen_q;
  t.seqlen_k = p.seqlen_k;
  if constexpr (kPacked) {
    t.start_q = p.cu_seqlens_q[t.sequence];
    if (t.sequence < p.batch) {
      t.start_k = p.cu_seqlens_k[t.sequence];
      t.seqlen_q = p.cu_seqlens_q[t.sequence + 1] - t.start_q;
      t.seqlen_k = p.cu_seqlens_k[t.sequence + 1] - t.start_k;
    } else {
      t.seqlen_q = static_cast<int>(p.total_q - t.start_q);
      t.seqlen_k = 0;
    }
  }
  const int last_row = min(t.row + kRows, t.seqlen_q) - 1;
  const int diagonal = t.seqlen_k - t.seqlen_q;
  const int end = min(t.seqlen_k, last_row + diagonal + p.right + 1);
  const int begin = max(0, t.row + diagonal - p.left);
  t.key_end = (max(end, 0) + kKeys - 1) / kKeys;
  t.key_begin = begin / kKeys;
  if (end <= begin || t.row >= t.seqlen_q) t.key_end = t.key_begin;
  return t;
}

}  // namespace softcap_hopper
