// A panel of a quantised weight by vectors: the sums of a few rows stay in registers while the panel passes by.
#pragma once

#include "quantised_codes.h"
#include "quantised_rows.h"

namespace {

// Rows of a block. Where a panel has two vectors of columns, their integer sums and as many totals take three quarters of the
// registers: with more, the compiler moves sums to memory and back within the loop along k. Matrix tiles want panels of four
// vectors, and there four rows were faster than three nevertheless.
#if defined(PAGEWIRE_TILES)
constexpr int kRows = 4;
#elif defined(__AVX512F__)
constexpr int kRows = 6;
#elif defined(__AVX2__) || defined(PAGEWIRE_NEON)
constexpr int kRows = 3;
#else
constexpr int kRows = 2;
#endif
constexpr int64_t kLine = 64;
constexpr int kStepLines = 4 * kPanel > kLine ? int(4 * kPanel / kLine) : 1;  // of a panel, in one step along k

// What is fetched from memory while rows are multiplied: lines of the panel after this one, for each step as many as the
// step reads, or half as many.
enum class Fetch { nothing, next, next_slowly };

constexpr int lines_of(Fetch fetch) {
  return fetch == Fetch::next ? kStepLines : fetch == Fetch::next_slowly ? (kStepLines + 1) / 2 : 0;
}

// The sums of some rows and the columns of a panel, in float32.
struct alignas(64) PanelSums {
  float row[kRows][kPanel];
};

template <class Codes>
class VectorBlock {
 public:
  VectorBlock(const PanelLayout& layout, int32_t zero, const Codes& codes)
      : layout_(layout), codes_(codes), taken_((Codes::kSmall ? 0 : kTaken) - zero) {}

  // `count` rows, at most kRows, times a panel. Returns what to fetch next where `next` was fetched meanwhile.
  const char* run(Fetch fetch, const QuantisedRows& rows, int64_t count, const char* panel, const char* next,
                  PanelSums& sums) const {
    if (fetch == Fetch::nothing) next = add<Fetch::nothing, true>(rows, count, panel, next, sums);
    if (fetch == Fetch::next) next = add<Fetch::next, true>(rows, count, panel, next, sums);
    if (fetch == Fetch::next_slowly) next = add<Fetch::next_slowly, true>(rows, count, panel, next, sums);
    if (rows.has_finer())
      add<Fetch::nothing, false>(rows.finer(), count, panel, next, sums);
    else
      for (int64_t row = 0; row < count; ++row) add_outliers(rows.from(row), panel, sums.row[row]);
    return next;
  }

  // The products of a row's outliers, in ascending order, as if each were a group of one column.
  void add_outliers(const QuantisedRows& row, const char* panel, float* to) const {
    Floats totals[kVectors];
    for (int v = 0; v < kVectors; ++v) totals[v] = load(to + v * kLanes);
    for (int64_t i = 0; i < row.layout.num_outliers; ++i) add_outlier(row.outliers[i], panel, totals);
    for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, totals[v]);
  }

 private:
  INLINE void add_outlier(const Outlier& outlier, const char* panel, Floats (&totals)[kVectors]) const {
    const char* const group = panel + outlier.group * layout_.group_bytes();
    const char* const packed = group + outlier.four / Codes::kParts * Codes::kPacked * 4 * kPanel;
    const char* const scales = group + layout_.code_bytes();
    const Words element = (Words)broadcast(outlier.codes);
    for (int v = 0; v < kVectors; ++v) {
      const Words weights = codes_.bytes(packed + v * int64_t(sizeof(Words)), outlier.four % Codes::kParts);
      const Ints sum = multiply_add<Codes::kSmall>(broadcast(taken_), weights, element);
      const char* const at = scales + v * kLanes * layout_.scale_size();
      const Floats both = load_scales(at, layout_.scale_dtype) * outlier.value;
      totals[v] = exact_fma(__builtin_convertvector(sum, Floats), both, totals[v]);
      if (!layout_.offsets) continue;
      const Floats offset = load_scales(at + layout_.scale_bytes(), layout_.scale_dtype);
      totals[v] = exact_fma(broadcast(outlier.value), offset, totals[v]);
    }
  }

  // kFirst: onto zeros, whatever `sums` holds.
  template <Fetch kFetch, bool kFirst, int kCount = kRows>
  const char* add(const QuantisedRows& rows, int64_t count, const char* panel, const char* next, PanelSums& sums) const {
    if constexpr (kCount > 1)
      if (count < kCount) return add<kFetch, kFirst, kCount - 1>(rows, count, panel, next, sums);
    return multiply<kFetch, kFirst, kCount>(rows, panel, next, sums);
  }

  template <Fetch kFetch, bool kFirst, int kCount>
  const char* multiply(const QuantisedRows& rows, const char* panel, const char* next, PanelSums& to) const {
    const int8_t* x = rows.codes;
    Floats totals[kCount][kVectors];
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kVectors; ++v) totals[r][v] = kFirst ? Floats{} : load(&to.row[r][v * kLanes]);
    for (int64_t g = 0; g < layout_.groups; ++g, panel += layout_.group_bytes(), x += layout_.group) {
      Ints sums[kCount][kVectors];
      for (int r = 0; r < kCount; ++r) {
        const Ints start = broadcast(rows.groups[r * layout_.groups + g].sum * taken_);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = start;
      }
      next = add_products<kFetch, kCount>(x, panel, next, sums);
      add_group<kCount>(rows.groups + g, panel + layout_.code_bytes(), sums, totals);
    }
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kVectors; ++v) store(&to.row[r][v * kLanes], totals[r][v]);
    return next;
  }

  template <Fetch kFetch, int kCount>
  INLINE const char* add_products(const int8_t* x, const char* packed, const char* next,
                                  Ints (&sums)[kCount][kVectors]) const {
    for (int64_t i = 0; i < layout_.group; i += 4 * Codes::kParts, packed += Codes::kPacked * 4 * kPanel) {
      for (int line = 0; line < Codes::kPacked * lines_of(kFetch); ++line, next += kLine) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
      for (int part = 0; part < Codes::kParts; ++part) {
        Words weights[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          weights[v] = codes_.bytes(packed + v * int64_t(sizeof(Words)), part);
#pragma GCC unroll 6
        for (int r = 0; r < kCount; ++r) {
          int32_t four;
          std::memcpy(&four, x + r * layout_.columns() + i + 4 * part, sizeof(four));
          const Words element = (Words)broadcast(four);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v)
            sums[r][v] = multiply_add<Codes::kSmall>(sums[r][v], weights[v], element);
        }
      }
    }
    return next;
  }

  // scales: a group's, and its offsets behind them.
  template <int kCount>
  INLINE void add_group(const GroupInput* inputs, const char* scales, const Ints (&sums)[kCount][kVectors],
                        Floats (&totals)[kCount][kVectors]) const {
    const int64_t vector_bytes = kLanes * layout_.scale_size();
    for (int v = 0; v < kVectors; ++v) {
      const Floats scale = load_scales(scales + v * vector_bytes, layout_.scale_dtype);
      for (int r = 0; r < kCount; ++r) {
        const Floats both = scale * inputs[r * layout_.groups].scale;
        totals[r][v] = exact_fma(__builtin_convertvector(sums[r][v], Floats), both, totals[r][v]);
      }
      if (!layout_.offsets) continue;
      const Floats offset = load_scales(scales + layout_.scale_bytes() + v * vector_bytes, layout_.scale_dtype);
      for (int r = 0; r < kCount; ++r)
        totals[r][v] = exact_fma(broadcast(inputs[r * layout_.groups].offset), offset, totals[r][v]);
    }
  }

  const PanelLayout layout_;
  const Codes codes_;
  const int32_t taken_;
};

}  // namespace
