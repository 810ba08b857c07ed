#include "schedule.h"

namespace softcap_cpu {

int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

Range visible_keys(const Problem& p, const Sequence& s, int64_t i) {
  const int64_t diagonal = i + s.len_kv - s.len_q;
  const int64_t right = p.causal ? 0 : p.window_right;
  Range r{0, s.len_kv};
  // Compared before they are added, so that a window of any size, even the largest integer, cannot overflow.
  if (p.window_left >= 0 && diagonal > p.window_left) r.begin = diagonal - p.window_left;
  if (right >= 0 && right < s.len_kv - 1 - diagonal) r.end = diagonal + right + 1;
  return r.empty() ? Range{0, 0} : r;
}

}  // namespace softcap_cpu
