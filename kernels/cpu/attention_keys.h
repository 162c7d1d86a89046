// Where the keys and values of a KV tile lie, and the memory that a thread works with.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>

#include "attention_plan.h"
#include "codes.h"
#include "layout.h"
#include "nibbles.h"
#include "scratch.h"
#include "tiles.h"

namespace {

// Columns of V that the products compute: whole vectors, or whole matrix tiles.
template <class T>
int64_t values_width(int64_t v_head_dim) {
  return round_up(v_head_dim, kTiled<T> ? 16 : kLanes);
}

// The softmax state of some rows: max logit (times the logarithm of e to base 2), sum of exponentials, weighted sum
// of V. There is room for a multiple of kGranule rows.
struct Partial {
  float* max;
  float* sum;
  float* values;  // [rows, width]

  static constexpr int64_t floats(int64_t rows, int64_t width) { return round_up(rows, kGranule) * (width + 2); }
  static Partial at(float* memory, int64_t rows) {
    rows = round_up(rows, kGranule);
    return {memory, memory + rows, memory + 2 * rows};
  }
};

// What one thread needs to work on one query tile.
struct Workspace {
  float* queries;  // [rows, head_dim], in the form that the products read
  float* row_scales;  // [2, rows], of codes of queries and of probabilities
  float* keys;     // those of K that cannot be read in place
  float* scores;   // [rows, kScoreStride], logits and then probabilities
  float* values;   // [kKvTileKeys, width], V where it cannot be read in place
  char* zeros;     // a granule of keys
  Partial tile, total;
  float* copied;   // [kKvTileKeys, v_head_dim], values that are a part of keys; keys and values that were nibbles

  static int64_t copied_elements(const AttentionCall& call) {
    if (values_in_keys(call)) return call.v_head_dim;
    return call.cache_dtype == kNibbleCache ? call.head_dim + call.v_head_dim : 0;
  }

  static Workspace take(Scratch& scratch, const AttentionCall& call, int64_t rows, int64_t width) {
    const int64_t head_dim = round_up(call.head_dim, 32);
    const int64_t counts[] = {rows * head_dim,
                              2 * rows,
                              head_dim * kKvTileKeys / 2,
                              rows * kScoreStride,
                              kKvTileKeys * width,
                              kGranule * head_dim,
                              Partial::floats(rows, width),
                              Partial::floats(rows, width),
                              kKvTileKeys * copied_elements(call)};
    size_t bytes = 0;
    for (int64_t count : counts) bytes += Scratch::bytes_for<float>(count);
    scratch.reserve(bytes);
    float* at[std::size(counts)];
    for (size_t i = 0; i < std::size(counts); ++i) at[i] = scratch.take<float>(counts[i]);
    std::memset(at[5], 0, size_t(counts[5]) * sizeof(float));
    return {at[0], at[1], at[2], at[3], at[4], reinterpret_cast<char*>(at[5]), Partial::at(at[6], rows),
            Partial::at(at[7], rows), at[8]};
  }
};

// A KV tile: granules of K, zeros where none of [begin, end) is in them; rows of V in [begin, end).
template <class T>
struct KvTile {
  int begin, end;  // keys that some query of the tile sees, counted from the KV tile's first
  const T* k[kKvTileKeys];
  const T* v[kKvTileKeys];
  const char* k_scales[kCoded<T> ? kKvTileKeys : 1];  // as k; codes only
  const char* v_scales[kCoded<T> ? kKvTileKeys : 1];

  void find(const AttentionCall& call, const QueryTile& tile, int64_t number, const void* zeros) {
    const int64_t granule = granule_size(call.block_size);
    see(call, tile, number, zeros);
    if constexpr (kCoded<T>)
      for (auto* scales : {k_scales, v_scales})
        std::fill_n(scales, kKvTileKeys / granule, static_cast<const char*>(zeros));
    for_granules<T>(call, tile, number, [&](int64_t key, const T* keys, const T* values, int64_t row) {
      place(call, key, keys + row * call.head_dim, values + row * call.v_head_dim);  // of keys: see copy_values
      if constexpr (kCoded<T>) {
        k_scales[key / granule] = scale_of(keys, row, call.head_dim, call.block_size);
        v_scales[key / granule] =
            values_in_keys(call) ? k_scales[key / granule] : scale_of(values, row, call.v_head_dim, call.block_size);
      }
    });
  }

  // Values that are a part of keys, copied to where they lie as values do.
  void copy_values(const AttentionCall& call, float* memory) {
    const int64_t granule = granule_size(call.block_size);
    T* const to = reinterpret_cast<T*>(memory);
    for (int64_t key = begin / granule * granule; key < end; key += granule) {
      values_of_keys(k[key / granule], granule, call.v_head_dim, to + key * call.v_head_dim);
      for (int64_t i = key; i < key + granule; i += kPair<T>) v[i / kPair<T>] = to + i * call.v_head_dim;
    }
  }

 protected:
  // What the tile's queries see, and zeros everywhere.
  void see(const AttentionCall& call, const QueryTile& tile, int64_t number, const void* zeros) {
    const int64_t start = number * kKvTileKeys, last_position = tile.first_position + tile.num_tokens - 1;
    begin = int(std::max<int64_t>(0, sight_begin(call, tile.first_position) - start));
    end = int(std::min<int64_t>(kKvTileKeys, sight_end(call, tile.request, last_position) - start));
    std::fill_n(k, kKvTileKeys / granule_size(call.block_size), static_cast<const T*>(zeros));
    std::fill_n(v, kKvTileKeys / kPair<T>, static_cast<const T*>(zeros));
  }

  // Calls visit(key, block of keys, block of values, row) for the first key of each granule in sight: its number in the
  // tile, where the blocks of the tile's head begin, and its row there.
  template <class Stored, class Visit>
  void for_granules(const AttentionCall& call, const QueryTile& tile, int64_t number, const Visit& visit) const {
    const int64_t granule = granule_size(call.block_size);
    const int32_t* blocks = call.block_table + tile.request * call.block_table_stride;
    for (int64_t key = begin / granule * granule; key < end; key += granule) {
      const int64_t position = number * kKvTileKeys + key, block = blocks[position / call.block_size];
      const auto at = [&](const void* cache, int64_t block_stride, int64_t head_stride) {
        return static_cast<const Stored*>(cache) + block * block_stride + tile.kv_head * head_stride;
      };
      visit(key, at(call.k_cache, call.k_block_stride, call.k_head_stride),
            at(call.v_cache, call.v_block_stride, call.v_head_stride), position % call.block_size);
    }
  }

  // A granule's keys and values lie here.
  void place(const AttentionCall& call, int64_t key, const T* keys, const T* values) {
    const int64_t granule = granule_size(call.block_size);
    k[key / granule] = keys;
    for (int64_t i = 0; i < granule; i += kPair<T>) v[(key + i) / kPair<T>] = values + i * call.v_head_dim;
  }
};

// A KV tile whose keys and values are nibbles in the cache. `unpack` brings them where the tile says that they lie.
template <class T>
struct NibbleTile : KvTile<T> {
  const code4 *keys[kKvTileKeys], *values[kKvTileKeys];  // the blocks of each granule in sight
  int64_t rows[kKvTileKeys];                             // and its first row there

  void find(const AttentionCall& call, const QueryTile& tile, int64_t number, const void* zeros) {
    this->see(call, tile, number, zeros);
    const auto take = [&](int64_t key, const code4* k_block, const code4* v_block, int64_t row) {
      const int64_t i = key / granule_size(call.block_size);
      keys[i] = k_block, values[i] = v_block, rows[i] = row;
    };
    this->template for_granules<code4>(call, tile, number, take);
  }

  // memory: [kKvTileKeys, head_dim + v_head_dim]. `next` is fetched meanwhile.
  void unpack(const AttentionCall& call, const NibbleTile& next, float* memory) {
    const int64_t granule = granule_size(call.block_size), k_size = call.head_dim, v_size = call.v_head_dim;
    T *const all_keys = reinterpret_cast<T*>(memory), *const all_values = all_keys + kKvTileKeys * k_size;
    for (int64_t key = this->begin / granule * granule; key < this->end; key += granule) {
      const int64_t i = key / granule, row = rows[i];
      if (next.begin < key + granule && key < next.end) {
        StoredNibbles(next.keys[i], k_size, call.block_size, next.rows[i]).fetch(granule);
        StoredNibbles(next.values[i], v_size, call.block_size, next.rows[i]).fetch(granule);
      }
      T *const to_keys = all_keys + key * k_size, *const to_values = all_values + key * v_size;
      unpack_keys(StoredNibbles(keys[i], k_size, call.block_size, row), granule, to_keys);
      for (int64_t at = 0; at < granule; at += kPair<T>)
        unpack_values(StoredNibbles(values[i], v_size, call.block_size, row + at), to_values + at * v_size);
      this->place(call, key, to_keys, to_values);
    }
  }
};

}  // namespace
