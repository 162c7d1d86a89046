// A panel of a quantised weight by matrix tiles of bytes.
//
// 16 rows of a panel's codes, 256 bytes apart, are four adjacent B tiles as they stand; narrower codes are unpacked to
// bytes first. A group's sums leave the tiles to be scaled, which takes longer than to multiply 64 columns of k. So this
// is for weights without groups and for large ones; vectors multiply the others, and few rows, to the same bits.
#pragma once

#include "quantised_codes.h"
#include "quantised_rows.h"
#include "tiles.h"

#if defined(PAGEWIRE_TILES)

namespace {

constexpr int64_t kTileCodes = 64;  // of k, that one product takes
constexpr int64_t kTiledRows = 2 * kTileRows;
constexpr int64_t kLeastTiledGroup = 128;

inline bool is_tiled(const PanelLayout& layout) { return layout.whole_rows || layout.group >= kLeastTiledGroup; }

// All codes of a panel as bytes [k / 4][column][4].
template <class Codes>
void unpack_codes(const PanelLayout& layout, const Codes& codes, const char* panel, char* to) {
  for (int64_t g = 0; g < layout.groups; ++g, panel += layout.group_bytes())
    for (int64_t at = 0; at < layout.code_bytes(); at += Codes::kPacked * 4 * kPanel, to += Codes::kParts * 4 * kPanel)
      for (int64_t v = 0; v < 4 * kPanel; v += int64_t(sizeof(Words)))
        for (int part = 0; part < Codes::kParts; ++part) {
          const Words bytes = codes.bytes(panel + at + v, part);
          std::memcpy(to + part * 4 * kPanel + v, &bytes, sizeof(bytes));
        }
}

struct alignas(64) TiledSums {
  float row[kTiledRows][kPanel];
};

class TiledBlock {
 public:
  TiledBlock(const PanelLayout& layout, int32_t zero) : layout_(layout), zero_(zero) {}

  // Adds `count` rows, at most kTiledRows, times a panel, whose codes are at `bytes`, `group_stride` from group to group.
  void add(const QuantisedRows& rows, int64_t count, const char* panel, const char* bytes, int64_t group_stride,
           TiledSums& totals) const {
    configure(count);
    const int8_t* x = rows.codes;
    for (int64_t g = 0; g < layout_.groups; ++g, x += layout_.group, bytes += group_stride) {
      Sums sums;
      if (count > kTileRows) {
        multiply_tall(x, bytes, 0, sums);
        multiply_tall(x, bytes, 2, sums);
      } else {
        multiply_flat(x, bytes, sums);
      }
      add_group(rows.groups + g, panel + g * layout_.group_bytes() + layout_.code_bytes(), count, sums, totals);
    }
    tile_release();
  }

 private:
  struct alignas(64) Sums {
    int32_t tile[2][4][kTileRows][kTileWidth];  // [row tile][column tile]
  };

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

  // 17 to 32 rows: 2 x 2 tiles of sums, from column tile `left` on.
  void multiply_tall(const int8_t* x, const char* codes, int left, Sums& sums) const {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    const char* columns = codes + left * kTileBytes;
    for (int64_t i = 0; i < layout_.group; i += kTileCodes, columns += kTileCodes * kPanel) {
      tile_load<4>(x + i, layout_.columns());
      tile_load<6>(columns, 4 * kPanel);
      tile_multiply_add_bytes<0, 4, 6>();
      tile_load<7>(columns + kTileBytes, 4 * kPanel);
      tile_multiply_add_bytes<1, 4, 7>();
      tile_load<5>(x + i + kTileRows * layout_.columns(), layout_.columns());
      tile_multiply_add_bytes<2, 5, 6>();
      tile_multiply_add_bytes<3, 5, 7>();
    }
    tile_store<0>(sums.tile[0][left], kTileBytes), tile_store<1>(sums.tile[0][left + 1], kTileBytes);
    tile_store<2>(sums.tile[1][left], kTileBytes), tile_store<3>(sums.tile[1][left + 1], kTileBytes);
  }

  // 1 to 16 rows: 1 x 4 tiles of sums.
  void multiply_flat(const int8_t* x, const char* columns, Sums& sums) const {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t i = 0; i < layout_.group; i += kTileCodes, columns += kTileCodes * kPanel) {
      tile_load<4>(x + i, layout_.columns());
      tile_load<5>(columns, 4 * kPanel);
      tile_multiply_add_bytes<0, 4, 5>();
      tile_load<6>(columns + kTileBytes, 4 * kPanel);
      tile_multiply_add_bytes<1, 4, 6>();
      tile_load<7>(columns + 2 * kTileBytes, 4 * kPanel);
      tile_multiply_add_bytes<2, 4, 7>();
      tile_load<5>(columns + 3 * kTileBytes, 4 * kPanel);
      tile_multiply_add_bytes<3, 4, 5>();
    }
    auto& tile = sums.tile[0];
    tile_store<0>(tile[0], kTileBytes), tile_store<1>(tile[1], kTileBytes);
    tile_store<2>(tile[2], kTileBytes), tile_store<3>(tile[3], kTileBytes);
  }

  // scales: a group's, and its offsets behind them.
  void add_group(const GroupInput* inputs, const char* scales, int64_t count, const Sums& sums,
                 TiledSums& totals) const {
    for (int64_t i = 0; i < kPanel; i += kLanes) {
      const char* at = scales + i * layout_.scale_size();
      const Floats scale = load_scales(at, layout_.scale_dtype);
      const Floats offset = layout_.offsets ? load_scales(at + layout_.scale_bytes(), layout_.scale_dtype) : Floats{};
      for (int64_t row = 0; row < count; ++row) {
        const GroupInput& input = inputs[row * layout_.groups];
        const int32_t* tile = &sums.tile[row / kTileRows][i / kTileWidth][row % kTileRows][i % kTileWidth];
        const Ints sum = load_raw<Ints>(tile) - broadcast(input.sum * zero_);
        float* const to = &totals.row[row][i];
        Floats total = exact_fma(__builtin_convertvector(sum, Floats), scale * input.scale, load(to));
        if (layout_.offsets) total = exact_fma(broadcast(input.offset), offset, total);
        store(to, total);
      }
    }
  }

  const PanelLayout layout_;
  const int32_t zero_;
};

}  // namespace

#endif
