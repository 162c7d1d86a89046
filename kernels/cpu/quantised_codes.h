// Codes of weights as unsigned bytes, and their products with signed ones: sums of integers, exact in any order.
#pragma once

#include "quantised_panel.h"

namespace {

// ---- what vectors of packed codes stand for: kPacked of them, 4 * kPanel bytes apart, are kParts vectors of bytes ----

struct ByteCodes {
  static constexpr int kPacked = 1, kParts = 1;
  static constexpr bool kSmall = false;  // two products of values and signed bytes are at most 2^15 - 1
  INLINE Words bytes(const char* packed, int) const { return load_raw<Words>(packed); }
};

struct SixBitCodes {
  static constexpr int kPacked = 3, kParts = 4;
  static constexpr bool kSmall = true;
  INLINE Words bytes(const char* packed, int part) const {
    const auto at = [&](int i) { return load_raw<Words>(packed + i * 4 * kPanel); };
    if (part < 3) return at(part) & 0x3f3f3f3fu;
    return (at(0) >> 6 & 0x03030303u) | (at(1) >> 4 & 0x0c0c0c0cu) | (at(2) >> 2 & 0x30303030u);
  }
};

struct NibbleCodes {
  static constexpr int kPacked = 1, kParts = 2;
  static constexpr bool kSmall = true;
  INLINE Words bytes(const char* packed, int part) const {
    return load_raw<Words>(packed) >> (4 * part) & 0x0f0f0f0fu;
  }
};

// The values of the 16 codes are looked up.
struct TableCodes {
  static constexpr int kPacked = 1, kParts = 2;
  static constexpr bool kSmall = false;

  explicit TableCodes(const void* values) {
    for (int64_t i = 0; i < int64_t(sizeof(Words)); i += 16) std::memcpy(reinterpret_cast<char*>(&table) + i, values, 16);
  }

  INLINE Words bytes(const char* packed, int part) const {
    const Words codes = NibbleCodes{}.bytes(packed, part);
#if defined(__AVX512F__)
    return (Words)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
    return (Words)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(PAGEWIRE_NEON)
    return (Words)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    uint8_t from[sizeof(Words)], values[sizeof(Words)];
    std::memcpy(from, &codes, sizeof(from));
    std::memcpy(values, &table, sizeof(values));
    for (uint8_t& code : from) code = values[code];
    return load_raw<Words>(from);
#endif
  }

  Words table;
};

// ---- products ----

// What `multiply_add` takes from each byte of a weight that is not small: the sum lacks that many times the sum of x.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t kTaken = 0;
#elif defined(__AVX2__) || defined(PAGEWIRE_NEON)
constexpr int32_t kTaken = 128;
#else
constexpr int32_t kTaken = 0;
#endif

// In each lane: sum + the products of four unsigned bytes with four signed ones, which are within +-127.
template <bool kSmall>
INLINE Ints multiply_add(Ints sum, Words weights, Words x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)x);
#elif defined(__AVX512F__)
  __m512i w = (__m512i)weights, signed_x = (__m512i)x;
  if (!kSmall) {
    // Pairs are added in 16 bits. With |w - 128| <= 128 that cannot overflow; its sign goes to x.
    w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
    signed_x = _mm512_mask_sub_epi8(signed_x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), signed_x);
    w = _mm512_abs_epi8(w);
  }
  const __m512i pairs = _mm512_maddubs_epi16(w, signed_x);
  return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  __m256i w = (__m256i)weights, signed_x = (__m256i)x;
  if (!kSmall) {
    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    signed_x = _mm256_sign_epi8(signed_x, w);
    w = _mm256_abs_epi8(w);
  }
  const __m256i pairs = _mm256_maddubs_epi16(w, signed_x);
  return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(PAGEWIRE_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
  return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)weights, (int8x16_t)x);
#elif defined(PAGEWIRE_NEON)
  if (!kSmall) weights ^= 0x80808080u;  // less 128: a signed byte
  const int8x16_t w = (int8x16_t)weights, signed_x = (int8x16_t)x;
#if defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sum, w, signed_x);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(signed_x)), high = vmull_high_s8(w, signed_x);
  return (Ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));  // pairs are at most 2 * 128 * 127: they fit
#endif
#else
  for (int d = 0; d < 4; ++d)
    sum += (Ints)(weights >> (8 * d) & 0xffu) * ((Ints)(x << (24 - 8 * d)) >> 24);
  return sum;
#endif
}

}  // namespace
