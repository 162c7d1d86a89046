// The rows of a product, quantised to signed bytes with a scale for each group of columns.
//
// What a group loses to rounding grows with its largest element. So the largest of every few columns, an outlier, is left
// out of its group and multiplied as it is. Where a whole row shares a scale a few do not help: there each column has a
// second byte, its finer code, for what the first one has lost.
#pragma once

#include <algorithm>
#include <limits>

#include "quantised_panel.h"
#include "scratch.h"

namespace {

constexpr int64_t kLeastShared = 32;  // columns that share a scale, at least
constexpr float kLargestCode = 127.0f, kFiner = 254.0f;

// What a row contributes to the sums of one of the weight's groups.
struct GroupInput {
  int32_t sum;   // of its codes
  float scale;
  float offset;  // float(sum) * scale: what the weight's offset is multiplied by
};

struct Outlier {
  int32_t group;  // of the weight
  int32_t four;   // which four columns of the group
  int32_t codes;  // of these: 1 for its own
  float value;
};

// How the columns of a row are quantised. Groups are the weight's.
struct RowLayout {
  int64_t columns, groups, group;
  int64_t shared;  // columns that share a scale
  int64_t block;   // columns with one outlier
  int64_t num_outliers;

  explicit RowLayout(const PanelLayout& layout)
      : columns(layout.columns()),
        groups(layout.groups),
        group(layout.group),
        shared(std::max(kLeastShared, layout.group)),
        block(shared == kLeastShared ? 256 : 128),
        num_outliers(layout.whole_rows ? 0 : (columns + block - 1) / block) {}
};

struct QuantisedRows {
  RowLayout layout;
  int8_t* codes;       // [count, columns], zeros beyond k
  GroupInput* groups;  // [count, groups]
  Outlier* outliers;   // [count, num_outliers]
  // Like codes and groups, where whole rows share a scale.
  int8_t* finer_codes;
  GroupInput* finer_groups;

  static size_t bytes(const RowLayout& layout, int64_t count) {
    return 2 * Scratch::bytes_for<int8_t>(count * layout.columns) +
           2 * Scratch::bytes_for<GroupInput>(count * layout.groups) +
           Scratch::bytes_for<Outlier>(count * layout.num_outliers);
  }

  static QuantisedRows take(Scratch& scratch, const RowLayout& layout, int64_t count) {
    const auto codes = [&] { return scratch.take<int8_t>(count * layout.columns); };
    const auto groups = [&] { return scratch.take<GroupInput>(count * layout.groups); };
    return {layout, codes(), groups(), scratch.take<Outlier>(count * layout.num_outliers), codes(), groups()};
  }

  QuantisedRows from(int64_t row) const {
    const int64_t column = row * layout.columns, group = row * layout.groups;
    return {layout,
            codes + column,
            groups + group,
            outliers + row * layout.num_outliers,
            finer_codes + column,
            finer_groups + group};
  }

  bool has_finer() const { return layout.num_outliers == 0; }

  // The same rows by their finer codes.
  QuantisedRows finer() const { return {layout, finer_codes, finer_groups, outliers, nullptr, nullptr}; }
};

class RowQuantiser {
 public:
  RowQuantiser(const RowLayout& layout, int64_t k) : layout_(layout), k_(k) {}

  // to: its first row.
  template <class T>
  void run(const T* x, const QuantisedRows& to) const {
    thread_local Scratch scratch;
    scratch.reserve(Scratch::bytes_for<float>(layout_.columns));
    float* const values = scratch.take<float>(layout_.columns);
    for (int64_t i = 0; i < layout_.columns; i += kLanes) store(values + i, i < k_ ? load(x + i, k_ - i) : Floats{});
    for (int64_t i = 0; i < layout_.num_outliers; ++i) to.outliers[i] = take_largest(values, i * layout_.block);
    for (int64_t start = 0; start < layout_.columns; start += layout_.shared) quantise(values, start, to);
  }

 private:
  static Ints magnitude(const float* values) { return bit_cast<Ints>(load(values)) & 0x7fffffff; }

  static bool is_finite(float x) { return std::fabs(x) <= std::numeric_limits<float>::max(); }

  // The largest of a block, the first of equal ones, which becomes 0. Compared as integers: so a NaN is larger than all
  // numbers.
  Outlier take_largest(float* values, int64_t start) const {
    Ints most = broadcast(-1), at = {};
    for (int64_t i = start; i < std::min(start + layout_.block, layout_.columns); i += kLanes) {
      const Ints found = magnitude(values + i);
      at = found > most ? broadcast(int32_t(i)) : at;
      most = max(most, found);
    }
    const Ints columns = most == broadcast(int32_t(max_lanes(most))) ? at + lane_numbers() : broadcast(INT32_MAX);
    const int64_t column = min_lanes(columns);
    const float value = values[column];
    values[column] = 0;
    return {int32_t(column / layout_.group), int32_t(column % layout_.group / 4), 1 << 8 * (column % 4),
            is_finite(value) ? value : std::numeric_limits<float>::quiet_NaN()};
  }

  // The groups that share the scale of the columns from `start` on.
  void quantise(const float* values, int64_t start, const QuantisedRows& to) const {
    const int64_t end = std::min(start + layout_.shared, layout_.columns);
    Ints most = {};
    for (int64_t i = start; i < end; i += kLanes) most = max(most, magnitude(values + i));
    const float largest = bit_cast<float>(int32_t(max_lanes(most)));
    // In a group of tiny numbers the inverse would overflow, and 0 times infinity is NaN.
    const float inverse = largest > 0 ? std::min(kLargestCode / largest, std::numeric_limits<float>::max()) : 0.0f;
    const bool finite = is_finite(largest);
    const float scale = finite ? largest / kLargestCode : std::numeric_limits<float>::quiet_NaN();
    for (int64_t at = start; at < end; at += layout_.group) {
      to.groups[at / layout_.group] = round<false>(values + at, finite, inverse, scale, to.codes + at);
      if (to.has_finer()) *to.finer_groups = round<true>(values, finite, inverse, scale / kFiner, to.finer_codes);
    }
  }

  // A group's codes. |x| * inverse is at most 127 and a few units of its last place, so no code is beyond 127.
  template <bool kFinerCodes>
  GroupInput round(const float* values, bool finite, float inverse, float scale, int8_t* codes) const {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    Ints sums = {};
    for (int64_t i = 0; i < layout_.group; i += kLanes) {
      const Floats exact = finite ? load(values + i) * inverse : Floats{};
      Floats rounded = exact + magic;
      if (kFinerCodes) rounded = (exact - (rounded - magic)) * kFiner + magic;
      const Ints code = bit_cast<Ints>(rounded) - bit_cast<Ints>(magic);
      const Bytes bytes = __builtin_convertvector(code, Bytes);
      std::memcpy(codes + i, &bytes, sizeof(bytes));
      sums += code;
    }
    const int32_t sum = sum_lanes(sums);
    return {sum, scale, float(sum) * scale};
  }

  const RowLayout& layout_;
  const int64_t k_;
};

}  // namespace
