// The rows of a product, quantised to signed bytes with a scale for each group of columns.
#pragma once

#include <algorithm>
#include <limits>

#include "quantised_panel.h"

namespace {

constexpr int64_t kLeastGroup = 32;  // columns that share a scale, at least
constexpr float kLargestCode = 127.0f;

// What a row contributes to the sums of one of the weight's groups.
struct GroupInput {
  int32_t sum;   // of its codes
  float scale;
  float offset;  // float(sum) * scale: what the weight's offset is multiplied by
};

struct QuantisedRows {
  int8_t* codes;       // [count, columns of the layout], zeros beyond k
  GroupInput* groups;  // [count, groups]
};

template <class T>
class RowQuantiser {
 public:
  RowQuantiser(const PanelLayout& layout, int64_t k)
      : layout_(layout), k_(k), together_(std::max(kLeastGroup, layout.group)) {}

  void run(const T* x, int8_t* codes, GroupInput* groups) const {
    for (int64_t start = 0; start < layout_.columns(); start += together_) {
      const int64_t end = std::min(start + together_, layout_.columns());
      const float largest = this->largest(x, start, end);
      // In a group of tiny numbers the inverse would overflow, and 0 times infinity is NaN.
      const float inverse = largest > 0 ? std::min(kLargestCode / largest, std::numeric_limits<float>::max()) : 0.0f;
      const bool finite = largest <= std::numeric_limits<float>::max();
      const float scale = finite ? largest / kLargestCode : std::numeric_limits<float>::quiet_NaN();
      for (int64_t at = start; at < end; at += layout_.group) {
        const int32_t sum = finite ? quantise(x, at, inverse, codes) : clear(at, codes);
        groups[at / layout_.group] = {sum, scale, float(sum) * scale};
      }
    }
  }

 private:
  INLINE Floats values(const T* x, int64_t i) const { return i < k_ ? load(x + i, k_ - i) : Floats{}; }

  // Compared as integers: so a NaN is larger than all numbers.
  float largest(const T* x, int64_t start, int64_t end) const {
    Ints largest = {};
    for (int64_t i = start; i < end; i += kLanes) {
      const Ints magnitude = bit_cast<Ints>(values(x, i)) & 0x7fffffff;
      largest = largest > magnitude ? largest : magnitude;
    }
    int32_t most = 0;
    for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, largest[lane]);
    return bit_cast<float>(most);
  }

  // A group's codes; returns their sum. |x| * inverse is at most 127 and a few units of its last place, so no code is
  // beyond 127.
  int32_t quantise(const T* x, int64_t start, float inverse, int8_t* codes) const {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    Ints sum = {};
    for (int64_t i = start; i < start + layout_.group; i += kLanes) {
      const Ints code = bit_cast<Ints>(values(x, i) * inverse + magic) - bit_cast<Ints>(magic);
      const Bytes bytes = __builtin_convertvector(code, Bytes);
      std::memcpy(codes + i, &bytes, sizeof(bytes));
      sum += code;
    }
    int32_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    return total;
  }

  int32_t clear(int64_t start, int8_t* codes) const {
    std::memset(codes + start, 0, size_t(layout_.group));
    return 0;
  }

  const PanelLayout& layout_;
  const int64_t k_, together_;
};

}  // namespace
