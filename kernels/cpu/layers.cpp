// The small kernels around attention: KV write, norms, rotary embedding.
//
// Each row is computed on its own and in one fixed order, so its bits do not depend on the batch. Values are
// rounded to the tensors' type wherever PyTorch would store an intermediate result.

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels.h"
#include "layout.h"
#include "nibbles.h"
#include "parallel.h"
#include "rows.h"
#include "scratch.h"
#include "simd.h"

namespace {

template <class T>
void rms_norm_row(const T* x, const T* weight, T* out, int64_t size, float eps, float offset) {
  Floats squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats v = load(x + i, size - i);
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats v = load(x + i, size - i) * scale;
    const Floats w = load(weight + i, size - i);
    // Llama rounds before it multiplies by the weight; Gemma, whose weights sit around 0, does not.
    v = offset == 0.0f ? rounded_to<T>(v) * w : v * (w + offset);
    store(out + i, v, size - i);
  }
}

// Lanes from `count` on as zeros.
INLINE Floats first_lanes(Floats v, int64_t count) {
  return count >= kLanes ? v : select(lane_numbers() < int32_t(count), v, Floats{});
}

// residual, bias and sum may be null; out may be x, residual or sum, and sum may be residual.
template <class T>
void layer_norm_row(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out, int64_t size,
                    float eps) {
  Floats sums = {}, squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats v = load(x + i, size - i);
    if (residual) v = rounded_to<T>(v + load(residual + i, size - i));
    if (sum) store(sum + i, v, size - i);
    store(out + i, v, size - i);
    sums = sums + v;
  }
  const float mean = sum_lanes(sums) / float(size);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats v = first_lanes(load(out + i, size - i) - mean, size - i);
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats v = (load(out + i, size - i) - mean) * scale;
    store(out + i, fma(v, load(weight + i, size - i), bias ? load(bias + i, size - i) : Floats{}), size - i);
  }
}

template <class T>
void add_row(const T* x, T* residual, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes)
    store(residual + i, load(residual + i, size - i) + load(x + i, size - i), size - i);
}

template <class T>
void store_row(const T* from, T* block, int64_t row, int64_t size, int64_t block_size, bool values) {
  if (values)
    store_value(from, block, row, size);
  else
    store_key(from, block, row, size, block_size);
}

// How far a token's row is into its granule, if all rows of that come from consecutive tokens; -1: they do not.
int64_t place_in_granule(const int64_t* slots, int64_t token, int64_t tokens) {
  const int64_t place = slots[token] % kGranule, first = token - place;
  if (first < 0 || first + kGranule > tokens) return -1;
  for (int64_t i = 0; i < kGranule; ++i)
    if (slots[first + i] != slots[token] - place + i) return -1;
  return place;
}

thread_local Scratch thread_codes, thread_odd;

// Stores a row as codes, and their scale.
template <class T>
void store_codes(const T* from, code8* block, int64_t row, int64_t size, int64_t block_size, bool values) {
  const CodeScale scale = code_scale(from, size, float(kLargestCode));
  const int64_t whole = round_up(size, kLanes);
  thread_codes.reserve(Scratch::bytes_for<int8_t>(whole));
  int8_t* const codes = thread_codes.take<int8_t>(whole);
  encode(from, size, scale, codes);
  store_row(reinterpret_cast<const code8*>(codes), block, row, size, block_size, values);
  std::memcpy(scale_of(block, row, size, block_size), &scale.of_codes, sizeof(float));
}

// x cos + rotate_half(x) sin, every product and the sum rounded to T.
template <class T>
void rotate(T* x, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Floats a = load(x + i, left), b = load(x + half + i, left);
    const Floats low = rounded_to<T>(a * load(cos + i, left)) - rounded_to<T>(b * load(sin + i, left));
    const Floats high =
        rounded_to<T>(b * load(cos + half + i, left)) + rounded_to<T>(a * load(sin + half + i, left));
    store(x + i, low, left);
    store(x + half + i, high, left);
  }
}

}  // namespace

// How many elements of this type lie side by side in a cache: kPair of layout.h. Blocks hold a multiple of it.
EXPORT int pagewire_pair(int32_t dtype) {
  int pair = 1;
  dispatch_cache(dtype, [&](auto element) { pair = int(kPair<decltype(element)>); });
  return pair;
}

// source [tokens, heads, size], keys or `values`; cache [blocks, heads, block_size * size] of the same type, or codes
// with their scales behind, see layout.h.
// Returns 0, or 1 if a slot lies outside the cache (other tokens are still written).
EXPORT int pagewire_store(const void* source, void* cache, const int64_t* slots, int64_t tokens, int64_t heads,
                          int64_t size, int64_t token_stride, int64_t head_stride, int64_t block_stride,
                          int64_t cache_head_stride, int64_t num_blocks, int64_t block_size, int32_t values,
                          int32_t dtype, int32_t cache_dtype, int32_t num_threads) {
  std::atomic<int> outside{0};
  const bool in_granules = cache_dtype == dtype && granule_size(block_size) == kGranule;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(tokens, heads * size, num_threads, [&](int64_t token) {
      const int64_t slot = slots[token], row = slot % block_size;
      if (slot < 0) return;
      if (slot >= num_blocks * block_size) return outside.store(1, std::memory_order_relaxed);
      const int64_t place_in = in_granules ? place_in_granule(slots, token, tokens) : -1;
      if (place_in > 0) return;  // the granule's first row brings it along
      for (int64_t head = 0; head < heads; ++head) {
        const T* from = static_cast<const T*>(source) + token * token_stride + head * head_stride;
        const int64_t place = slot / block_size * block_stride + head * cache_head_stride;
        if (place_in == 0)
          (values ? store_granule_values<T> : store_granule_keys<T>)(from, token_stride,
                                                                static_cast<T*>(cache) + place + row * size, size);
        else if (cache_dtype == dtype)
          store_row(from, static_cast<T*>(cache) + place, row, size, block_size, values);
        else if (cache_dtype == kNibbleCache)
          store_nibbles(from, static_cast<code4*>(cache) + place, row, size, block_size, values);
        else
          store_codes(from, static_cast<code8*>(cache) + place, row, size, block_size, values);
      }
    });
  });
  return outside.load();
}

// x and out [outer, inner, size] with strides; they may be the same.
EXPORT void pagewire_rms_norm(const void* x, const void* weight, void* out, int64_t outer, int64_t inner,
                              int64_t size, int64_t outer_stride, int64_t inner_stride, int64_t out_outer_stride,
                              int64_t out_inner_stride, float eps, float offset, int32_t dtype,
                              int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(outer * inner, size, num_threads, [&](int64_t row) {
      rms_norm_row(static_cast<const T*>(x) + row / inner * outer_stride + row % inner * inner_stride,
                   static_cast<const T*>(weight),
                   static_cast<T*>(out) + row / inner * out_outer_stride + row % inner * out_inner_stride, size, eps,
                   offset);
    });
  });
}

// x, residual, out [rows, size], contiguous.
EXPORT void pagewire_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                                  int64_t size, float eps, float offset, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, size, num_threads, [&](int64_t row) {
      T* sum = static_cast<T*>(residual) + row * size;
      add_row(static_cast<const T*>(x) + row * size, sum, size);
      rms_norm_row(sum, static_cast<const T*>(weight), static_cast<T*>(out) + row * size, size, eps, offset);
    });
  });
}

// x, residual (or null), sum (or null), out [rows, size], contiguous: sum = x + residual, out = its norm. Any of them may
// be the same.
EXPORT void pagewire_layer_norm(const void* x, const void* residual, const void* weight, const void* bias, void* sum,
                                void* out, int64_t rows, int64_t size, float eps, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, size, num_threads, [&](int64_t row) {
      const int64_t first = row * size;
      layer_norm_row(static_cast<const T*>(x) + first, residual ? static_cast<const T*>(residual) + first : nullptr,
                     static_cast<const T*>(weight), static_cast<const T*>(bias),
                     sum ? static_cast<T*>(sum) + first : nullptr, static_cast<T*>(out) + first, size, eps);
    });
  });
}

// heads [tokens, count, size] in place, tokens token_stride apart: each head becomes its layer norm. bias: or null.
EXPORT void pagewire_head_layer_norm(void* heads, const void* weight, const void* bias, int64_t tokens, int64_t count,
                                     int64_t size, int64_t token_stride, float eps, int32_t dtype,
                                     int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(tokens * count, size, num_threads, [&](int64_t row) {
      T* const head = static_cast<T*>(heads) + row / count * token_stride + row % count * size;
      layer_norm_row<T>(head, nullptr, static_cast<const T*>(weight), static_cast<const T*>(bias), nullptr, head, size,
                        eps);
    });
  });
}

// sums [segments, size] of the rows x [rows, size] of each segment: of elements times `one`, rounded to integers. Those of a
// segment are the ones before its end, from the end before on; the last end is the number of rows.
// Returns 0, or 1 if some elements are not finite.
EXPORT int pagewire_fixed_sums(const void* x, const int64_t* ends, int64_t* sums, int64_t segments, int64_t size,
                               double one, int32_t dtype, int32_t num_threads) {
  constexpr int64_t kColumns = 64;
  const int64_t blocks = (size + kColumns - 1) / kColumns;
  std::atomic<int> failed{0};
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (ends[segments - 1] * size < kParallelElements) num_threads = 1;
    parallel_for(segments * blocks, num_threads, [&](int64_t item) {
      const int64_t segment = item / blocks, column = item % blocks * kColumns, width = std::min(kColumns, size - column);
      int64_t totals[kColumns] = {};
      float numbers[kColumns + kLanes] = {};
      double difference = 0;  // of each number and itself: NaN if one is not finite
      for (int64_t row = segment ? ends[segment - 1] : 0; row < ends[segment]; ++row) {
        const T* const from = static_cast<const T*>(x) + row * size + column;
        for (int64_t i = 0; i < width; i += kLanes) store(numbers + i, load(from + i, width - i));
        for (int64_t i = 0; i < kColumns; ++i) {
          const double scaled = double(numbers[i]) * one;
          difference += scaled - scaled;
          totals[i] += int64_t(std::nearbyint(scaled));
        }
      }
      std::copy_n(totals, width, sums + segment * size + column);
      if (difference != 0) failed.store(1, std::memory_order_relaxed);
    });
  });
  return failed.load();
}

// x [tokens, heads, >= 2 half] in place: of the first 2 half elements of each head first all even ones, then all odd ones.
EXPORT void pagewire_by_halves(void* x, int64_t tokens, int64_t heads, int64_t half, int64_t token_stride,
                               int64_t head_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(tokens, heads * 2 * half, num_threads, [&](int64_t token) {
      thread_odd.reserve(Scratch::bytes_for<T>(half));
      T* const odd = thread_odd.take<T>(half);
      for (int64_t head = 0; head < heads; ++head) {
        T* const own = static_cast<T*>(x) + token * token_stride + head * head_stride;
        for (int64_t i = 0; i < half; ++i) {
          odd[i] = own[2 * i + 1];
          own[i] = own[2 * i];
        }
        std::copy_n(odd, half, own + half);
      }
    });
  });
}

// By its series near 0, where the other form has lost its last digits.
static INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats opened = sigmoid(2.0f * x), square = x * x;  // (1 + tanh) / 2
  Floats series = fma(broadcast(-17.0f / 315), square, broadcast(2.0f / 15));
  series = fma(fma(series, square, broadcast(-1.0f / 3)), square, broadcast(1.0f));
  return select(square < broadcast(0.04f), x * series, opened - (1.0f - opened));
}

// x [size] in place: x * scale, and with a softcap then softcap * tanh(x / softcap); every step is rounded. softcap 0: none.
EXPORT void pagewire_cap(void* x, int64_t size, float scale, float softcap, int32_t dtype, int32_t num_threads) {
  constexpr int64_t kChunk = 4096;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (size < kParallelElements) num_threads = 1;
    parallel_for((size + kChunk - 1) / kChunk, num_threads, [&](int64_t chunk) {
      T* const own = static_cast<T*>(x);
      const int64_t end = std::min(size, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < end; i += kLanes) {
        Floats v = load(own + i, end - i);
        if (scale != 1) v = rounded_to<T>(v * scale);
        if (softcap != 0) {
          v = rounded_to<T>(hyperbolic_tangent(rounded_to<T>(v / softcap))) * softcap;
        }
        store(own + i, v, end - i);
      }
    });
  });
}

// x [size] in place: numbers from -limit to limit.
EXPORT void pagewire_clamp(void* x, int64_t size, float limit, int32_t dtype, int32_t num_threads) {
  constexpr int64_t kChunk = 4096;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (size < kParallelElements) num_threads = 1;
    parallel_for((size + kChunk - 1) / kChunk, num_threads, [&](int64_t chunk) {
      T* const own = static_cast<T*>(x);
      const int64_t end = std::min(size, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < end; i += kLanes)
        store(own + i, min(broadcast(limit), max(broadcast(-limit), load(own + i, end - i))), end - i);
    });
  });
}

// x, sum [size]: sum += x * scale, the product rounded before.
EXPORT void pagewire_add_scaled(const void* x, void* sum, int64_t size, float scale, int32_t dtype, int32_t num_threads) {
  constexpr int64_t kChunk = 4096;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (size < kParallelElements) num_threads = 1;
    parallel_for((size + kChunk - 1) / kChunk, num_threads, [&](int64_t chunk) {
      const T* const from = static_cast<const T*>(x);
      T* const to = static_cast<T*>(sum);
      const int64_t end = std::min(size, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < end; i += kLanes) {
        const Floats v = load(from + i, end - i);
        store(to + i, load(to + i, end - i) + (scale == 1 ? v : rounded_to<T>(v * scale)), end - i);
      }
    });
  });
}

// x [rows, size] in place: times factors [rows, size], rows `stride` apart; 0: all rows have the same ones.
EXPORT void pagewire_multiply_rows(void* x, const void* factors, int64_t rows, int64_t size, int64_t stride,
                                   int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, size, num_threads, [&](int64_t row) {
      const T* const own = static_cast<const T*>(factors) + row * stride;
      T* const to = static_cast<T*>(x) + row * size;
      for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(to + i, size - i) * load(own + i, size - i), size - i);
    });
  });
}

// x [tokens, heads, >= 2 half] in place; cos, sin [tokens, 2 half].
EXPORT void pagewire_rotary(void* x, const void* cos, const void* sin, int64_t tokens, int64_t heads, int64_t half,
                            int64_t token_stride, int64_t head_stride, int64_t cos_stride, int64_t sin_stride,
                            int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(tokens, heads * 2 * half, num_threads, [&](int64_t token) {
      for (int64_t head = 0; head < heads; ++head)
        rotate(static_cast<T*>(x) + token * token_stride + head * head_stride,
               static_cast<const T*>(cos) + token * cos_stride, static_cast<const T*>(sin) + token * sin_stride,
               half);
    });
  });
}
