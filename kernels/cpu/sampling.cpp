// The kernels that look through logits.

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kBlock = 4096;  // elements gone over together before one of them is searched for

struct Found {
  float value;
  int64_t index;
};

template <class T>
INLINE Floats load_or_least(const T* x, int64_t left) {
  if (left >= kLanes) return load(x);
  return select(lane_numbers() < broadcast(int32_t(left)), load(x, left), broadcast(-INFINITY));
}

// x where the low kLanes bits of `bits` are set, -inf elsewhere.
INLINE Floats where_set(uint32_t bits, Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_mov_ps((__m512)broadcast(-INFINITY), __mmask16(bits), (__m512)x);
#else
  const Ints set = (broadcast(int32_t(bits)) & (broadcast(1) << lane_numbers())) != 0;
  return select(set, x, broadcast(-INFINITY));
#endif
}

// Calls see(i, v) for the columns [start, end), kLanes at a time, while it returns true: v is -inf where a column is
// not allowed. Words that allow nothing are passed over, if `skip`. start is a multiple of 32.
template <bool skip, class T, class See>
INLINE void for_allowed(const T* x, const uint32_t* allowed, int64_t start, int64_t end, const See& see) {
  for (int64_t word = start; word < end; word += 32) {
    uint32_t bits = allowed[word / 32];
    if (skip && bits == 0) continue;
    for (int64_t i = word; i < word + 32 && i < end; i += kLanes, bits >>= kLanes)
      if (!see(i, where_set(bits, load_or_least(x + i, end - i)))) return;
  }
}

// The largest of what is allowed of x, and the first place that holds it; NaN if there is one.
template <class T>
Found largest_allowed(const T* x, const uint32_t* allowed, int64_t size) {
  Found best = {-INFINITY, 0};
  Ints nan = {};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = start + kBlock < size ? start + kBlock : size;
    Floats top = broadcast(-INFINITY);
    for_allowed<true>(x, allowed, start, end, [&](int64_t, Floats v) INLINE_LAMBDA {
      nan |= v != v;
      top = max(v, top);
      return true;
    });
    const float value = max_lanes(top);
    if (value > best.value) best = {value, start};
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (nan[lane]) return {NAN, 0};
  if (best.value == -INFINITY) return {-INFINITY, 0};
  int64_t first = -1;
  for_allowed<true>(x, allowed, best.index, size, [&](int64_t i, Floats v) INLINE_LAMBDA {
    if (first < 0 && max_lanes(v) == best.value) first = i;
    return first < 0;
  });
  while (!(allowed[first / 32] >> first % 32 & 1 && load(x + first, 1)[0] == best.value)) ++first;
  return {best.value, first};
}

// The largest of x and the first place that holds it; NaN if there is one.
template <class T>
Found largest(const T* x, int64_t size) {
  Found best = {-INFINITY, 0};
  Ints nan = {};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = start + kBlock < size ? start + kBlock : size;
    Floats top = broadcast(-INFINITY);
    for (int64_t i = start; i < end; i += kLanes) {
      const Floats v = load_or_least(x + i, end - i);
      nan |= v != v;
      top = max(v, top);
    }
    const float value = max_lanes(top);
    if (value > best.value) best = {value, start};
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (nan[lane]) return {NAN, 0};
  // By vectors, then by elements.
  while (best.index < size && max_lanes(load_or_least(x + best.index, size - best.index)) != best.value)
    best.index += kLanes;
  while (best.index < size && load(x + best.index, 1)[0] != best.value) ++best.index;
  return best;
}

// exp(-depth) times 2^44, in operations rounded one by one: the same bits on every device.
INLINE Floats scaled_probability(Floats depth) {
  depth = min(depth, broadcast(32.0f));
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = depth * broadcast(1.44269504f) + magic;
  const Floats n = shifted - magic;
  const Floats r = (n * broadcast(0.693359375f) - depth) + n * broadcast(-2.12194440e-4f);
  Floats p = broadcast(1.9875691500e-4f);  // Cephes' polynomial for (e^r - 1 - r) / r^2
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  p = (p * (r * r) + r) + broadcast(1.0f);
  const Words exponent = uint32_t(127 + 44) - (bit_cast<Words>(shifted) - bit_cast<Words>(magic));
  return p * bit_cast<Floats>(exponent << 23);
}

}  // namespace

// x [rows, size], rows row_stride apart; allowed [rows, ceil(size / 32)] or null; values and ids [rows].
EXPORT void pagewire_largest(const void* x, const uint32_t* allowed, float* values, int64_t* ids, int64_t rows,
                             int64_t size, int64_t row_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads, [&](int64_t row) {
      const T* from = static_cast<const T*>(x) + row * row_stride;
      const Found found =
          allowed ? largest_allowed(from, allowed + row * ((size + 31) / 32), size) : largest(from, size);
      values[row] = found.value;
      ids[row] = found.index;
    });
  });
}

// x [rows, size], rows row_stride apart; allowed [rows, ceil(size / 32)]; out [rows, size].
EXPORT void pagewire_only_allowed(const void* x, const uint32_t* allowed, float* out, int64_t rows, int64_t size,
                                  int64_t row_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads, [&](int64_t row) {
      const T* from = static_cast<const T*>(x) + row * row_stride;
      const uint32_t* bits = allowed + row * ((size + 31) / 32);
      float* to = out + row * size;
      for_allowed<false>(from, bits, 0, size,
                         [&](int64_t i, Floats v) INLINE_LAMBDA {
                           store(to + i, v, size - i);
                           return true;
                         });
    });
  });
}

// depths, masses [size].
EXPORT void pagewire_fixed_point_probabilities(const float* depths, int64_t* masses, int64_t size, int32_t num_threads) {
  parallel_for((size + kBlock - 1) / kBlock, num_threads, [&](int64_t block) {
    const int64_t end = size < (block + 1) * kBlock ? size : (block + 1) * kBlock;
    for (int64_t i = block * kBlock; i < end; i += kLanes) {
      const int64_t left = end - i;
      const Floats p = scaled_probability(left >= kLanes ? load(depths + i) : load(depths + i, left));
      for (int lane = 0; lane < (left < kLanes ? int(left) : kLanes); ++lane) masses[i + lane] = int64_t(p[lane]);
    }
  });
}
