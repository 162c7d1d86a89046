// A panel of a quantised weight by vectors: the sums of a few rows stay in registers while the panel passes by.
#pragma once

#include "quantised_codes.h"
#include "quantised_rows.h"

namespace {

#if defined(__AVX2__)
constexpr int kRows = 4;  // beside 16 vectors of integer sums, as many of totals: all registers of AVX512
#else
constexpr int kRows = 2;
#endif
constexpr int64_t kLine = 64;

// Fetch a line that is read some time after the one at `at`. Distances and caches are those that were fastest (Zen 4,
// one row): with those of 4 bits a token in 8 bits takes 1.14 of the time, with those of 8 bits one in 4 bits 1.2.
template <class Codes>
INLINE void fetch_ahead(const char* at) {
  if constexpr (Codes::kParts == 1)
    __builtin_prefetch(at + 6144, 0, 2);
  else
    __builtin_prefetch(at + 2048, 0, 3);
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

  // `count` rows, at most kRows, times a panel. kFetch: the panel comes from memory.
  template <bool kFetch>
  void run(const QuantisedRows& rows, int64_t count, const char* panel, PanelSums& sums) const {
    add<kFetch, true>(rows, count, panel, sums);
    if (rows.has_finer()) return add<false, false>(rows.finer(), count, panel, sums);
    for (int64_t row = 0; row < count; ++row) add_outliers(rows.from(row), panel, sums.row[row]);
  }

  // The products of a row's outliers, in ascending order, as if each were a group of one column.
  void add_outliers(const QuantisedRows& row, const char* panel, float* to) const {
    for (int64_t strip = 0; strip < kPanel; strip += kStrip) {
      Floats totals[kVectors];
      for (int v = 0; v < kVectors; ++v) totals[v] = load(to + strip + v * kLanes);
      for (int64_t i = 0; i < row.layout.num_outliers; ++i) add_outlier(row.outliers[i], panel, strip, totals);
      for (int v = 0; v < kVectors; ++v) store(to + strip + v * kLanes, totals[v]);
    }
  }

 private:
  INLINE void add_outlier(const Outlier& outlier, const char* panel, int64_t strip, Floats (&totals)[kVectors]) const {
    const char* const group = panel + outlier.group * layout_.group_bytes();
    const char* const packed = group + (outlier.four / Codes::kParts * kPanel + strip) * 4;
    const char* const scales = group + layout_.code_bytes() + strip * layout_.scale_size();
    const Words element = (Words)broadcast(outlier.codes);
    for (int v = 0; v < kVectors; ++v) {
      const Words weights = codes_.bytes(load_raw<Words>(packed + v * int64_t(sizeof(Words))), outlier.four % Codes::kParts);
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
  template <bool kFetch, bool kFirst>
  void add(const QuantisedRows& rows, int64_t count, const char* panel, PanelSums& sums) const {
    for (int64_t strip = 0; strip < kPanel; strip += kStrip) {
      if (count == 1) multiply<1, kFetch, kFirst>(rows, panel, strip, sums);
      if (count == 2) multiply<2, kFetch, kFirst>(rows, panel, strip, sums);
      if constexpr (kRows >= 4) {
        if (count == 3) multiply<3, kFetch, kFirst>(rows, panel, strip, sums);
        if (count == 4) multiply<4, kFetch, kFirst>(rows, panel, strip, sums);
      }
    }
  }

  template <int kCount, bool kFetch, bool kFirst>
  void multiply(const QuantisedRows& rows, const char* panel, int64_t strip, PanelSums& to) const {
    const int8_t* x = rows.codes;
    Floats totals[kCount][kVectors];
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kVectors; ++v) totals[r][v] = kFirst ? Floats{} : load(&to.row[r][strip + v * kLanes]);
    for (int64_t g = 0; g < layout_.groups; ++g, panel += layout_.group_bytes(), x += layout_.group) {
      Ints sums[kCount][kVectors];
      for (int r = 0; r < kCount; ++r) {
        const Ints start = broadcast(rows.groups[r * layout_.groups + g].sum * taken_);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = start;
      }
      add_products<kCount, kFetch>(x, panel + 4 * strip, sums);
      add_group<kCount>(rows.groups + g, panel + layout_.code_bytes() + strip * layout_.scale_size(), sums, totals);
    }
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kVectors; ++v) store(&to.row[r][strip + v * kLanes], totals[r][v]);
  }

  template <int kCount, bool kFetch>
  INLINE void add_products(const int8_t* x, const char* packed, Ints (&sums)[kCount][kVectors]) const {
    for (int64_t i = 0; i < layout_.group; i += 4 * Codes::kParts, packed += 4 * kPanel) {
      if (kFetch)
        for (int64_t at = 0; at < 4 * kStrip; at += kLine) fetch_ahead<Codes>(packed + at);
#pragma GCC unroll 2
      for (int part = 0; part < Codes::kParts; ++part) {
        Words weights[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          weights[v] = codes_.bytes(load_raw<Words>(packed + v * int64_t(sizeof(Words))), part);
#pragma GCC unroll 4
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
