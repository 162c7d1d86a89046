// How a block keeps the keys and the values of one head: in the order in which attention.cpp multiplies them.
//
// Keys lie in granules of consecutive positions, [granule][step][key][kPair]: a vector is one step along the head, of
// many keys. The last element of a head of odd size, [key], ends its granule. Values lie as
// [position / kPair][column][kPair]. bfloat16 goes in pairs, since one instruction multiplies and adds two; so does
// what matrix tiles multiply (tiles.h). So do codes of 8 bits (codes.h); behind the codes of a block's keys or values
// lie their scales, float32 [position]. How codes of 4 bits lie: nibbles.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "codes.h"
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int32_t kNibbleCache = 4;  // AttentionCall::cache_dtype

template <class T>
constexpr bool kCoded = std::is_same_v<T, code8>;

template <class T>
constexpr bool kNibbles = std::is_same_v<T, code4>;

// With nibbles: of any type that attention reads their numbers in.
template <class T>
constexpr int64_t kPair = std::is_same_v<T, bf16> || kTiled<T> || kCoded<T> || kNibbles<T> ? 2 : 1;

// Calls run with an element of the type of a cache: that of the tensors, or codes.
template <class Run>
void dispatch_cache(int32_t dtype, const Run& run) {
  if (dtype == 3) run(code8{});
  if (dtype == kNibbleCache) run(code4{});
  dispatch(dtype, run);
}

constexpr int64_t kGranule = 16;  // a multiple of every kLanes

// Keys in a granule: as many as can be without one lying in two blocks. A power of two.
INLINE int64_t granule_size(int64_t block_size) { return std::min(kGranule, block_size & -block_size); }

// Copies a key [size] to its row of a block.
template <class T>
void store_key(const T* key, T* block, int64_t row, int64_t size, int64_t block_size) {
  const int64_t granule = granule_size(block_size), within = row % granule, whole = size / kPair<T>;
  T* to = block + (row - within) * size;
  for (int64_t step = 0; step < whole; ++step)
    std::memcpy(to + (step * granule + within) * kPair<T>, key + step * kPair<T>, kPair<T> * sizeof(T));
  if (size % kPair<T>) to[(size - 1) * granule + within] = key[size - 1];
}

// Copies the keys [size] of a whole granule, `stride` elements from one to the next.
template <class T>
void store_granule_keys(const T* keys, int64_t stride, T* granule, int64_t size) {
  constexpr int64_t kStep = kPair<T> * sizeof(T);
  const int64_t whole = size / kPair<T>, squares = kStep == sizeof(uint32_t) ? whole / kLanes * kLanes : 0;
  for (int64_t step = 0; step < squares; step += kLanes)
    for (int64_t first = 0; first < kGranule; first += kLanes) {
      Words words[kLanes];
      for (int64_t key = 0; key < kLanes; ++key)
        words[key] = load_raw<Words>(keys + (first + key) * stride + step * kPair<T>);
      transpose(words);
      for (int64_t i = 0; i < kLanes; ++i)
        std::memcpy(granule + ((step + i) * kGranule + first) * kPair<T>, &words[i], sizeof(Words));
    }
  for (int64_t key = 0; key < kGranule; ++key) {
    const T* const from = keys + key * stride;
    for (int64_t step = squares; step < whole; ++step)
      std::memcpy(granule + (step * kGranule + key) * kPair<T>, from + step * kPair<T>, kStep);
    if (size % kPair<T>) granule[(size - 1) * kGranule + key] = from[size - 1];
  }
}

// Copies a value [size] to its row of a block.
template <class T>
void store_value(const T* value, T* block, int64_t row, int64_t size) {
  T* to = block + row / kPair<T> * kPair<T> * size + row % kPair<T>;
  for (int64_t column = 0; column < size; ++column) to[column * kPair<T>] = value[column];
}

// Copies the values [size] of a whole granule, `stride` elements from one to the next.
template <class T>
void store_granule_values(const T* values, int64_t stride, T* granule, int64_t size) {
  if constexpr (kPair<T> == 2 && sizeof(T) == 2) {
    const int64_t squares = size / kLanes * kLanes;
    for (int64_t row = 0; row < kGranule; row += 2) {
      const T *const first = values + row * stride, *const second = first + stride;
      T* const to = granule + row * size;
      for (int64_t column = 0; column < squares; column += kLanes) {
        const Words low = __builtin_convertvector(load_raw<Halves>(first + column), Words);
        const Words high = __builtin_convertvector(load_raw<Halves>(second + column), Words);
        const Words both = low | high << 16;
        std::memcpy(to + column * 2, &both, sizeof(both));
      }
      for (int64_t column = squares; column < size; ++column) {
        to[column * 2] = first[column];
        to[column * 2 + 1] = second[column];
      }
    }
  } else {
    for (int64_t row = 0; row < kGranule; ++row) store_value(values + row * stride, granule, row, size);
  }
}

// Copies the first `columns` elements of a granule's keys, an even number, to rows of values.
template <class T>
void values_of_keys(const T* granule, int64_t keys, int64_t columns, T* values) {
  if constexpr (kPair<T> == 1) {
    for (int64_t column = 0; column < columns; ++column)
      for (int64_t key = 0; key < keys; ++key) values[key * columns + column] = granule[column * keys + key];
  } else {
    // Two elements each of two keys: the inner ones change places.
    using Word = std::conditional_t<sizeof(T) == 2, uint64_t, uint32_t>;
    constexpr int bits = 8 * sizeof(T);
    constexpr Word element = (Word(1) << bits) - 1, outer = element | element << 3 * bits;
    for (int64_t step = 0; step < columns / 2; ++step) {
      Word words[kGranule / 2] = {};
      std::memcpy(words, granule + step * keys * 2, size_t(keys * 2) * sizeof(T));
      for (Word& word : words)
        word = (word & outer) | (word >> bits & element << bits) | (word << bits & element << 2 * bits);
      for (int64_t pair = 0; pair < keys / 2; ++pair)
        std::memcpy(values + (pair * columns + step * 2) * 2, words + pair, sizeof(Word));
    }
  }
}

// Where the scale of a row of a block lies, whose rows have `size` codes.
template <class Block>
INLINE auto scale_of(Block* block, int64_t row, int64_t size, int64_t block_size) {
  using Byte = std::conditional_t<std::is_const_v<Block>, const char, char>;
  return reinterpret_cast<Byte*>(block) + block_size * size + row * kScaleBytes;
}

}  // namespace
