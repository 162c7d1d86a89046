// Codes of 4 bits with a scale and a least element for each group of a head, and the numbers that they stand for.
//
// An element is code * scale + least. The product is exact, since a scale has 8 bits, so the sum is rounded once, with or
// without a fused multiply-add: stored rows mean the same numbers with every instruction set, and to the reference
// (kernels/data/kv_codes.py). Attention brings a KV tile into the order of its own elements, and goes on as with these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "codes.h"
#include "layout.h"
#include "simd.h"

namespace {

constexpr float kLargestNibble = 15.0f;
constexpr int64_t kNibbleGroup = 32;  // elements that share a range; the last group may have fewer

constexpr int64_t nibble_groups(int64_t size) { return (size + kNibbleGroup - 1) / kNibbleGroup; }

// Where some rows of a block lie, which keeps the keys or the values of one head: codes, and behind those of all rows the
// ranges of their groups.
//
// Keys lie in granules, as those of every type do: codes [step][key], the even element in the low half of a byte; ranges
// [group][scale, least][key]. Values lie row by row: in a group, byte i has column i in its low half, and in its high half
// column i of the group's second half; ranges [group][scale, least]. No two positions share a byte, for two threads may
// write them.
template <class Byte>
struct NibbleRows {
  int64_t size, range_bytes;  // of a row: its elements, and the bytes of its ranges
  Byte *codes, *ranges;

  template <class Block>
  NibbleRows(Block* block, int64_t size, int64_t block_size, int64_t row)
      : size(size),
        range_bytes(nibble_groups(size) * 2 * int64_t(sizeof(bf16))),
        codes(&block->pair + row * size / 2),
        ranges(&block->pair + block_size * size / 2 + row * range_bytes) {}

  void fetch(int64_t rows) const {
    for (int64_t at = 0; at < rows * size / 2; at += 64) ::fetch(codes + at);
    for (int64_t at = 0; at < rows * range_bytes; at += 64) ::fetch(ranges + at);
  }
};
using StoredNibbles = NibbleRows<const uint8_t>;

// What codes of a group are made with.
struct CodeRange {
  float scale, least, of_elements;

  template <class T>
  CodeRange(const T* group, int64_t count) {
    const float infinity = std::numeric_limits<float>::infinity();
    Floats low = broadcast(infinity), high = broadcast(-infinity);
    Ints magnitudes = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats v = load(group + i, count - i);
      const Ints is_there = lane_numbers() < int32_t(count - i);
      low = select(is_there, min(low, v), low);
      high = select(is_there, max(high, v), high);
      magnitudes = max(magnitudes, magnitude(v));
    }
    least = rounded_to<bf16>(broadcast(min_lanes(low)))[0];
    scale = rounded_to<bf16>(broadcast((max_lanes(high) - least) / kLargestNibble))[0];
    of_elements = 1.0f / scale;
    if (scale < 1e-30f) scale = of_elements = 0.0f;
    if (!(largest_magnitude(magnitudes) < infinity)) scale = std::numeric_limits<float>::quiet_NaN();
  }
};

// The codes of a group; writes whole vectors.
template <class T>
INLINE void encode_nibbles(const T* group, int64_t count, const CodeRange& range, uint8_t* codes) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints nearest_codes = nearest((load(group + i, count - i) - range.least) * range.of_elements);
    const Bytes bytes = __builtin_convertvector(min(max(nearest_codes, Ints{}), broadcast(15)), Bytes);
    std::memcpy(codes + i, &bytes, sizeof(bytes));
  }
}

// Stores a key or a value as codes, and the ranges of its groups.
template <class T>
void store_nibbles(const T* from, code4* block, int64_t row, int64_t size, int64_t block_size, bool values) {
  const int64_t granule = values ? 1 : granule_size(block_size), within = row % granule;
  const NibbleRows<uint8_t> to(block, size, block_size, row - within);
  uint8_t codes[kNibbleGroup];
  for (int64_t first = 0; first < size; first += kNibbleGroup) {
    const int64_t count = std::min(size - first, kNibbleGroup), half = count / 2;
    const CodeRange range(from + first, count);
    encode_nibbles(from + first, count, range, codes);
    for (int64_t i = 0; i < half; ++i) {
      const uint8_t low = values ? codes[i] : codes[2 * i], high = values ? codes[half + i] : codes[2 * i + 1];
      to.codes[(first / 2 + i) * granule + within] = uint8_t(low | high << 4);
    }
    bf16 scale[kLanes], least[kLanes];
    store(scale, broadcast(range.scale));
    store(least, broadcast(range.least));
    uint8_t* const at = to.ranges + (first / kNibbleGroup * 2 * granule + within) * int64_t(sizeof(bf16));
    std::memcpy(at, scale, sizeof(bf16));
    std::memcpy(at + granule * int64_t(sizeof(bf16)), least, sizeof(bf16));
  }
}

// ---- numbers of codes ----

// The codes in `count` bytes: those in the low halves, and those in the high ones.
struct Nibbles {
  Floats low, high;

  Nibbles(const uint8_t* from, int64_t count) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes bytes = {};
    if (count >= kLanes)
      bytes = load_raw<Bytes>(from);
    else
      std::memcpy(&bytes, from, size_t(count));
#if defined(__AVX512F__)
    const Ints both = (Ints)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    const Ints both = (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&bytes)));
#else
    const Ints both = __builtin_convertvector(bytes, Ints);
#endif
    low = to_floats(both & 15);
    high = to_floats(both >> 4);
  }
};

INLINE bf16 range_at(const uint8_t* ranges, int64_t i) { return load_raw<bf16>(ranges + i * int64_t(sizeof(bf16))); }

// `count` numbers of a range of some keys.
INLINE Floats ranges_at(const uint8_t* ranges, int64_t i, int64_t count) {
  return load(reinterpret_cast<const bf16*>(ranges) + i, count);
}

// Stores elements that lie side by side in layout.h: `second` is not read where they do not lie in pairs.
template <class T>
INLINE void store_elements(T* to, Floats first, Floats second, int64_t count) {
  if constexpr (kPair<T> == 1) {
    store(to, first, count);
  } else {
    T lanes[2][kLanes];
    store(lanes[0], first);
    store(lanes[1], second);
    const Words low = __builtin_convertvector(load_raw<Halves>(lanes[0]), Words);
    const Words high = __builtin_convertvector(load_raw<Halves>(lanes[1]), Words);
    const Words both = low | high << 16;
    if (count >= kLanes)
      std::memcpy(to, &both, sizeof(both));
    else
      std::memcpy(to, &both, size_t(count) * sizeof(uint32_t));
  }
}

// The keys of a granule as layout.h keeps those of T.
template <class T>
void unpack_keys(const StoredNibbles& keys, int64_t granule, T* to) {
  for (int64_t key = 0; key < granule; key += kLanes) {
    const int64_t count = granule - key;
    for (int64_t first = 0; first < keys.size; first += kNibbleGroup) {
      const int64_t at = first / kNibbleGroup * 2 * granule + key;
      const Floats scale = ranges_at(keys.ranges, at, count), least = ranges_at(keys.ranges, at + granule, count);
      const int64_t end = std::min(keys.size, first + kNibbleGroup) / 2;
      for (int64_t step = first / 2; step < end; ++step) {
        const Nibbles both(keys.codes + step * granule + key, count);
        const Floats even = fma(both.low, scale, least), odd = fma(both.high, scale, least);
        store_elements(to + 2 * step * granule + key * kPair<T>, even, odd, count);
        if constexpr (kPair<T> == 1) store(to + (2 * step + 1) * granule + key, odd, count);
      }
    }
  }
}

// The values of kPair<T> positions, from an even one on where these are two, as layout.h keeps those of T.
template <class T>
void unpack_values(const StoredNibbles& values, T* to) {
  constexpr int64_t pair = kPair<T>;
  for (int64_t first = 0; first < values.size; first += kNibbleGroup) {
    const int64_t half = std::min(values.size - first, kNibbleGroup) / 2, group = first / kNibbleGroup;
    for (int64_t i = 0; i < half; i += kLanes) {
      Floats low[pair], high[pair];
      for (int64_t row = 0; row < pair; ++row) {
        const uint8_t* const ranges = values.ranges + row * values.range_bytes;
        const Floats scale = broadcast(range_at(ranges, 2 * group)), least = broadcast(range_at(ranges, 2 * group + 1));
        const Nibbles both(values.codes + (row * values.size + first) / 2 + i, half - i);
        low[row] = fma(both.low, scale, least);
        high[row] = fma(both.high, scale, least);
      }
      store_elements(to + (first + i) * pair, low[0], low[pair - 1], half - i);
      store_elements(to + (first + half + i) * pair, high[0], high[pair - 1], half - i);
    }
  }
}

}  // namespace
