// A panel of linear.cpp by vectors: each element of the result is a chain of fused multiply-adds. Where the CPU
// multiplies pairs of bf16, a link of the chain is a pair.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear_rows.h"
#include "simd.h"

namespace {

constexpr int kVectors = PAGEWIRE_PANEL / kLanes;
#if defined(__AVX2__) || defined(PAGEWIRE_NEON)
constexpr int kRows = 6;  // with the 4 vectors of AVX-512 and NEON 24 of 32 registers are sums, with AVX2's 2 12 of 16
#else
constexpr int kRows = 4;
#endif

// One link of the chain: `depth` elements of a row times as many of each column.
template <class T>
struct Link {
  static constexpr int64_t depth = 1;
  using Factor = Floats;
  static INLINE Factor columns(const T* panel) { return load(panel); }
  static INLINE Factor element(const T* x, int64_t) { return broadcast(*x); }
  static INLINE Floats add(Floats sum, Factor x, Factor w) { return fma(x, w, sum); }
};

#if defined(PAGEWIRE_PAIRS)
template <>
struct Link<bf16> {
  static constexpr int64_t depth = 2;
  using Factor = Pairs;
  static INLINE Factor columns(const bf16* panel) { return load_raw<Pairs>(panel); }
  static INLINE Factor element(const bf16* x, int64_t left) {
    uint32_t pair = x[0].bits;
    if (left > 1) std::memcpy(&pair, x, sizeof(pair));
    return broadcast_pair(pair);
  }
  static INLINE Floats add(Floats sum, Factor x, Factor w) { return add_products(sum, x, w); }
};
#endif

template <class T>
struct VectorProduct {
  static constexpr int64_t kPanel = PAGEWIRE_PANEL, kDepth = Link<T>::depth;
  static constexpr int64_t kRowChunk = 384;
  static constexpr int64_t kFetched = 64;  // rows, more than a block, up to which the next panel is fetched

  static int64_t panel_elements(int64_t k) { return (k + kDepth - 1) / kDepth * kDepth * kPanel; }
  static int64_t chunk_rows(const Rows<T>&) { return kRowChunk; }

  // Rows [begin, end) times panel p. next: the panel after it, which may be fetched meanwhile.
  static void multiply(const Rows<T>& rows, int64_t begin, int64_t end, int64_t p, const T* panel, const T* next) {
    if (rows.count > kRows && rows.count <= kFetched)
      chunk<true>(rows, begin, end, p, panel, next);
    else
      chunk<false>(rows, begin, end, p, panel, next);
  }

 private:
  template <bool kFetch>
  static void chunk(const Rows<T>& rows, int64_t begin, int64_t end, int64_t p, const T* panel, const T* next) {
    const int64_t blocks = (end - begin + kRows - 1) / kRows;
    const char* ahead = reinterpret_cast<const char*>(next);
    for (int64_t b = 0, row = begin; b < blocks; ++b) {
      const int64_t count = (end - row + blocks - b - 1) / (blocks - b);  // as even as can be
      if (count == 1) block<1, kFetch>(rows, row, p, panel, ahead);
      if (count == 2) block<2, kFetch>(rows, row, p, panel, ahead);
      if (count == 3) block<3, kFetch>(rows, row, p, panel, ahead);
      if (count == 4) block<4, kFetch>(rows, row, p, panel, ahead);
      if constexpr (kRows >= 6) {
        if (count == 5) block<5, kFetch>(rows, row, p, panel, ahead);
        if (count == 6) block<6, kFetch>(rows, row, p, panel, ahead);
      }
      row += count;
      ahead += panel_elements(rows.k) * int64_t(sizeof(T)) / blocks;
    }
  }

  // `kBlock` rows from `row` on. `ahead`: what to fetch meanwhile, a line for every link.
  template <int kBlock, bool kFetch>
  static INLINE void block(const Rows<T>& rows, int64_t row, int64_t p, const T* panel, const char* ahead) {
    const T* from = rows.x + row * rows.x_stride;
    const int64_t k = rows.k;
    Floats sums[kBlock][kVectors] = {};
    const auto link = [&](int64_t i, int64_t left) INLINE_LAMBDA {
      typename Link<T>::Factor columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) columns[v] = Link<T>::columns(panel + i * kPanel + v * kLanes * kDepth);
#pragma GCC unroll 8
      for (int r = 0; r < kBlock; ++r) {
        const auto element = Link<T>::element(from + r * rows.x_stride + i, left);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Link<T>::add(sums[r][v], element, columns[v]);
      }
    };
    int64_t i = 0;
    for (; i + kDepth <= k; i += kDepth) {
      if (kFetch) __builtin_prefetch(ahead + i / kDepth * 64, 0, 2);
      link(i, kDepth);
    }
    if (i < k) link(i, k - i);
    for (int r = 0; r < kBlock; ++r)
      for (int v = 0; v < kVectors; ++v) keep(rows, sums[r][v], row + r, p * kPanel + v * kLanes);
  }

  static INLINE void keep(const Rows<T>& rows, Floats sum, int64_t row, int64_t column) {
    if (column >= rows.n) return;
    const int64_t left = rows.n - column;
    if (rows.bias) sum = sum + load(rows.bias + column, left);
    store(rows.out + row * rows.n + column, sum, left);
  }
};

}  // namespace
