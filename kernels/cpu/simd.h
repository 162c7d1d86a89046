// One vector of float32 lanes, as wide as the instruction set this file is compiled for:
// 16 lanes with AVX-512, 8 with AVX2, 4 with NEON and in portable C++.
//
// Every operation here gives the same bits wherever it is inlined: fused multiply-adds are spelled out and
// the build forbids the compiler to contract others. Batch invariance of the kernels rests on that.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(PAGEWIRE_NEON)  // set by build.py: "portable" has no instructions of its own on ARM either
#include <arm_neon.h>
#endif

namespace {

// kRegisters: vectors that fit in the registers. kFused: whether `fma` rounds once.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
constexpr bool kFused = true;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
constexpr bool kFused = true;
#elif defined(PAGEWIRE_NEON)
constexpr int kLanes = 4, kRegisters = 32;
constexpr bool kFused = true;
#else
constexpr int kLanes = 4, kRegisters = 16;
constexpr bool kFused = false;
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// Calls run with an element of the type that kernels.h numbers so.
template <class Run>
void dispatch(int32_t dtype, const Run& run) {
  if (dtype == 0) run(float{});
  if (dtype == 1) run(bf16{});
  if (dtype == 2) run(f16{});
}

template <class To, class From>
INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Asks for memory to be brought into the second-level cache; any address will do.
INLINE void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

template <class Vector>
INLINE Vector load_raw(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

INLINE Floats broadcast(float x) { return x - Floats{}; }
INLINE Ints broadcast(int32_t x) { return x - Ints{}; }
INLINE Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
INLINE Floats max(Floats a, Floats b) { return select(a > b, a, b); }
INLINE Floats min(Floats a, Floats b) { return select(a < b, a, b); }
INLINE Ints max(Ints a, Ints b) { return a > b ? a : b; }
INLINE Ints min(Ints a, Ints b) { return a < b ? a : b; }

INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(PAGEWIRE_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// ---- conversions ----

INLINE float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // Read with float32's exponent bias, then multiply by 2^112: subnormals come out right as well.
  return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f) | sign);
}

INLINE uint16_t float_to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to 65,536 or beyond
  if (magnitude < 0x38800000)  // subnormal: let float32 addition do the rounding at 2^-24
    return sign | uint16_t(bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u);
  return sign | uint16_t((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000u) >> 13);
}

INLINE Floats load(const float* from) { return load_raw<Floats>(from); }

INLINE Floats load(const bf16* from) {
#if defined(__AVX512F__)
  const Words words = (Words)_mm512_cvtepu16_epi32(load_raw<__m256i>(from));
#elif defined(__AVX2__)
  const Words words = (Words)_mm256_cvtepu16_epi32(load_raw<__m128i>(from));
#else
  const Words words = __builtin_convertvector(load_raw<Halves>(from), Words);
#endif
  return bit_cast<Floats>(words << 16);
}

INLINE Floats load(const f16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_raw<__m256i>(from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(load_raw<__m128i>(from));
#elif defined(PAGEWIRE_NEON)
  return (Floats)vcvt_f32_f16(load_raw<float16x4_t>(from));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(from[i].bits);
  return v;
#endif
}

INLINE Floats broadcast(bf16 x) { return broadcast(bit_cast<float>(uint32_t(x.bits) << 16)); }

INLINE Floats broadcast(f16 x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_set1_epi16(int16_t(x.bits)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_set1_epi16(int16_t(x.bits)));
#elif defined(PAGEWIRE_NEON)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x.bits)));
#else
  return broadcast(half_to_float(x.bits));
#endif
}

INLINE void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }

INLINE void store(bf16* to, Floats v) {
  const Words bits = bit_cast<Words>(v);
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  const Words quiet_nan = Words{} + 0x7fc00000;
  const Halves halves = __builtin_convertvector(((v == v) ? rounded : quiet_nan) >> 16, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

INLINE void store(f16* to, Floats v) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(to, &halves, sizeof(halves));
#elif defined(__AVX2__)
  const __m128i halves = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(to, &halves, sizeof(halves));
#elif defined(PAGEWIRE_NEON)
  const float16x4_t halves = vcvt_f16_f32((float32x4_t)v);
  std::memcpy(to, &halves, sizeof(halves));
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = float_to_half(v[i]);
#endif
}

// The first `count` elements, zeros after them; never reads past the last one.
template <class T>
INLINE Floats load(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, size_t(count) * sizeof(T));
  return load(lanes);
}

template <class T>
INLINE void store(T* to, Floats v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(to, lanes, size_t(count) * sizeof(T));
}

// Two vectors, one after the other.
template <class T>
INLINE void store_pair(T* to, Floats low, Floats high) {
  store(to, low);
  store(to + kLanes, high);
}

// Two numbers in bfloat16 for each lane, where the CPU multiplies them: `add_products` adds both products of a lane to its
// sum, in one instruction, for which subnormal numbers are zeros. `rounded_pairs`: two vectors, one after the other.
#if defined(__AVX512BF16__)
#define PAGEWIRE_PAIRS
typedef __m512bh Pairs;
INLINE Pairs broadcast_pair(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(int(pair)); }
INLINE Pairs rounded_pairs(Floats low, Floats high) { return _mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
INLINE Floats add_products(Floats sum, Pairs a, Pairs b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
#elif defined(PAGEWIRE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAGEWIRE_PAIRS
typedef bfloat16x8_t Pairs;
INLINE Pairs broadcast_pair(uint32_t pair) { return vreinterpretq_bf16_u32(vdupq_n_u32(pair)); }
INLINE Pairs rounded_pairs(Floats low, Floats high) {
  return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}
INLINE Floats add_products(Floats sum, Pairs a, Pairs b) { return (Floats)vbfdotq_f32((float32x4_t)sum, a, b); }
#endif

#if defined(PAGEWIRE_PAIRS)
INLINE void store_pair(bf16* to, Floats low, Floats high) {
  const Pairs both = rounded_pairs(low, high);
  std::memcpy(to, &both, sizeof(both));
}
#endif

// What remains of v after it was kept as a T: where PyTorch stores an intermediate result, so do we.
template <class T>
INLINE Floats rounded_to(Floats v) {
  T lanes[kLanes];
  store(lanes, v);
  return load(lanes);
}

// ---- across lanes ----

INLINE Ints lane_numbers() {
  Ints v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

#if defined(__clang__)
template <class Vector, int... L>
INLINE Vector shuffle(Vector a, Vector b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(a, b, L...);
}
#else
template <class Vector, int... L>
INLINE Vector shuffle(Vector a, Vector b, std::integer_sequence<int, L...>) {
  return __builtin_shuffle(a, b, Ints{L...});
}
#endif

// In lane L what was in lane L ^ S.
template <int S, class Vector, int... L>
INLINE Vector swapped(Vector v, std::integer_sequence<int, L...>) {
  return shuffle(v, v, std::integer_sequence<int, (L ^ S)...>{});
}

// The elements First, First + 2, ... of two vectors, one after the other.
template <int First, int... L>
INLINE Floats every_second(Floats low, Floats high, std::integer_sequence<int, L...>) {
  return shuffle(low, high, std::integer_sequence<int, (2 * L + First)...>{});
}

template <int First>
INLINE Floats every_second(Floats low, Floats high) {
  return every_second<First>(low, high, std::make_integer_sequence<int, kLanes>{});
}

// Two vectors of a square of blocks of D lanes: the second block of the first one and the first block of the second one
// change places.
template <int D, int... L>
INLINE void exchange(Words& a, Words& b, std::integer_sequence<int, L...>) {
  const Words first = shuffle(a, b, std::integer_sequence<int, (L & D ? kLanes + L - D : L)...>{});
  b = shuffle(a, b, std::integer_sequence<int, (L & D ? kLanes + L : L + D)...>{});
  a = first;
}

// Transposes a square of words: ever smaller blocks of it change places.
template <int D = kLanes / 2>
INLINE void transpose(Words (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & D)) exchange<D>(rows[i], rows[i + D], std::make_integer_sequence<int, kLanes>{});
  if constexpr (D > 1) transpose<D / 2>(rows);
}

// op over all lanes: halves of the vector, quarters of the result, and so on.
template <int S = kLanes / 2, class Vector, class Op>
INLINE auto across_lanes(Vector v, const Op& op) {
  v = op(v, swapped<S>(v, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (S > 1)
    return across_lanes<S / 2>(v, op);
  else
    return v[0];
}

template <class Vector>
INLINE auto sum_lanes(Vector v) {
  return across_lanes(v, [](Vector a, Vector b) INLINE_LAMBDA { return a + b; });
}

template <class Vector>
INLINE auto max_lanes(Vector v) {
  return across_lanes(v, [](Vector a, Vector b) INLINE_LAMBDA { return max(a, b); });
}

template <class Vector>
INLINE auto min_lanes(Vector v) {
  return across_lanes(v, [](Vector a, Vector b) INLINE_LAMBDA { return min(a, b); });
}

// ---- exponentials ----

// e^x to about one unit in the last place; 0 below -87.3 (float32's subnormals), at most e^88.3; NaN stays NaN;
// exactly 1 at 0.
INLINE Floats exp(Floats x) {
  const Floats bounded = min(broadcast(88.3f), max(broadcast(-87.3f), x));  // in this order NaN survives
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = fma(bounded, broadcast(1.44269504f), magic);
  const Floats n = shifted - magic;
  const Floats r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), bounded));
  Floats p = broadcast(1.9875691500e-4f);  // Cephes' polynomial for (e^r - 1 - r) / r^2
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const Floats power = bit_cast<Floats>((bit_cast<Words>(shifted) << 23) + 0x3f800000u);
  return select(x < broadcast(-87.3f), Floats{}, p * power);
}

// 2^x to about one unit in the last place, for x <= 126; 0 far below -126; NaN stays NaN.
INLINE Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const Floats bounded = max(broadcast(-160.0f), x);  // in this order NaN survives; 2^-160 is 0
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)bounded, 0);
#else
  const Floats bounded = max(broadcast(-126.0f), x);
  const Floats magic = broadcast(12582912.0f);  // as in exp
  const Floats shifted = bounded + magic, n = shifted - magic;
#endif
  const Floats r = bounded - n;
  Floats p = broadcast(1.326472731e-3f);  // least relative error for 2^r on [-0.5, 0.5] with 1 at 0: 9e-8
  p = fma(p, r, broadcast(9.671512991e-3f));
  p = fma(p, r, broadcast(5.550733581e-2f));
  p = fma(p, r, broadcast(2.402224243e-1f));
  p = fma(p, r, broadcast(6.931470037e-1f));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Floats power = bit_cast<Floats>((bit_cast<Words>(shifted) << 23) + 0x3f800000u);
  return select(x < broadcast(-126.0f), Floats{}, p * power);
#endif
}

INLINE Floats tanh(Floats x) {
  const Floats magnitude = select(x < Floats{}, -x, x);
  const Floats e = exp(-2.0f * magnitude);
  const Floats t = (1.0f - e) / (1.0f + e);
  return select(x < Floats{}, -t, t);
}

INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace
