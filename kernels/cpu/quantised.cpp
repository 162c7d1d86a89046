// The product of rows with a quantised weight, as `reference/quantised.py` defines it.
//
// Rows are quantised first, to signed bytes; all sums within a group are of integers. Groups are added in ascending
// order, each by one fused multiply-add (two where the weight has offsets); then finer codes or outliers. So the bits of an
// element of the result are the same for every instruction set, among any other rows, and however the work is cut.
//
// A work item is some panels of one matrix (batch.h), and a chunk of its rows. Codes of 6 and 4 bits are unpacked in
// registers for every few rows: that takes less time than to read them as bytes from the second-level cache.

#include <algorithm>
#include <variant>

#include "batch.h"
#include "kernels.h"
#include "parallel.h"
#include "quantised_pack.h"
#include "quantised_tiles.h"
#include "quantised_vectors.h"
#include "scratch.h"

namespace {

constexpr int64_t kParallelWork = 1 << 19;      // multiply-adds below which one thread is faster
constexpr int64_t kItemWork = 1 << 17;          // multiply-adds of an item, at least
constexpr int64_t kParallelElements = 1 << 15;  // of rows, below which one thread quantises them
constexpr int64_t kRowChunk = 384;
constexpr int64_t kUnfetched = 4;  // rows up to which no panel is fetched

struct Output {
  const void* bias;  // [n] or null
  void* out;         // [count, n]
  int64_t count, n;
  int32_t dtype;

  // The sums [rows][kPanel] of some rows for panel p.
  void keep(const float (*sums)[kPanel], int64_t row, int64_t rows, int64_t p) const {
    dispatch(dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t first = p * kPanel;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < std::min(kPanel, n - first); i += kLanes) {
          const int64_t left = n - first - i;
          Floats sum = load(&sums[r][i]);
          if (bias) sum = sum + load(static_cast<const T*>(bias) + first + i, left);
          store(static_cast<T*>(out) + (row + r) * n + first + i, sum, left);
        }
    });
  }
};

template <class Codes>
class Product {
 public:
  Product(const Integers& form, const Codes& codes, const QuantisedRows& rows, const Output& output, const Matrix& matrix,
          int num_threads)
      : layout_(form, matrix.k),
        zero_(form.zero),
        codes_(codes),
        rows_(rows),
        output_(output),
        packed_(static_cast<const char*>(matrix.packed)),
        panels_((output.n + kPanel - 1) / kPanel),
        group_(panels_of_item(panels_, std::min(kRowChunk, output.count) * layout_.columns() * kPanel, kItemWork,
                              output.count, num_threads)),
        groups_((panels_ + group_ - 1) / group_) {}

  int64_t items() const { return groups_ * ((output_.count + kRowChunk - 1) / kRowChunk); }
  int64_t work() const { return output_.count * output_.n * layout_.columns(); }

  const char* first_panel(int64_t item) const { return packed_ + item % groups_ * group_ * layout_.bytes(); }

  // `after`: the panel that this thread most likely takes next.
  void run(int64_t item, const char* after) const {
    const int64_t first = item % groups_ * group_, last = std::min(first + group_, panels_);
    const int64_t begin = item / groups_ * kRowChunk, end = std::min(begin + kRowChunk, output_.count);
    for (int64_t p = first; p < last; ++p) {
      const char* const panel = packed_ + p * layout_.bytes();
      chunk(p, panel, p + 1 < last ? panel + layout_.bytes() : after, begin, end);
    }
  }

 private:
  // `next`: the panel after this one.
  void chunk(int64_t p, const char* panel, const char* next, int64_t begin, int64_t end) const {
#if defined(PAGEWIRE_TILES)
    if (end - begin > kRows && is_tiled(layout_)) return tiled_chunk(p, panel, begin, end);
#endif
    PanelSums sums;
    const VectorBlock<Codes> block(layout_, zero_, codes_);
    const char* const fetched = next + layout_.bytes();
    Fetch fetch = fetch_for(end - begin);
    for_blocks(begin, end, kRows, [&](int64_t row, int64_t count) {
      next = block.run(fetch, rows_.from(row), count, panel, next, sums);
      if (next >= fetched) fetch = Fetch::nothing;
      output_.keep(sums.row, row, count, p);
    });
  }

  // A few rows read a panel as fast as memory gives it, and the processor fetches ahead by itself. More rows leave time to
  // fetch the next panel as a whole.
  static Fetch fetch_for(int64_t rows) {
    if (rows <= kUnfetched) return Fetch::nothing;
    return rows <= kRows ? Fetch::next : Fetch::next_slowly;
  }

#if defined(PAGEWIRE_TILES)
  void tiled_chunk(int64_t p, const char* panel, int64_t begin, int64_t end) const {
    thread_local Scratch scratch;
    const char* bytes = panel;
    int64_t group_stride = layout_.group_bytes();
    if (Codes::kParts > 1) {
      scratch.reserve(Scratch::bytes_for<char>(layout_.columns() * kPanel));
      char* const unpacked = scratch.take<char>(layout_.columns() * kPanel);
      unpack_codes(layout_, codes_, panel, unpacked);
      bytes = unpacked;
      group_stride = layout_.group * kPanel;
    }
    TiledSums sums;
    const TiledBlock block(layout_, zero_);
    const VectorBlock<Codes> vectors(layout_, zero_, codes_);
    for_blocks(begin, end, kTiledRows, [&](int64_t row, int64_t count) {
      const QuantisedRows rows = rows_.from(row);
      std::memset(sums.row, 0, size_t(count) * sizeof(sums.row[0]));
      block.add(rows, count, panel, bytes, group_stride, sums);
      if (rows.has_finer()) block.add(rows.finer(), count, panel, bytes, group_stride, sums);
      for (int64_t r = 0; r < count; ++r) vectors.add_outliers(rows.from(r), panel, sums.row[r]);
      output_.keep(sums.row, row, count, p);
    });
  }
#endif

  // Calls run(row, count) for blocks of nearly equal size, of at most `most` rows.
  template <class Run>
  static INLINE void for_blocks(int64_t begin, int64_t end, int64_t most, const Run& run) {
    const int64_t blocks = (end - begin + most - 1) / most;
    for (int64_t b = 0, row = begin; b < blocks; ++b) {
      const int64_t count = (end - row + blocks - b - 1) / (blocks - b);
      run(row, count);
      row += count;
    }
  }

  PanelLayout layout_;
  int32_t zero_;
  Codes codes_;
  QuantisedRows rows_;
  Output output_;
  const char* packed_;
  int64_t panels_, group_, groups_;
};

// A product with codes of any kind.
class AnyProduct {
 public:
  template <class Codes>
  explicit AnyProduct(const Product<Codes>& product) : product_(product) {}

  int64_t items() const {
    return std::visit([](const auto& product) { return product.items(); }, product_);
  }
  int64_t work() const {
    return std::visit([](const auto& product) { return product.work(); }, product_);
  }
  const char* first_panel(int64_t item) const {
    return std::visit([&](const auto& product) { return product.first_panel(item); }, product_);
  }
  void run(int64_t item, const char* after) const {
    std::visit([&](const auto& product) { product.run(item, after); }, product_);
  }

 private:
  std::variant<Product<ByteCodes>, Product<SixBitCodes>, Product<NibbleCodes>, Product<TableCodes>> product_;
};

template <class Run>
void with_codes(const Integers& form, const Run& run) {
  if (form.bits == 8) return run(ByteCodes{});
  if (form.bits == 6) return run(SixBitCodes{});
  if (form.table) return run(TableCodes(form.table));
  run(NibbleCodes{});
}

// The rows of a call, quantised as the matrix of each wants them, to memory that lasts until the next call.
class RowCodes {
 public:
  explicit RowCodes(const GroupedCall& call) : call_(call), parts_(call.count) {
    thread_local Scratch scratch;
    size_t bytes = 0;
    for_matrices([&](const Matrix& matrix, int64_t, int64_t count) {
      bytes += QuantisedRows::bytes(layout_of(matrix), count);
    });
    scratch.reserve(bytes);
    for_matrices([&](const Matrix& matrix, int64_t first, int64_t count) {
      parts_.add({matrix.k, first, count, QuantisedRows::take(scratch, layout_of(matrix), count)});
    });
  }

  void quantise() const {
    const int num_threads = parts_.work() < kParallelElements ? 1 : call_.num_threads;
    dispatch(call_.dtype, [&](auto element) {
      using T = decltype(element);
      parallel_for(parts_.items(), num_threads, [&](int64_t item) {
        const auto [part, row] = parts_.find(item);
        const T* const x = static_cast<const T*>(call_.x) + (part.first + row) * call_.x_stride;
        RowQuantiser(part.to.layout, part.k).run(x, part.to.from(row));
      });
    });
  }

  Batch<AnyProduct> products() const {
    Batch<AnyProduct> products(call_.count);
    int64_t part = 0;
    for_matrices([&](const Matrix& matrix, int64_t first, int64_t count) {
      const int64_t size = call_.dtype == 0 ? 4 : 2;
      const Output output{matrix.bias, static_cast<char*>(call_.out) + first * matrix.n * size, count, matrix.n, call_.dtype};
      const QuantisedRows& rows = parts_[part++].to;
      with_codes(*matrix.integers, [&](const auto& kind) {
        products.add(AnyProduct(Product<std::decay_t<decltype(kind)>>(*matrix.integers, kind, rows, output, matrix,
                                                                call_.num_threads)));
      });
    });
    return products;
  }

 private:
  // Rows of one matrix. An item is a row.
  struct Part {
    int64_t k, first, count;
    QuantisedRows to;

    int64_t items() const { return count; }
    int64_t work() const { return count * k; }
  };

  static RowLayout layout_of(const Matrix& matrix) { return RowLayout(PanelLayout(*matrix.integers, matrix.k)); }

  // Calls run(matrix, first row, rows) for all quantised matrices with rows.
  template <class Run>
  void for_matrices(const Run& run) const {
    for (int64_t i = 0; i < call_.count; ++i) {
      const int64_t first = call_.starts[i], count = call_.starts[i + 1] - first;
      if (call_.matrices[i].integers && count) run(call_.matrices[i], first, count);
    }
  }

  const GroupedCall& call_;
  Batch<Part> parts_;
};

}  // namespace

// codes [n, k], of 4 bits [n, k / 2]; scales, and offsets where the weight has some, [n, groups]; all of them contiguous.
EXPORT void pagewire_quantised_pack(const void* codes, const void* scales, const void* offsets, void* packed,
                                    int64_t n, int64_t k, const Integers* form, int32_t num_threads) {
  const PanelLayout layout(*form, k);
  const QuantisedWeight weight{static_cast<const uint8_t*>(codes), static_cast<const char*>(scales),
                               static_cast<const char*>(offsets), n, k};
  parallel_for((n + kPanel - 1) / kPanel, num_threads, [&](int64_t p) {
    weight.pack_panel(layout, p, static_cast<char*>(packed) + p * layout.bytes());
  });
}

// x [rows, k], rows x_stride apart; bias [n] or null; out [rows, n], contiguous.
EXPORT void pagewire_quantised_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows,
                                      int64_t k, int64_t n, int64_t x_stride, const Integers* form, int32_t dtype,
                                      int32_t num_threads) {
  const Matrix matrix{packed, bias, form, n, k, -1};
  const int64_t starts[] = {0, rows};
  const GroupedCall call{&matrix, starts, x, out, 1, x_stride, dtype, num_threads};
  pagewire_quantised_grouped(&call);
}

// The same for the rows of several matrices at once; those that are dense are left out.
EXPORT void pagewire_quantised_grouped(const GroupedCall* call) {
  const RowCodes codes(*call);
  codes.quantise();
  const Batch<AnyProduct> products = codes.products();
  const int num_threads = products.work() < kParallelWork ? 1 : call->num_threads;
  parallel_for(products.items(), num_threads, [&](int64_t item) {
    // Threads take items in turn, so what comes after the others' next ones is most likely this thread's.
    const auto next = products.find(std::min(item + num_threads, products.items() - 1));
    const auto mine = products.find(item);
    mine.product.run(mine.item, next.product.first_panel(next.item));
  });
}
