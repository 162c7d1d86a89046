// Codes of 8 bits with a scale for a row of them, and their products with codes of 16 bits. Those of 4 bits: nibbles.h.
//
// A row's scale is its largest magnitude over the largest code, so an element is code * scale to within half a scale.
// Products are summed in int32, which is exact: the sums have the same bits in any order and with any instructions.
#pragma once

#include <cstdint>
#include <limits>

#include "simd.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

struct code8 { int8_t value; };
struct code4 { uint8_t pair; };  // two of them

constexpr int64_t kLargestCode = 127;
constexpr int64_t kScaleBytes = sizeof(float);

typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));  // two for each lane

// The nearest integers, ties to even; |v| below 2^22. Not a number becomes any number.
INLINE Ints nearest(Floats v) {
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  return bit_cast<Ints>(v + magic) - bit_cast<Ints>(magic);
}

INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// |v| as an integer of the same order, in which what is not a number is above all numbers.
INLINE Ints magnitude(Floats v) { return bit_cast<Ints>(v) & 0x7fffffff; }

INLINE float largest_magnitude(Ints magnitudes) { return bit_cast<float>(int32_t(max_lanes(magnitudes))); }

// What multiplies codes, and what multiplies elements to give them. Elements so small that the latter would overflow
// become 0. If one is infinite or not a number, all of them become the latter.
struct CodeScale {
  float of_codes, of_elements;

  CodeScale(float largest, float largest_code) : of_codes(largest / largest_code), of_elements(1.0f / of_codes) {
    if (largest < 1e-30f) of_codes = of_elements = 0.0f;
    if (!(largest <= std::numeric_limits<float>::max())) of_codes = std::numeric_limits<float>::quiet_NaN();
  }
};

template <class T>
INLINE CodeScale code_scale(const T* row, int64_t size, float largest_code) {
  Ints magnitudes = {};
  for (int64_t i = 0; i < size; i += kLanes) magnitudes = max(magnitudes, magnitude(load(row + i, size - i)));
  return CodeScale(largest_magnitude(magnitudes), largest_code);
}

// Stores the codes of a row; writes whole vectors.
template <class Code, class T>
INLINE void encode(const T* row, int64_t size, const CodeScale& scale, Code* codes) {
  typedef Code Codes __attribute__((vector_size(kLanes * sizeof(Code))));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Codes vector = __builtin_convertvector(nearest(load(row + i, size - i) * scale.of_elements), Codes);
    std::memcpy(codes + i, &vector, sizeof(vector));
  }
}

// Two codes for each lane.
INLINE Shorts load_codes(const code8* from) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(load_raw<__m256i>(from));
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtepi8_epi16(load_raw<__m128i>(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes * 2)));
  return __builtin_convertvector(load_raw<Bytes>(from), Shorts);
#endif
}

// Adds to each lane the product of its two codes with a pair of codes of 16 bits.
INLINE Ints multiply_add(uint32_t pair, Shorts codes, Ints sum) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(int(pair)), (__m512i)codes);
#elif defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16(_mm512_set1_epi32(int(pair)), (__m512i)codes);
#elif defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16(_mm256_set1_epi32(int(pair)), (__m256i)codes);
#elif defined(__SSE2__)
  return sum + (Ints)_mm_madd_epi16(_mm_set1_epi32(int(pair)), (__m128i)codes);
#else
  const Ints both = bit_cast<Ints>(codes);
  return sum + (both << 16 >> 16) * int32_t(int16_t(pair)) + (both >> 16) * int32_t(int16_t(pair >> 16));
#endif
}

}  // namespace
