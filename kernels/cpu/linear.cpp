// The product of rows with a matrix: out [rows, n] = x [rows, k] times weight [n, k] transposed, plus bias.
//
// A matrix is packed in panels of columns of the result: [k / kDepth][kPanel][kDepth], with zeros where the matrix
// ends. Every element of the result is one chain of sums in the order of k, whatever rows stand beside it: its bits do
// not depend on the batch. How a chain is made is in linear_vectors.h and linear_tiles.h.
//
// A work item is a panel, or some small ones, and a chunk of rows. The panel stays in the second-level cache while the
// rows pass by in blocks whose sums stay in registers. With few rows, for which memory is the limit, the next panel is
// fetched meanwhile.

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kParallelWork = 1 << 18;  // multiply-adds below which one thread is faster
constexpr int64_t kItemWork = 1 << 16;      // multiply-adds of an item: with less, threads get into each other's way

#if defined(PAGEWIRE_TILES)
template <class T>
using Product = std::conditional_t<kTiled<T>, TiledProduct<T>, VectorProduct<T>>;
#else
template <class T>
using Product = VectorProduct<T>;
#endif

// A weight [n, k], not packed; rows row_stride apart.
template <class T>
struct Weight {
  const T* elements;
  int64_t n, k, row_stride;

  void pack_panel(int64_t p, T* to) const {
    constexpr int64_t panel = Product<T>::kPanel, depth = Product<T>::kDepth;
    const T* from = elements + p * panel * row_stride;
    const int64_t columns = std::min(panel, n - p * panel), size = Product<T>::panel_elements(k);
    if (columns < panel || k * panel < size) std::memset(to, 0, size_t(size) * sizeof(T));
    for (int64_t i = 0; i < k; i += depth, to += panel * depth)
      for (int64_t column = 0; column < columns; ++column)
        for (int64_t d = 0; d < std::min(depth, k - i); ++d) to[column * depth + d] = from[column * row_stride + i + d];
  }
};

template <class T>
int64_t num_panels(int64_t n) {
  return (n + Product<T>::kPanel - 1) / Product<T>::kPanel;
}

template <class T>
void multiply_packed(const Rows<T>& rows, const T* packed, int num_threads) {
  const int64_t panels = num_panels<T>(rows.n), chunk = Product<T>::chunk_rows(rows);
  const int64_t chunks = (rows.count + chunk - 1) / chunk, size = Product<T>::panel_elements(rows.k);
  const int64_t panel_work = std::max<int64_t>(1, std::min(chunk, rows.count) * size);
  const int64_t group = std::max<int64_t>(1, kItemWork / panel_work);
  const int64_t groups = (panels + group - 1) / group;
  if (rows.count * rows.n * rows.k < kParallelWork) num_threads = 1;
  parallel_for(groups * chunks, num_threads, [&](int64_t item) {
    const int64_t first = item % groups * group, last = std::min(first + group, panels);
    const int64_t begin = item / groups * chunk, end = std::min(begin + chunk, rows.count);
    for (int64_t p = first; p < last; ++p) {
      // Threads take items in turn, so what comes after the others' next ones is most likely this thread's.
      const int64_t next = std::min(p + 1 < last ? p + 1 : first + num_threads * group, panels - 1);
      Product<T>::multiply(rows, begin, end, p, packed + p * size, packed + next * size);
    }
  });
}

// Each panel is packed just before it is used, into memory of the thread.
template <class T>
void multiply_unpacked(const Rows<T>& rows, const Weight<T>& weight, int num_threads) {
  const int64_t chunk = Product<T>::chunk_rows(rows), size = Product<T>::panel_elements(rows.k);
  if (rows.count * rows.n * rows.k < kParallelWork) num_threads = 1;
  parallel_for(num_panels<T>(rows.n), num_threads, [&](int64_t p) {
    thread_local Scratch scratch;
    scratch.reserve(Scratch::bytes_for<T>(size));
    T* const panel = scratch.take<T>(size);
    weight.pack_panel(p, panel);
    for (int64_t begin = 0; begin < rows.count; begin += chunk)
      Product<T>::multiply(rows, begin, std::min(begin + chunk, rows.count), p, panel, panel);
  });
}

}  // namespace

// How many elements a packed matrix [n, k] has.
EXPORT int64_t pagewire_packed_size(int64_t n, int64_t k, int32_t dtype) {
  int64_t size = 0;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    size = num_panels<T>(n) * Product<T>::panel_elements(k);
  });
  return size;
}

// weight [n, k], rows row_stride apart.
EXPORT void pagewire_pack(const void* weight, void* packed, int64_t n, int64_t k, int64_t row_stride, int32_t dtype,
                          int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const Weight<T> from{static_cast<const T*>(weight), n, k, row_stride};
    parallel_for(num_panels<T>(n), num_threads, [&](int64_t p) {
      from.pack_panel(p, static_cast<T*>(packed) + p * Product<T>::panel_elements(k));
    });
  });
}

// x [rows, k], rows x_stride apart; bias [n] or null; out [rows, n], contiguous.
EXPORT void pagewire_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t k,
                            int64_t n, int64_t x_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const Rows<T> call{static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out), rows, k, n,
                       x_stride};
    multiply_packed(call, static_cast<const T*>(packed), num_threads);
  });
}

// The same with a weight [n, k] that is not packed, rows weight_stride apart: to the same bits, more slowly.
EXPORT void pagewire_linear_unpacked(const void* x, const void* weight, const void* bias, void* out, int64_t rows,
                                     int64_t k, int64_t n, int64_t x_stride, int64_t weight_stride, int32_t dtype,
                                     int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const Rows<T> call{static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out), rows, k, n,
                       x_stride};
    multiply_unpacked(call, Weight<T>{static_cast<const T*>(weight), n, k, weight_stride}, num_threads);
  });
}
