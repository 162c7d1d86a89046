// Numbers to integers with scales, and back, to the bits of kernels/data/integers.py.
//
// A group is read twice: for its extremes, which give its scale, and for its codes. All of it is float32, divided
// and rounded as IEEE 754 says, so the bits are the same for every instruction set. A work item is some rows.

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>

#include "codes.h"
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kItemNumbers = 1 << 15;  // of a work item
constexpr float kFar = 4096.0f;            // beyond all codes, and small enough for `nearest`

// ---- scales and offsets ----

template <class S>
constexpr float kLeastScale = 0x1p-126f;  // the least normal number
template <>
constexpr float kLeastScale<f16> = 0x1p-14f;

template <class S>
constexpr float kLargestScale = std::numeric_limits<float>::max();
template <>
constexpr float kLargestScale<bf16> = 0x1.fep127f;
template <>
constexpr float kLargestScale<f16> = 65504.0f;

INLINE float number(float x) { return x; }
INLINE float number(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
INLINE float number(f16 x) { return half_to_float(x.bits); }

INLINE float number_at(const void* from, int64_t index, int32_t dtype) {
  if (dtype == 2) return number(static_cast<const f16*>(from)[index]);
  if (dtype == 1) return number(static_cast<const bf16*>(from)[index]);
  return static_cast<const float*>(from)[index];
}

INLINE void round_to(float x, float* to) { *to = x; }
INLINE void round_to(float x, f16* to) { to->bits = float_to_half(x); }
INLINE void round_to(float x, bf16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  to->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

// Keeps a number in the dtype of scales; gives what was kept.
template <class S>
INLINE float kept(float x, S* to) {
  round_to(x, to);
  return number(*to);
}

// Never 0 or infinite: a group of zeros has the scale 1.
template <class S>
INLINE float kept_scale(float x, S* to) {
  return kept(x > 0.0f ? std::min(std::max(x, kLeastScale<S>), kLargestScale<S>) : 1.0f, to);
}

// ---- codes: one in a byte, or two of 4 bits, the even column in its low half ----

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <int kBits>
INLINE void store_codes(Ints codes, int64_t count, uint8_t* to) {
  uint8_t bytes[kLanes];
  if constexpr (kBits == 8) {
    const Bytes vector = __builtin_convertvector(codes, Bytes);
    std::memcpy(bytes, &vector, sizeof(vector));
  } else {
    uint64_t pairs[kLanes / 2];  // the even column in the low half
    std::memcpy(pairs, &codes, sizeof(codes));
    for (int i = 0; i < kLanes / 2; ++i) bytes[i] = uint8_t(pairs[i] | pairs[i] >> 28);
  }
  if (count >= kLanes)
    std::memcpy(to, bytes, kLanes * kBits / 8);
  else
    std::memcpy(to, bytes, size_t(count) * kBits / 8);
}

template <int kBits>
INLINE Ints load_codes(const uint8_t* from, int64_t count) {
  uint8_t bytes[kLanes] = {};
  if (count >= kLanes)
    std::memcpy(bytes, from, kLanes * kBits / 8);
  else
    std::memcpy(bytes, from, size_t(count) * kBits / 8);
  if constexpr (kBits == 8) {
    return __builtin_convertvector(load_raw<Bytes>(bytes), Ints);
  } else {
    uint64_t pairs[kLanes / 2];
    for (int i = 0; i < kLanes / 2; ++i) pairs[i] = (bytes[i] & 15) | uint64_t(bytes[i] >> 4) << 32;
    return load_raw<Ints>(pairs);
  }
}

// ---- numbers to integers ----

// The numbers of some rows [n, k] and what becomes of them; S: of scales and offsets.
template <int kBits, class T, class S>
struct Quantiser {  // kBits: that a code takes
  const T* numbers;
  uint8_t* codes;
  S* scales;
  S* offsets;
  int64_t k, group, row_stride;
  int32_t zero, most;  // most: the largest code

  // False if a number of the row is not finite.
  bool run(int64_t row) const {
    const T* const from = numbers + row * row_stride;
    uint8_t* const to = codes + row * k * kBits / 8;
    const int64_t groups = k / group;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = row * groups + g;
      S* const offset = zero ? nullptr : offsets + at;
      if (!quantise(from + g * group, to + g * group * kBits / 8, scales + at, offset)) return false;
    }
    return true;
  }

 private:
  INLINE bool quantise(const T* from, uint8_t* to, S* scale, S* offset) const {
    Floats low = {}, high = {};
    Ints magnitudes = {};
    for (int64_t i = 0; i < group; i += kLanes) {
      const Floats v = load(from + i, group - i);
      low = min(v, low);  // in this order a zero stays positive
      high = max(v, high);
      magnitudes = max(magnitudes, magnitude(v));
    }
    const float reach = largest_magnitude(magnitudes);
    if (!(reach <= std::numeric_limits<float>::max())) return false;
    if (zero) {
      encode(from, to, 0.0f, kept_scale(reach / float(most - zero), scale), 1);
    } else {
      const float least = kept(min_lanes(low), offset);
      encode(from, to, least, kept_scale((max_lanes(high) - least) / float(most), scale), 0);
    }
    return true;
  }

  // The least code of symmetric ones is 1.
  INLINE void encode(const T* from, uint8_t* to, float offset, float scale, int32_t least) const {
    for (int64_t i = 0; i < group; i += kLanes) {
      const Floats steps = (load(from + i, group - i) - offset) / scale;
      const Ints codes = nearest(min(broadcast(kFar), max(broadcast(-kFar), steps))) + zero;
      store_codes<kBits>(min(broadcast(most), max(broadcast(least), codes)), group - i, to + i * kBits / 8);
    }
  }
};

// ---- integers to numbers ----

// What codes stand for, less the zero.
class CodeValues {
 public:
  explicit CodeValues(const Integers& form) : zero_(form.zero), has_table_(form.table) {
    for (int i = 0; has_table_ && i < 16; ++i) table_[i] = float(static_cast<const uint8_t*>(form.table)[i] - zero_);
  }

  INLINE Floats of(Ints codes) const { return has_table_ ? looked_up(codes) : to_floats(codes - zero_); }

 private:
  INLINE Floats looked_up(Ints codes) const {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table_));
#else
    Floats found;
    for (int i = 0; i < kLanes; ++i) found[i] = table_[codes[i]];
    return found;
#endif
  }

  int32_t zero_;
  bool has_table_;
  float table_[16] = {};
};

// A weight [n, k] as kernels/data/integers.py describes it.
struct StoredWeight {
  const uint8_t* codes;
  const void* scales;
  const void* offsets;  // null: there are none
  int64_t k, group;
  int32_t scale_dtype;
  CodeValues values;

  template <int kBits, class T>
  void decode(int64_t row, T* to) const {
    const uint8_t* const from = codes + row * k * kBits / 8;
    const int64_t groups = k / group;
    for (int64_t g = 0; g < groups; ++g) {
      const float scale = number_at(scales, row * groups + g, scale_dtype);
      const float offset = offsets ? number_at(offsets, row * groups + g, scale_dtype) : 0.0f;
      for (int64_t i = g * group, end = i + group; i < end; i += kLanes) {
        Floats numbers = values.of(load_codes<kBits>(from + i * kBits / 8, end - i)) * scale;
        if (offsets) numbers = numbers + offset;
        store(to + i, numbers, end - i);
      }
    }
  }
};

// Calls run(the bits that a code takes).
template <class Run>
void with_bits(int32_t bits, const Run& run) {
  if (bits == 4)
    run(std::integral_constant<int, 4>{});
  else
    run(std::integral_constant<int, 8>{});
}

// Calls run(row) for all rows [n, k].
template <class Run>
void for_rows(int64_t n, int64_t k, int num_threads, const Run& run) {
  const int64_t rows = std::max<int64_t>(1, kItemNumbers / std::max<int64_t>(1, k));
  parallel_for((n + rows - 1) / rows, num_threads, [&](int64_t item) {
    for (int64_t row = item * rows; row < std::min(n, (item + 1) * rows); ++row) run(row);
  });
}

}  // namespace

// numbers [n, k], rows row_stride apart; codes, scales and offsets (where zero is 0) as kernels/data/integers.py has them,
// contiguous. Returns 1 if a number is not finite, else 0.
EXPORT int pagewire_quantise(const void* numbers, uint8_t* codes, void* scales, void* offsets, int64_t n, int64_t k,
                             int64_t row_stride, const Integers* form, int32_t dtype, int32_t num_threads) {
  std::atomic<int> failed{0};
  with_bits(form->bits, [&](auto bits) {
    dispatch(dtype, [&](auto element) {
      dispatch(form->scale_dtype, [&](auto scale) {
        using T = decltype(element);
        using S = decltype(scale);
        const Quantiser<decltype(bits)::value, T, S> quantiser{
            static_cast<const T*>(numbers), codes,      static_cast<S*>(scales), static_cast<S*>(offsets), k,
            form->group ? form->group : k,  row_stride, form->zero, (1 << form->bits) - 1};
        for_rows(n, k, num_threads, [&](int64_t row) {
          if (!quantiser.run(row)) failed.store(1, std::memory_order_relaxed);
        });
      });
    });
  });
  return failed.load();
}

// codes, scales and offsets (or null) as kernels/data/integers.py has them, contiguous; out [n, k], contiguous.
EXPORT void pagewire_dequantise(const uint8_t* codes, const void* scales, const void* offsets, void* out, int64_t n,
                                int64_t k, const Integers* form, int32_t dtype, int32_t num_threads) {
  const int64_t group = form->group ? form->group : k;
  const StoredWeight weight{codes, scales, offsets, k, group, form->scale_dtype, CodeValues(*form)};
  with_bits(form->bits, [&](auto bits) {
    dispatch(dtype, [&](auto element) {
      using T = decltype(element);
      for_rows(n, k, num_threads, [&](int64_t row) {
        weight.decode<decltype(bits)::value>(row, static_cast<T*>(out) + row * k);
      });
    });
  });
}
