// A panel of linear.cpp by matrix tiles, 64 columns wide and k rounded up to whole tiles.
//
// 16 rows of a panel, 256 bytes apart, are four adjacent B tiles as they stand: the layout is that of vectors which
// multiply pairs. Every number of rows goes this way. With a single row a product keeps a sixteenth of the unit busy,
// but then memory is the limit: a tile takes ten times longer to arrive than to be multiplied.
//
// An element of the result is a chain over k in steps of 32 from 0 on: ((C0 + step 0) + step 1) + ..., where the bits of a
// step depend on its row and column alone (tiles.h). Between slabs of k a sum is kept in float32, as the tile holds it,
// which changes nothing. So a row's bits are the same whatever rows stand beside it, and wherever it stands.
#pragma once

#include "linear_rows.h"
#include "scratch.h"
#include "tiles.h"

#if defined(PAGEWIRE_TILES)

#include <algorithm>
#include <cstring>

namespace {

template <class T>
class TiledProduct {
 public:
  static constexpr int64_t kPanel = PAGEWIRE_PANEL, kDepth = 2;

  static int64_t panel_elements(int64_t k) { return round_up(k, kTileDepth) * kPanel; }

  // Chunks are of nearly equal size and stay in the second-level cache.
  static int64_t chunk_rows(const Rows<T>& rows) {
    const int64_t most = std::clamp(kChunkBytes / (2 * std::max<int64_t>(1, rows.k)) / kBlock * kBlock, kBlock, kMostRows);
    const int64_t chunks = std::max<int64_t>(1, (rows.count + most - 1) / most);
    return std::max(kBlock, round_up((rows.count + chunks - 1) / chunks, kBlock));
  }

  // Rows [begin, end) times panel p; `next` is fetched meanwhile.
  static void multiply(const Rows<T>& rows, int64_t begin, int64_t end, int64_t p, const T* panel, const T* next) {
    TiledProduct(rows, begin, end, p, reinterpret_cast<const char*>(next)).run(reinterpret_cast<const char*>(panel));
  }

 private:
  // Storing four tiles of sums stops the products for about 180 cycles, the time of 11 products. So slabs are long:
  // shorter ones, which fit the first-level cache, lose more by the stores than they win.
  static constexpr int64_t kSlab = 1024;                                 // elements of k
  static constexpr int64_t kBlock = 2 * kTileRows;                       // rows whose sums are in tiles at a time
  static constexpr int64_t kMostRows = 256, kChunkBytes = 5 << 18;       // of a chunk
  static constexpr int64_t kPairBytes = kPanel * kDepth * sizeof(T);     // of a panel: from a pair of k to the next
  static constexpr int64_t kStepBytes = kTileDepth / 2 * kPairBytes;     // of a panel: a step of k
  static constexpr int64_t kColumnBytes = kTileWidth * 2 * sizeof(T);    // of a panel: from a tile to the next
  static constexpr int64_t kLine = 64;                                   // bytes that are fetched at a time

  // The sums of a block: [half of the columns][row tile][column tile][row][column].
  struct alignas(64) Sums {
    float tile[2][2][2][kTileRows][kTileWidth];
  };

  // Where the rows of a block lie at one step of k.
  struct Step {
    const T* x;
    int64_t stride;  // bytes
  };

  TiledProduct(const Rows<T>& rows, int64_t begin, int64_t end, int64_t p, const char* next)
      : rows_(rows), begin_(begin), p_(p), next_(next), blocks_((end - begin + kBlock - 1) / kBlock),
        last_(end - begin - (blocks_ - 1) * kBlock) {}

  int64_t block_rows(int64_t b) const { return b + 1 < blocks_ ? kBlock : last_; }

  void run(const char* panel) const {
    thread_local Scratch scratch;  // on the heap: what lies in thread_local memory itself was slower by a seventh
    scratch.reserve(Scratch::bytes_for<Sums>(blocks_));
    Sums* const sums = scratch.take<Sums>(blocks_);
    const int64_t slabs = (rows_.k + kSlab - 1) / kSlab;
    const int64_t slab = round_up((rows_.k + slabs - 1) / slabs, kTileDepth);  // of nearly equal size
    int64_t configured = 0;
    for (int64_t start = 0; start < rows_.k; start += slab) {
      const int64_t size = std::min(slab, rows_.k - start), steps = (size + kTileDepth - 1) / kTileDepth;
      const char* from = panel + start / kTileDepth * kStepBytes;
      const char* ahead = start + size < rows_.k ? from + steps * kStepBytes : next_;
      for (int64_t b = 0; b < blocks_; ++b) {
        const int64_t count = block_rows(b);
        if (count != configured) configure(configured = count);
        ahead = count > kTileRows ? tall(b, start, size, from, ahead, sums[b]) : flat(b, start, size, from, ahead, sums[b]);
        if (start + size == rows_.k) keep(sums[b], b);
      }
    }
    tile_release();
  }

  // Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 columns. Up to 16 rows take all columns at once, and tile 5 is
  // one of columns, too.
  static void configure(int64_t count) {
    const int64_t first = std::min(count, kTileRows), second = count > kTileRows ? count - kTileRows : first;
    TileConfig config;
    for (int tile : {0, 1, 4}) config.set(tile, first);
    for (int tile : {2, 3}) config.set(tile, second);
    config.set(5, count > kTileRows ? second : kTileRows);
    for (int tile : {6, 7}) config.set(tile, kTileRows);
    tile_config(config);
  }

  // Calls multiply(step) for each step of [start, start + size). What is left over at the end of k is copied and filled
  // up with zeros: what lies behind a row may be anything, and zero times a NaN is not zero.
  template <class Multiply>
  INLINE void for_steps(int64_t b, int64_t start, int64_t size, const Multiply& multiply) const {
    const T* from = rows_.x + (begin_ + b * kBlock) * rows_.x_stride + start;
    int64_t i = 0;
    for (; i + kTileDepth <= size; i += kTileDepth) multiply(Step{from + i, rows_.x_stride * int64_t(sizeof(T))});
    if (i == size) return;
    alignas(64) T rest[kBlock * kTileDepth] = {};
    for (int64_t row = 0; row < block_rows(b); ++row)
      std::memcpy(rest + row * kTileDepth, from + row * rows_.x_stride + i, size_t(size - i) * sizeof(T));
    multiply(Step{rest, kTileBytes});
  }

  // How many lines to fetch at each of `parts` times that a block goes through a step.
  int64_t lines_ahead(int64_t parts) const {
    parts *= blocks_;
    return (kStepBytes / kLine + parts - 1) / parts;
  }

  // Into the second-level cache: the first has few buffers for lines under way, and they are the bottleneck.
  static INLINE const char* fetch(const char* ahead, int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(ahead + kLine * line, 0, 2);
    return ahead + kLine * lines;
  }

  static INLINE void begin_sums(int64_t start, const float (&a)[kTileRows][kTileWidth],
                                const float (&b)[kTileRows][kTileWidth], const float (&c)[kTileRows][kTileWidth],
                                const float (&d)[kTileRows][kTileWidth]) {
    if (start == 0) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    } else {
      tile_load<0>(a, kTileBytes), tile_load<1>(b, kTileBytes);
      tile_load<2>(c, kTileBytes), tile_load<3>(d, kTileBytes);
    }
  }

  // 17 to 32 rows: 2 x 2 tiles of sums, one half of the columns after the other. Returns what to fetch next.
  const char* tall(int64_t b, int64_t start, int64_t size, const char* panel, const char* ahead, Sums& sums) const {
    const int64_t lines = lines_ahead(2);
    for (int half = 0; half < 2; ++half) {
      auto& sum = sums.tile[half];
      begin_sums(start, sum[0][0], sum[0][1], sum[1][0], sum[1][1]);
      const char* columns = panel + half * 2 * kColumnBytes;
      for_steps(b, start, size, [&](const Step& step) INLINE_LAMBDA {
        tile_load<4>(step.x, step.stride);
        tile_load<6>(columns, kPairBytes);
        tile_multiply_add<T, 0, 4, 6>();
        tile_load<7>(columns + kColumnBytes, kPairBytes);
        tile_multiply_add<T, 1, 4, 7>();
        tile_load<5>(reinterpret_cast<const char*>(step.x) + kTileRows * step.stride, step.stride);
        tile_multiply_add<T, 2, 5, 6>();
        ahead = fetch(ahead, lines);
        tile_multiply_add<T, 3, 5, 7>();
        columns += kStepBytes;
      });
      tile_store<0>(sum[0][0], kTileBytes), tile_store<1>(sum[0][1], kTileBytes);
      tile_store<2>(sum[1][0], kTileBytes), tile_store<3>(sum[1][1], kTileBytes);
    }
    return ahead;
  }

  // 1 to 16 rows: 1 x 4 tiles of sums.
  const char* flat(int64_t b, int64_t start, int64_t size, const char* panel, const char* ahead, Sums& sums) const {
    const int64_t lines = lines_ahead(1);
    auto &left = sums.tile[0][0], &right = sums.tile[1][0];
    begin_sums(start, left[0], left[1], right[0], right[1]);
    const char* columns = panel;
    for_steps(b, start, size, [&](const Step& step) INLINE_LAMBDA {
      tile_load<4>(step.x, step.stride);
      tile_load<5>(columns, kPairBytes);
      tile_multiply_add<T, 0, 4, 5>();
      tile_load<6>(columns + kColumnBytes, kPairBytes);
      tile_multiply_add<T, 1, 4, 6>();
      ahead = fetch(ahead, lines);
      tile_load<7>(columns + 2 * kColumnBytes, kPairBytes);
      tile_multiply_add<T, 2, 4, 7>();
      tile_load<5>(columns + 3 * kColumnBytes, kPairBytes);
      tile_multiply_add<T, 3, 4, 5>();
      columns += kStepBytes;
    });
    tile_store<0>(left[0], kTileBytes), tile_store<1>(left[1], kTileBytes);
    tile_store<2>(right[0], kTileBytes), tile_store<3>(right[1], kTileBytes);
    return ahead;
  }

  // The sums of a block to `out`.
  void keep(const Sums& sums, int64_t b) const {
    for (int64_t row = 0; row < block_rows(b); ++row)
      for (int half = 0; half < 2; ++half) {
        const auto& tiles = sums.tile[half][row / kTileRows];
        const int64_t column = p_ * kPanel + half * 2 * kTileWidth, at = begin_ + b * kBlock + row;
        keep_columns(tiles[0][row % kTileRows], tiles[1][row % kTileRows], at, column);
      }
  }

  // 32 columns of a row, or as many as there are.
  INLINE void keep_columns(const float* low, const float* high, int64_t row, int64_t column) const {
    const int64_t left = rows_.n - column;
    T* const out = rows_.out + row * rows_.n + column;
    const auto with_bias = [&](const float* sums, int64_t i) INLINE_LAMBDA {
      const Floats sum = load(sums + i % kTileWidth);
      return rows_.bias ? sum + load(rows_.bias + column + i, left - i) : sum;
    };
    if (kLanes == kTileWidth && left >= 2 * kTileWidth)
      return store_pair(out, with_bias(low, 0), with_bias(high, kTileWidth));
    for (int64_t i = 0; i < std::min(left, 2 * kTileWidth); i += kLanes)
      store(out + i, with_bias(i < kTileWidth ? low : high, i), left - i);
  }

  const Rows<T>& rows_;
  const int64_t begin_, p_;
  const char* const next_;
  const int64_t blocks_, last_;  // blocks of rows, and the rows of the last one
};

}  // namespace

#endif
