// The product of rows with a matrix: out [rows, n] = x [rows, k] times weight [n, k] transposed, plus bias.
//
// A matrix is packed in panels of columns of the result: [k / kDepth][kPanel][kDepth], with zeros where the matrix
// ends. Every element of the result is one chain of sums in the order of k, whatever rows stand beside it: its bits do
// not depend on the batch. How a chain is made is in linear_vectors.h and linear_tiles.h.
//
// A work item is some panels of one matrix (batch.h), and a chunk of its rows. A panel stays in the second-level cache
// while the rows pass by in blocks whose sums stay in registers. With several blocks, but few, the next panel is fetched
// meanwhile; one block reads a panel just once, as fast as the processor fetches it by itself.

#include <algorithm>
#include <type_traits>

#include "batch.h"
#include "kernels.h"
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kParallelWork = 1 << 18;  // multiply-adds below which one thread is faster
constexpr int64_t kItemWork = 1 << 16;      // multiply-adds of an item, at least

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

// Rows that are multiplied with one packed matrix, cut into work items.
template <class T>
class PackedProduct {
 public:
  PackedProduct(const Rows<T>& rows, const T* packed, int num_threads)
      : rows_(rows),
        packed_(packed),
        panels_(num_panels<T>(rows.n)),
        size_(Product<T>::panel_elements(rows.k)),
        chunk_(Product<T>::chunk_rows(rows)),
        group_(panels_of_item(panels_, std::min(chunk_, rows.count) * size_, kItemWork, rows.count, num_threads)),
        groups_((panels_ + group_ - 1) / group_) {}

  int64_t items() const { return groups_ * ((rows_.count + chunk_ - 1) / chunk_); }
  int64_t work() const { return rows_.count * rows_.n * rows_.k; }
  const T* first_panel(int64_t item) const { return packed_ + item % groups_ * group_ * size_; }

  // `after`: the panel that this thread most likely takes next.
  void run(int64_t item, const T* after) const {
    const int64_t first = item % groups_ * group_, last = std::min(first + group_, panels_);
    const int64_t begin = item / groups_ * chunk_, end = std::min(begin + chunk_, rows_.count);
    for (int64_t p = first; p < last; ++p)
      Product<T>::multiply(rows_, begin, end, p, packed_ + p * size_, p + 1 < last ? packed_ + (p + 1) * size_ : after);
  }

 private:
  Rows<T> rows_;
  const T* packed_;
  int64_t panels_, size_, chunk_, group_, groups_;
};

template <class T>
void multiply_packed(const Batch<PackedProduct<T>>& products, int num_threads) {
  if (products.work() < kParallelWork) num_threads = 1;
  parallel_for(products.items(), num_threads, [&](int64_t item) {
    // Threads take items in turn, so what comes after the others' next ones is most likely this thread's.
    const auto next = products.find(std::min(item + num_threads, products.items() - 1));
    const auto mine = products.find(item);
    mine.product.run(mine.item, next.product.first_panel(next.item));
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
    Batch<PackedProduct<T>> products(1);
    products.add({call, static_cast<const T*>(packed), num_threads});
    multiply_packed(products, num_threads);
  });
}

// The same for the rows of several matrices at once; those that are quantised are left out.
EXPORT void pagewire_linear_grouped(const GroupedCall* call) {
  dispatch(call->dtype, [&](auto element) {
    using T = decltype(element);
    Batch<PackedProduct<T>> products(call->count);
    for (int64_t i = 0; i < call->count; ++i) {
      const Matrix& matrix = call->matrices[i];
      const int64_t first = call->starts[i], rows = call->starts[i + 1] - first;
      if (matrix.integers || !rows) continue;
      products.add({Rows<T>{static_cast<const T*>(call->x) + first * call->x_stride, static_cast<const T*>(matrix.bias),
                            static_cast<T*>(call->out) + first * matrix.n, rows, matrix.k, matrix.n, call->x_stride},
                    static_cast<const T*>(matrix.packed), call->num_threads});
    }
    multiply_packed(products, call->num_threads);
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
