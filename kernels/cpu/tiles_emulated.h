// The functions of tiles.h in plain C++, with the bits of the hardware: so that the tiled kernels can be tested, and
// their results reproduced, on any machine. Included by tiles.h alone.
//
// Source: Intel's instruction set reference (TDPBF16PS, TDPFP16PS, TDPBSUD). For bfloat16 the arithmetic below was compared
// with a CPU's over millions of elements: subnormals, infinities, NaNs, cancellation. Wherever the hardware would
// raise an exception, the process is aborted.
//
// Fused multiply-adds are the C library's, or the compiler's where the instruction set has them.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

struct EmulatedTiles {
  TileConfig config;
  bool configured = false;
  alignas(64) uint8_t data[8][kTileRows][kTileBytes];
};

inline EmulatedTiles& emulated_tiles() {
  thread_local EmulatedTiles tiles;
  return tiles;
}

inline void require_tiles(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "matrix tiles: %s\n", what);
  std::abort();
}

inline int tile_rows(int tile) {
  const EmulatedTiles& tiles = emulated_tiles();
  require_tiles(tiles.configured && tiles.config.rows[tile] > 0, "a tile without a shape is used");
  return tiles.config.rows[tile];
}

inline size_t tile_row_bytes(int tile) { return emulated_tiles().config.row_bytes[tile]; }

inline bool request_tiles() { return true; }

inline void tile_config(const TileConfig& config) {
  require_tiles(config.palette == 1 && config.start_row == 0, "unknown palette");
  for (int tile = 0; tile < 8; ++tile)
    require_tiles(config.rows[tile] <= kTileRows && config.row_bytes[tile] <= kTileBytes &&
                      (config.rows[tile] == 0) == (config.row_bytes[tile] == 0),
                  "a tile of an impossible shape");
  EmulatedTiles& tiles = emulated_tiles();
  tiles.config = config;
  tiles.configured = true;
  std::memset(tiles.data, 0, sizeof(tiles.data));
}

inline void tile_release() { emulated_tiles().configured = false; }

template <int Tile>
void tile_zero() {
  tile_rows(Tile);
  std::memset(emulated_tiles().data[Tile], 0, sizeof(EmulatedTiles::data[Tile]));
}

template <int Tile>
void tile_load(const void* from, int64_t stride) {
  tile_zero<Tile>();
  for (int row = 0; row < tile_rows(Tile); ++row)
    std::memcpy(emulated_tiles().data[Tile][row], static_cast<const char*>(from) + row * stride, tile_row_bytes(Tile));
}

template <int Tile>
void tile_store(void* to, int64_t stride) {
  for (int row = 0; row < tile_rows(Tile); ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles().data[Tile][row], tile_row_bytes(Tile));
}

// ---- arithmetic ----

constexpr float kLeastNormal = 0x1p-126f;

// Subnormal numbers become zeros of their sign.
inline float flushed(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  return bits & 0x7f800000u ? x : bit_cast<float>(bits & 0x80000000u);
}

inline bool is_nan(float x) { return (bit_cast<uint32_t>(x) & 0x7fffffffu) > 0x7f800000u; }
inline float quiet(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) | 0x00400000u); }
inline float default_nan() { return bit_cast<float>(0xffc00000u); }

// A NaN result is the first operand that is a NaN, made quiet, else the default one.
inline float tile_add(float a, float b) {
  a = flushed(a), b = flushed(b);
  if (is_nan(a)) return quiet(a);
  if (is_nan(b)) return quiet(b);
  const float sum = a + b;
  return is_nan(sum) ? default_nan() : flushed(sum);
}

// a * b + c, rounded once. A result is subnormal, and so a zero, if it is one after rounding to 24 bits with an
// exponent that has no end: not quite the same as rounding to float32 first.
inline float exact_multiply_add(float a, float b, float c) {
  a = flushed(a), b = flushed(b), c = flushed(c);
  if (is_nan(a)) return quiet(a);
  if (is_nan(b)) return quiet(b);
  if (is_nan(c)) return quiet(c);
  const float sum = std::fma(a, b, c);
  if (is_nan(sum)) return default_nan();
  if (sum == 0.0f || std::fabs(sum) > kLeastNormal) return sum;
  if (std::fabs(a) > std::fabs(b)) std::swap(a, b);  // both terms are tiny: 2^64 times the smaller factor is finite
  const float scaled = std::fma(a * 0x1p64f, b, c * 0x1p64f);
  return std::fabs(scaled) < kLeastNormal * 0x1p64f ? std::copysign(0.0f, sum) : sum;
}

template <class T>
float tile_element(uint16_t bits) {
  if constexpr (std::is_same_v<T, bf16>) return flushed(bit_cast<float>(uint32_t(bits) << 16));
  return half_to_float(bits);  // subnormal halves are normal numbers of float32
}

// One row of a tile of 16-bit elements, even and odd ones apart.
struct TileRow {
  alignas(64) float half[2][kTileWidth];

  template <class T>
  void read(const uint8_t* from) {
    for (int i = 0; i < kTileWidth; ++i)
      for (int odd = 0; odd < 2; ++odd) {
        uint16_t bits;
        std::memcpy(&bits, from + 4 * i + 2 * odd, sizeof(bits));
        half[odd][i] = tile_element<T>(bits);
      }
  }
};

// The two chains of a row of A with all columns of B, into `chain`. Returns whether every result came out as a zero or
// an ordinary number: only then do these fast steps have the hardware's bits.
inline bool multiply_row(const TileRow& a, const TileRow* b, int depth, TileRow& chain) {
  chain = {};
  int32_t ordinary = 1;
  for (int k = 0; k < depth; ++k)
    for (int odd = 0; odd < 2; ++odd) {
      const float factor = a.half[odd][k];
      float* const sums = chain.half[odd];
      for (int n = 0; n < kTileWidth; ++n) {
        const float sum = std::fma(factor, b[k].half[odd][n], sums[n]);
        const float size = std::fabs(sum);
        ordinary &= int32_t(sum == 0.0f) | (int32_t(size > kLeastNormal) & int32_t(size < INFINITY));
        sums[n] = sum;
      }
    }
  return ordinary;
}

inline void multiply_row_exactly(const TileRow& a, const TileRow* b, int depth, TileRow& chain) {
  chain = {};
  for (int k = 0; k < depth; ++k)
    for (int odd = 0; odd < 2; ++odd)
      for (int n = 0; n < kTileWidth; ++n)
        chain.half[odd][n] = exact_multiply_add(a.half[odd][k], b[k].half[odd][n], chain.half[odd][n]);
}

template <class T, int C, int A, int B>
void tile_multiply_add() {
  static_assert(kTiled<T> && C != A && C != B && A != B, "three tiles, of elements that tiles multiply");
  auto& data = emulated_tiles().data;
  const int depth = tile_rows(B), columns = int(tile_row_bytes(C) / 4);
  require_tiles(tile_rows(C) == tile_rows(A) && tile_row_bytes(C) == tile_row_bytes(B) &&
                    tile_row_bytes(A) == size_t(4 * depth),
                "the shapes of a product disagree");
  TileRow b[kTileRows], a, chain;
  for (int k = 0; k < depth; ++k) b[k].read<T>(data[B][k]);
  for (int row = 0; row < tile_rows(C); ++row) {
    a.read<T>(data[A][row]);
    if (!multiply_row(a, b, depth, chain)) multiply_row_exactly(a, b, depth, chain);
    for (int n = 0; n < columns; ++n) {
      float sum;
      std::memcpy(&sum, &data[C][row][4 * n], sizeof(sum));
      sum = tile_add(sum, tile_add(chain.half[0][n], chain.half[1][n]));
      std::memcpy(&data[C][row][4 * n], &sum, sizeof(sum));
    }
  }
}

template <int C, int A, int B>
void tile_multiply_add_bytes() {
  static_assert(C != A && C != B && A != B, "three tiles");
  auto& data = emulated_tiles().data;
  const int depth = tile_rows(B), columns = int(tile_row_bytes(C) / 4);
  require_tiles(tile_rows(C) == tile_rows(A) && tile_row_bytes(C) == tile_row_bytes(B) &&
                    tile_row_bytes(A) == size_t(4 * depth),
                "the shapes of a product disagree");
  for (int row = 0; row < tile_rows(C); ++row)
    for (int n = 0; n < columns; ++n) {
      int32_t sum;
      std::memcpy(&sum, &data[C][row][4 * n], sizeof(sum));
      for (int k = 0; k < depth; ++k)
        for (int d = 0; d < 4; ++d) sum += int32_t(int8_t(data[A][row][4 * k + d])) * int32_t(data[B][k][4 * n + d]);
      std::memcpy(&data[C][row][4 * n], &sum, sizeof(sum));
    }
}

}  // namespace
