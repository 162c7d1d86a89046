// The product of rows with a quantised weight, as `reference.quantised_linear` defines it.
//
// Rows are quantised first, to signed bytes; all sums within a group are of integers. Groups are added in ascending
// order, each by one fused multiply-add (two where the weight has offsets); then finer codes or outliers. So the bits of an
// element of the result are the same for every instruction set, among any other rows, and however the work is cut.
//
// A work item is a panel, or some small ones, and a chunk of rows. Codes of 4 bits are unpacked in registers for every
// few rows: that takes less time than to read them as bytes from the second-level cache.

#include <algorithm>

#include "kernels.h"
#include "parallel.h"
#include "quantised_pack.h"
#include "quantised_tiles.h"
#include "quantised_vectors.h"
#include "scratch.h"

namespace {

constexpr int64_t kParallelWork = 1 << 19;      // multiply-adds below which one thread is faster
constexpr int64_t kItemWork = 1 << 17;          // multiply-adds of an item
constexpr int64_t kParallelElements = 1 << 15;  // of rows, below which one thread quantises them
constexpr int64_t kRowChunk = 384;

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
  Product(const Integers& form, const Codes& codes, const QuantisedRows& rows, const Output& output, int64_t k)
      : layout_(form, k), zero_(form.zero), codes_(codes), rows_(rows), output_(output) {}

  void run(const char* packed, int num_threads) const {
    const int64_t panels = (output_.n + kPanel - 1) / kPanel, chunks = (output_.count + kRowChunk - 1) / kRowChunk;
    const int64_t panel_work = std::max<int64_t>(1, std::min(kRowChunk, output_.count) * layout_.columns() * kPanel);
    const int64_t group = std::max<int64_t>(1, kItemWork / panel_work), groups = (panels + group - 1) / group;
    if (output_.count * output_.n * layout_.columns() < kParallelWork) num_threads = 1;
    parallel_for(groups * chunks, num_threads, [&](int64_t item) {
      const int64_t first = item % groups * group, last = std::min(first + group, panels);
      const int64_t begin = item / groups * kRowChunk, end = std::min(begin + kRowChunk, output_.count);
      for (int64_t p = first; p < last; ++p) chunk(p, packed + p * layout_.bytes(), begin, end);
    });
  }

 private:
  void chunk(int64_t p, const char* panel, int64_t begin, int64_t end) const {
#if defined(PAGEWIRE_TILES)
    if (end - begin > kRows && is_tiled(layout_)) return tiled_chunk(p, panel, begin, end);
#endif
    PanelSums sums;
    const VectorBlock<Codes> block(layout_, zero_, codes_);
    for_blocks(begin, end, kRows, [&](int64_t row, int64_t count) {
      if (row == begin)
        block.template run<true>(rows_.from(row), count, panel, sums);
      else
        block.template run<false>(rows_.from(row), count, panel, sums);
      output_.keep(sums.row, row, count, p);
    });
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

  const PanelLayout layout_;
  const int32_t zero_;
  const Codes codes_;
  const QuantisedRows rows_;
  const Output output_;
};

template <class Run>
void with_codes(const Integers& form, const Run& run) {
  if (form.bits == 8) return run(ByteCodes{});
  if (form.table) return run(TableCodes(form.table));
  run(NibbleCodes{});
}

// x [rows, k], rows x_stride apart.
QuantisedRows quantised(const RowLayout& layout, const void* x, int64_t rows, int64_t k, int64_t x_stride,
                        int32_t dtype, int num_threads) {
  thread_local Scratch scratch;
  scratch.reserve(QuantisedRows::bytes(layout, rows));
  const QuantisedRows to = QuantisedRows::take(scratch, layout, rows);
  if (rows * k < kParallelElements) num_threads = 1;
  const RowQuantiser quantiser(layout, k);
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads,
                 [&](int64_t row) { quantiser.run(static_cast<const T*>(x) + row * x_stride, to.from(row)); });
  });
  return to;
}

}  // namespace

// How many bytes a packed weight [n, k] has.
EXPORT int64_t pagewire_quantised_size(int64_t n, int64_t k, const Integers* form) {
  return (n + kPanel - 1) / kPanel * PanelLayout(*form, k).bytes();
}

// codes [n, k * bits / 8]; scales, and offsets where the weight has some, [n, groups]; all of them contiguous.
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
  const QuantisedRows codes = quantised(RowLayout(PanelLayout(*form, k)), x, rows, k, x_stride, dtype, num_threads);
  const Output output{bias, out, rows, n, dtype};
  with_codes(*form, [&](const auto& kind) {
    Product<std::decay_t<decltype(kind)>>(*form, kind, codes, output, k).run(static_cast<const char*>(packed), num_threads);
  });
}
