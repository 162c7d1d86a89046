// Attention's two products by matrix tiles (tiles.h).
//
// A granule of 16 keys, [pair of the head's elements][key][2], is a column of B tiles as it stands. Values,
// [pair of positions][column][2], are B tiles where 32 positions lie together; with blocks of 16 they are copied
// together first. Prompts and decode steps go the same way, whatever the number of rows: with few of them, reading a tile
// takes ten times longer than multiplying it.
//
// Every result is a chain in steps of 32 elements of the head, or of 32 keys counted from position 0: its bits do not
// depend on the rows beside it. Keys that a row does not see have probability 0, and add 0 to its chain.
#pragma once

#include "attention_keys.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "layout.h"
#include "tiles.h"

#if defined(PAGEWIRE_TILES)

#include <algorithm>
#include <cstring>

namespace {

template <class T>
class TiledAttention {
 public:
  TiledAttention(const QueryRows& rows, const Workspace& work)
      : rows_(rows),
        call_(rows.call),
        work_(work),
        depth_(round_up(call_.head_dim, kTileDepth)),
        width_(values_width<T>(call_.v_head_dim)),
        granule_(granule_size(call_.block_size)),
        keys_in_place_(granule_ == kGranule && call_.head_dim == depth_),
        queries_(reinterpret_cast<T*>(work.queries)) {
    for (int64_t row = 0; row < rows.count; ++row) {
      std::memcpy(queries_ + row * depth_, rows.query<T>(row), size_t(call_.head_dim) * sizeof(T));
      std::memset(queries_ + row * depth_ + call_.head_dim, 0, size_t(depth_ - call_.head_dim) * sizeof(T));
    }
  }

  // The partial result of every row for a KV tile. `next` is what comes after it, and is fetched meanwhile.
  void attend(int64_t kv_tile, const KvTile<T>& keys, const KvTile<T>& next, const Partial& result) {
    prepare_keys(keys);
    bool values_ready = false;
    for (int64_t first = 0; first < rows_.count; first += kGroup) {
      const int64_t count = std::min(kGroup, rows_.count - first);
      // Whole steps of keys, without those that no row of the group sees.
      const int begin = int(rows_.visible_begin(kv_tile, first) / kTileDepth * kTileDepth);
      const int end = int(round_up(rows_.visible_end(kv_tile, first + count - 1), kTileDepth));
      if (begin >= end) {
        see_nothing(first, count, result);
        continue;
      }
      configure(count);
      for (int key = begin; key < end; key += int(kTileDepth)) {
        if (!values_ready) fetch_values(keys, key);
        multiply_keys(first, count, key, work_.scores + key);
      }
      Softmax<Probabilities>(rows_, kv_tile, begin, end).run(first, count, work_.scores, result);
      if (!values_ready) prepare_values(keys, next);
      values_ready = true;
      multiply_values(count, begin, end, result.values + first * width_);
    }
    tile_release();
  }

 private:
  static constexpr int64_t kGroup = 2 * kTileRows;  // rows that go through the tiles together
  static constexpr int64_t kScoreBytes = kScoreStride * sizeof(float);  // from a row's scores to the next row's
  static constexpr int64_t kSteps = kKvTileKeys / kTileDepth;          // of keys

  // Probabilities as elements of T, as in eager attention, at the beginning of their row of scores.
  struct Probabilities {
    static INLINE void keep(Floats low, Floats high, float* scores, int key) {
      store_pair(reinterpret_cast<T*>(scores) + key, low, high);
    }
  };

  // Tiles 0 to 3 are sums, 4 and 5 rows of the group, 6 and 7 columns.
  static void configure(int64_t count) {
    const int64_t above = std::min(count, kTileRows), below = count > kTileRows ? count - kTileRows : above;
    TileConfig config;
    for (int tile : {0, 1, 4}) config.set(tile, above);
    for (int tile : {2, 3, 5}) config.set(tile, below);
    for (int tile : {6, 7}) config.set(tile, kTileRows);
    tile_config(config);
  }

  void see_nothing(int64_t first, int64_t count, const Partial& result) const {
    std::fill_n(result.max + first, count, kMinusInfinity);
    std::fill_n(result.sum + first, count, 0.0f);
    std::fill_n(result.values + first * width_, count * width_, 0.0f);
  }

  // ---- keys ----

  // Where each 16 keys lie as [depth / 2][16][2]: in the cache, or copied and filled up with zeros.
  void prepare_keys(const KvTile<T>& keys) {
    for (int key = int(keys.begin / kTileDepth * kTileDepth); key < round_up(keys.end, kTileDepth); key += kGranule) {
      const T*& tiles = key_tiles_[key / kGranule];
      tiles = keys.k[key / granule_];
      if (keys_in_place_) continue;
      T* const copy = reinterpret_cast<T*>(work_.keys) + key * depth_;
      copy_keys(keys.k + key / granule_, copy);
      tiles = copy;
    }
  }

  void copy_keys(const T* const* granules, T* to) const {
    const int64_t pairs = call_.head_dim / 2, row = kGranule * 2;
    std::memset(to + pairs * row, 0, size_t(depth_ / 2 - pairs) * row * sizeof(T));
    for (int64_t first = 0; first < kGranule; first += granule_, ++granules) {
      for (int64_t pair = 0; pair < pairs; ++pair)
        std::memcpy(to + pair * row + first * 2, *granules + pair * granule_ * 2, size_t(granule_ * 2) * sizeof(T));
      for (int64_t i = 0; call_.head_dim % 2 && i < granule_; ++i)  // the last element of a head of odd size
        to[pairs * row + (first + i) * 2] = (*granules)[pairs * granule_ * 2 + i];
    }
  }

  // scores[row][key] = q[row] . k[key] for the rows of a group and 32 keys.
  void multiply_keys(int64_t first, int64_t count, int key, float* scores) const {
    const T* above = queries_ + first * depth_;
    const T* below = above + kTileRows * depth_;
    const T* left = key_tiles_[key / kGranule];
    const T* right = key_tiles_[key / kGranule + 1];
    const int64_t stride = depth_ * int64_t(sizeof(T));
    const bool both = count > kTileRows;
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t i = 0; i < depth_; i += kTileDepth) {
      tile_load<4>(above + i, stride);
      tile_load<6>(left + i * kGranule, kTileBytes);
      tile_multiply_add<T, 0, 4, 6>();
      tile_load<7>(right + i * kGranule, kTileBytes);
      tile_multiply_add<T, 1, 4, 7>();
      if (!both) continue;
      tile_load<5>(below + i, stride);
      tile_multiply_add<T, 2, 5, 6>();
      tile_multiply_add<T, 3, 5, 7>();
    }
    tile_store<0>(scores, kScoreBytes), tile_store<1>(scores + kTileWidth, kScoreBytes);
    if (!both) return;
    scores += kTileRows * kScoreStride;
    tile_store<2>(scores, kScoreBytes), tile_store<3>(scores + kTileWidth, kScoreBytes);
  }

  // ---- values ----

  void fetch_values(const KvTile<T>& keys, int key) const {
    for (int at = key; at < key + kTileDepth; at += 2)
      for (int64_t i = 0; i < 2 * call_.v_head_dim; i += kTileBytes / int64_t(sizeof(T))) fetch(keys.v[at / 2] + i);
  }

  void fetch_keys(const KvTile<T>& next, int key) const {
    for (int at = key; at < key + kTileDepth; at += int(granule_))
      for (int64_t i = 0; i < granule_ * call_.head_dim; i += kTileBytes / int64_t(sizeof(T)))
        fetch(next.k[at / granule_] + i);
  }

  // Where each 32 values lie as [16][width][2]: in the cache, or copied, with zeros for what no row sees: what lies
  // there may be anything, and zero times a NaN is not zero.
  void prepare_values(const KvTile<T>& keys, const KvTile<T>& next) {
    for (int key = int(keys.begin / kTileDepth * kTileDepth); key < keys.end; key += int(kTileDepth)) {
      const T*& tiles = value_tiles_[key / kTileDepth];
      tiles = keys.v[key / 2];
      fetch_keys(next, key);
      if (values_in_place(keys, key)) continue;
      T* const copy = reinterpret_cast<T*>(work_.values) + key * width_;
      for (int i = 0; i < kTileDepth; i += 2) copy_values(keys, key + i, copy + i * width_);
      tiles = copy;
    }
  }

  bool values_in_place(const KvTile<T>& keys, int key) const {
    constexpr int64_t pairs = kGranule / 2;
    return granule_ == kGranule && width_ == call_.v_head_dim && keys.begin <= key && key + kTileDepth <= keys.end &&
           keys.v[key / 2 + pairs] == keys.v[key / 2] + pairs * 2 * call_.v_head_dim;
  }

  void copy_values(const KvTile<T>& keys, int key, T* to) const {
    const T* from = keys.v[key / 2];
    if (width_ == call_.v_head_dim && keys.begin <= key && key + 2 <= keys.end) {
      for (int64_t i = 0; i < 2 * width_; i += 32) std::memcpy(to + i, from + i, 32 * sizeof(T));
      return;
    }
    for (int64_t i = 0; i < 2 * width_; ++i) {
      const bool seen = i / 2 < call_.v_head_dim && keys.begin <= key + i % 2 && key + i % 2 < keys.end;
      to[i] = seen ? from[i] : T{};
    }
  }

  // values[row] = sum of probability[row][key] * v[key] over keys [begin, end), for the rows of a group.
  void multiply_values(int64_t count, int begin, int end, float* values) const {
    const int64_t stride = width_ * int64_t(sizeof(float)), pair_bytes = width_ * 2 * int64_t(sizeof(T));
    const bool both = count > kTileRows;
    for (int64_t column = 0; column < width_; column += 2 * kTileWidth) {
      const bool two = column + 2 * kTileWidth <= width_;
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (int key = begin; key < end; key += int(kTileDepth)) {
        const T* above = reinterpret_cast<const T*>(work_.scores) + key;
        const T* v = value_tiles_[key / kTileDepth] + column * 2;
        tile_load<4>(above, kScoreBytes);
        tile_load<6>(v, pair_bytes);
        tile_multiply_add<T, 0, 4, 6>();
        if (two) tile_load<7>(v + kTileWidth * 2, pair_bytes), tile_multiply_add<T, 1, 4, 7>();
        if (!both) continue;
        tile_load<5>(reinterpret_cast<const char*>(above) + kTileRows * kScoreBytes, kScoreBytes);
        tile_multiply_add<T, 2, 5, 6>();
        if (two) tile_multiply_add<T, 3, 5, 7>();
      }
      float* const to = values + column;
      tile_store<0>(to, stride);
      if (two) tile_store<1>(to + kTileWidth, stride);
      if (!both) continue;
      tile_store<2>(to + kTileRows * width_, stride);
      if (two) tile_store<3>(to + kTileRows * width_ + kTileWidth, stride);
    }
  }

  const QueryRows& rows_;
  const AttentionCall& call_;
  const Workspace& work_;
  const int64_t depth_, width_, granule_;  // depth_: of a head, whole tiles
  const bool keys_in_place_;
  T* const queries_;  // [rows, depth_]
  const T* key_tiles_[kKvTileKeys / kGranule];
  const T* value_tiles_[kSteps];
};

}  // namespace

#endif
