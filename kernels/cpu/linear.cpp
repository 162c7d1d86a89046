// The product of rows with a packed matrix: out [rows, n] = x [rows, k] times weight [n, k] transposed, plus bias.
//
// A matrix is packed in panels of kPanel columns of the result: panel [k / depth][kPanel][depth], zeros where the
// matrix ends. Every element of the result is one chain of fused multiply-adds in the order of k, whatever rows
// stand beside it: its bits do not depend on the batch. Where the CPU multiplies pairs of bf16, a link of the
// chain is a pair, and depth is 2.
//
// The loop order keeps a panel in the second-level cache while the rows pass by in blocks of up to kRows, whose
// sums stay in registers. With few rows the next panel is fetched from memory meanwhile.

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 4, kRows = 6;  // 24 of 32 registers are sums
#elif defined(__AVX2__)
constexpr int kVectors = 2, kRows = 6;  // 12 of 16
#else
constexpr int kVectors = 2, kRows = 4;
#endif
constexpr int kPanel = kVectors * kLanes;
constexpr int64_t kRowChunk = 384;         // rows of one work item
constexpr int64_t kStreamed = 64;          // up to so many rows the matrix comes from memory, not the rows
constexpr int64_t kLead = 2048;            // bytes that the reading of a matrix for one block of rows runs ahead
constexpr int64_t kParallelWork = 1 << 18;  // multiply-adds below which one thread is faster

// One link of the chain: `depth` elements of a row times as many of each column.
template <class T>
struct Link {
  static constexpr int64_t depth = 1;
  using Factor = Floats;
  static INLINE Factor columns(const T* panel) { return load(panel); }
  static INLINE Factor element(const T* x, int64_t) { return broadcast(*x); }
  static INLINE Floats add(Floats sum, Factor x, Factor w) { return fma(x, w, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Link<bf16> {
  static constexpr int64_t depth = 2;
  using Factor = __m512bh;
  static INLINE Factor columns(const bf16* panel) { return load_raw<__m512bh>(panel); }
  static INLINE Factor element(const bf16* x, int64_t left) {
    uint32_t pair = x[0].bits;
    if (left > 1) std::memcpy(&pair, x, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(int(pair));
  }
  static INLINE Floats add(Floats sum, Factor x, Factor w) { return (Floats)_mm512_dpbf16_ps((__m512)sum, x, w); }
};
#endif

template <class T>
int64_t panel_elements(int64_t k) {
  constexpr int64_t depth = Link<T>::depth;
  return (k + depth - 1) / depth * depth * kPanel;
}

template <class T>
void pack(const T* weight, T* packed, int64_t n, int64_t k, int64_t row_stride, int num_threads) {
  constexpr int64_t depth = Link<T>::depth;
  parallel_for((n + kPanel - 1) / kPanel, num_threads, [&](int64_t p) {
    const T* from = weight + p * kPanel * row_stride;
    T* to = packed + p * panel_elements<T>(k);
    const int64_t columns = std::min<int64_t>(kPanel, n - p * kPanel);
    if (columns < kPanel || k % depth) std::memset(to, 0, size_t(panel_elements<T>(k)) * sizeof(T));
    for (int64_t i = 0; i < k; i += depth, to += kPanel * depth)
      for (int64_t column = 0; column < columns; ++column)
        for (int64_t d = 0; d < std::min(depth, k - i); ++d) to[column * depth + d] = from[column * row_stride + i + d];
  });
}

// One call: a matrix, and the rows it is multiplied with.
template <class T>
struct Product {
  const T* x;
  const T* packed;
  const T* bias;
  T* out;
  int64_t rows, k, n, x_stride;

  // `kBlock` rows from `row` on times one panel. `ahead`: what to fetch meanwhile, a line for every link.
  template <int kBlock, bool kFetch>
  INLINE void block(int64_t row, int64_t p, const char* ahead) const {
    constexpr int64_t depth = Link<T>::depth;
    const T* panel = packed + p * panel_elements<T>(k);
    const T* from = x + row * x_stride;
    Floats sums[kBlock][kVectors] = {};
    const auto link = [&](int64_t i, int64_t left) INLINE_LAMBDA {
      typename Link<T>::Factor columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) columns[v] = Link<T>::columns(panel + i * kPanel + v * kLanes * depth);
#pragma GCC unroll 8
      for (int r = 0; r < kBlock; ++r) {
        const auto element = Link<T>::element(from + r * x_stride + i, left);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Link<T>::add(sums[r][v], element, columns[v]);
      }
    };
    int64_t i = 0;
    for (; i + depth <= k; i += depth) {
      if (kFetch && kBlock == 1) {
#pragma GCC unroll 4
        for (int line = 0; line < kVectors; ++line)
          __builtin_prefetch(reinterpret_cast<const char*>(panel + i * kPanel) + kLead + 64 * line, 0, 3);
      } else if (kFetch) {
        __builtin_prefetch(ahead + i / depth * 64, 0, 2);
      }
      link(i, depth);
    }
    if (i < k) link(i, k - i);
    for (int r = 0; r < kBlock; ++r)
      for (int v = 0; v < kVectors; ++v) keep(sums[r][v], row + r, p * kPanel + v * kLanes);
  }

  INLINE void keep(Floats sum, int64_t row, int64_t column) const {
    if (column >= n) return;
    if (bias) sum = sum + load(bias + column, n - column);
    store(out + row * n + column, sum, n - column);
  }

  template <bool kFetch>
  void chunk(int64_t begin, int64_t end, int64_t p, int64_t next) const {
    const int64_t blocks = (end - begin + kRows - 1) / kRows, size = panel_elements<T>(k);
    const char* ahead = reinterpret_cast<const char*>(packed + next * size);
    for (int64_t b = 0, row = begin; b < blocks; ++b) {
      const int64_t count = (end - row + blocks - b - 1) / (blocks - b);  // as even as can be
      if (count == 1) block<1, kFetch>(row, p, ahead);
      if (count == 2) block<2, kFetch>(row, p, ahead);
      if (count == 3) block<3, kFetch>(row, p, ahead);
      if (count == 4) block<4, kFetch>(row, p, ahead);
      if constexpr (kRows >= 6) {
        if (count == 5) block<5, kFetch>(row, p, ahead);
        if (count == 6) block<6, kFetch>(row, p, ahead);
      }
      row += count;
      ahead += size * int64_t(sizeof(T)) / blocks;
    }
  }

  void run(int num_threads) const {
    const int64_t panels = (n + kPanel - 1) / kPanel, chunks = (rows + kRowChunk - 1) / kRowChunk;
    if (rows * n * k < kParallelWork) num_threads = 1;
    parallel_for(panels * chunks, num_threads, [&](int64_t item) {
      const int64_t p = item % panels, begin = item / panels * kRowChunk;
      // Threads take panels in turn, so the panel after the next is most likely this thread's.
      const int64_t next = std::min(p + num_threads, panels - 1), end = std::min(begin + kRowChunk, rows);
      if (rows <= kStreamed)
        chunk<true>(begin, end, p, next);
      else
        chunk<false>(begin, end, p, next);
    });
  }
};

}  // namespace

// How many elements a packed matrix [n, k] has.
EXPORT int64_t pagewire_packed_size(int64_t n, int64_t k, int32_t dtype) {
  int64_t size = 0;
  dispatch(dtype, [&](auto element) {
    size = (n + kPanel - 1) / kPanel * panel_elements<decltype(element)>(k);
  });
  return size;
}

// weight [n, k], rows row_stride apart.
EXPORT void pagewire_pack(const void* weight, void* packed, int64_t n, int64_t k, int64_t row_stride, int32_t dtype,
                          int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    pack(static_cast<const T*>(weight), static_cast<T*>(packed), n, k, row_stride, num_threads);
  });
}

// x [rows, k], rows x_stride apart; bias [n] or null; out [rows, n], contiguous.
EXPORT void pagewire_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t k,
                            int64_t n, int64_t x_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    Product<T>{static_cast<const T*>(x), static_cast<const T*>(packed), static_cast<const T*>(bias),
               static_cast<T*>(out), rows, k, n, x_stride}
        .run(num_threads);
  });
}
