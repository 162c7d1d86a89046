// How a quantised weight is packed: in panels of columns of the result, each read from its first byte to its last.
//
// A panel is a list of groups. A group holds its codes, then a scale for each column, then an offset for each column
// where the weight has offsets. Codes of 8 bits stand as [k / 4][column][4]. With 4 bits they stand as [k / 8][column][4],
// and a byte has two of the same column: the low half is of the first four, the high half of the last four. So a vector
// of packed codes gives two vectors of bytes. With 6 bits they stand as [k / 16][3][column][4]: the low bits of the bytes
// are the first three fours of 16, their high bits the last one, so three vectors give four. Where the weight has no
// groups, all of k is one, with zeros behind it.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr int64_t kPanel = PAGEWIRE_INTEGER_PANEL;  // columns whose sums are in registers at a time
constexpr int kVectors = kPanel / kLanes;
constexpr int64_t kDepth = PAGEWIRE_ROW_DEPTH;

struct PanelLayout {
  int64_t groups, group;  // how many, and columns of each
  int64_t bits;
  int32_t scale_dtype;
  bool offsets, whole_rows;  // whole_rows: all of a row shares a scale

  PanelLayout(const Integers& form, int64_t k)
      : groups(form.group ? k / form.group : 1),
        group(form.group ? form.group : (k + kDepth - 1) / kDepth * kDepth),
        bits(form.bits),
        scale_dtype(form.scale_dtype),
        offsets(form.offsets != 0),
        whole_rows(!form.group) {}

  int64_t columns() const { return groups * group; }
  int64_t code_bytes() const { return group * kPanel * bits / 8; }
  int64_t scale_bytes() const { return kPanel * scale_size(); }
  int64_t group_bytes() const { return code_bytes() + (offsets ? 2 : 1) * scale_bytes(); }
  int64_t bytes() const { return groups * group_bytes(); }
  int64_t scale_size() const { return scale_dtype == 0 ? 4 : 2; }
};

// A vector of scales or offsets; `at`: of the first column.
INLINE Floats load_scales(const char* at, int32_t dtype) {
  if (dtype == 2) return load(reinterpret_cast<const f16*>(at));
  if (dtype == 1) return load(reinterpret_cast<const bf16*>(at));
  return load(reinterpret_cast<const float*>(at));
}

// a * b + c, rounded once by every instruction set.
INLINE Floats exact_fma(Floats a, Floats b, Floats c) {
  if constexpr (kFused) return fma(a, b, c);
  for (int lane = 0; lane < kLanes; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
}

}  // namespace
