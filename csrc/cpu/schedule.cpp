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

Lanes make_lanes(const Problem& p, const Sequence& s, int64_t head_kv, int64_t first, int64_t last,
                 int64_t unit, Range within) {
  Lanes lanes;
  lanes.count = last - first;
  lanes.width = (lanes.count + unit - 1) / unit * unit;
  lanes.some = {s.len_kv, 0};
  lanes.all = within;
  const int64_t group = p.heads_q / p.heads_kv;
  for (int64_t i = 0; i < lanes.count; ++i) {
    lanes.row[i] = (first + i) / group;
    lanes.head[i] = head_kv * group + (first + i) % group;
    const Range seen = visible_keys(p, s, lanes.row[i]);
    Range r{seen.begin > within.begin ? seen.begin : within.begin,
            seen.end < within.end ? seen.end : within.end};
    if (r.empty()) r = {0, 0};
    lanes.keys[i] = r;
    if (r.begin > lanes.all.begin) lanes.all.begin = r.begin;
    if (r.end < lanes.all.end) lanes.all.end = r.end;
    if (r.empty()) continue;
    if (r.begin < lanes.some.begin) lanes.some.begin = r.begin;
    if (r.end > lanes.some.end) lanes.some.end = r.end;
  }
  if (lanes.all.empty()) lanes.all = {lanes.some.end, lanes.some.end};
  return lanes;
}

Range lanes_that_see(const Lanes& lanes, int64_t begin, int64_t end, int64_t unit) {
  Range seeing{lanes.width, 0};
  for (int64_t i = 0; i < lanes.count; ++i) {
    const Range r = lanes.keys[i];
    if (r.empty() || r.begin >= end || r.end <= begin) continue;
    if (i < seeing.begin) seeing.begin = i / unit * unit;
    seeing.end = (i / unit + 1) * unit;
  }
  return seeing;
}

}  // namespace softcap_cpu
