// The activations between the two products of a feed-forward half.
//
// Each element is computed on its own, so its bits do not depend on the batch.

#include <cmath>

#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace {

// Of rows [size], or of rows [2 size] that hold gates and then what they are multiplied with, or both in turn. `out` may be
// the row itself.

struct Silu {
  static INLINE Floats activate(Floats x) { return x / (1.0f + exp(-x)); }
};

struct QuickGelu {
  static INLINE Floats activate(Floats x) { return x * sigmoid(1.702f * x); }
};

struct GeluTanh {
  // 0.5 (1 + tanh u) is sigmoid(2u).
  static INLINE Floats activate(Floats x) {
    return x * sigmoid(1.5957691216f * fma(x * x * x, broadcast(0.044715f), x));
  }
};

struct Relu {
  static INLINE Floats activate(Floats x) { return max(Floats{}, x); }  // in this order NaN survives
};

struct ReluSquared {
  static INLINE Floats activate(Floats x) {
    const Floats y = max(Floats{}, x);
    return y * y;
  }
};

struct Gelu {
  // x Phi(x), with Abramowitz and Stegun's 7.1.26 for the error function: it is off by at most 1.5e-7.
  static INLINE Floats activate(Floats x) {
    const Floats z = 0.70710678f * select(x < Floats{}, -x, x);
    const Floats t = 1.0f / fma(broadcast(0.3275911f), z, broadcast(1.0f));
    Floats p = broadcast(1.061405429f);
    p = fma(p, t, broadcast(-1.453152027f));
    p = fma(p, t, broadcast(1.421413741f));
    p = fma(p, t, broadcast(-0.284496736f));
    p = fma(p, t, broadcast(0.254829592f));
    const Floats tail = p * t * exp(-(z * z));  // 1 - erf(z)
    return 0.5f * x * select(x < Floats{}, tail, 2.0f - tail);
  }
};

// Of each element by itself.
template <class Function>
struct Each {
  template <class T>
  static void run(const T* x, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) store(out + i, Function::activate(load(x + i, size - i)), size - i);
  }
};

template <class Gate>
struct HalfByHalf {
  template <class T>
  static void run(const T* x, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats gate = rounded_to<T>(Gate::activate(load(x + i, size - i)));
      store(out + i, gate * load(x + size + i, size - i), size - i);
    }
  }
};

// (clamp(up, -7, 7) + 1) * (g * sigmoid(1.702 g)) with g = min(gate, 7); gates and ups stand in turn. As in gpt-oss.
struct ClampedSwiglu {
  static constexpr float kLimit = 7.0f, kSlope = 1.702f;

  template <class T>
  static void run(const T* x, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t left = 2 * (size - i);
      const Floats low = load(x + 2 * i, left), high = left > kLanes ? load(x + 2 * i + kLanes, left - kLanes) : Floats{};
      const Floats gate = bounded(every_second<0>(low, high), -INFINITY), up = bounded(every_second<1>(low, high), -kLimit);
      const Floats opened = rounded_to<T>(sigmoid(rounded_to<T>(gate * kSlope)));
      store(out + i, rounded_to<T>(up + 1.0f) * rounded_to<T>(gate * opened), size - i);
    }
  }

 private:
  static INLINE Floats bounded(Floats x, float least) {
    return min(broadcast(kLimit), max(broadcast(least), x));  // in this order NaN survives
  }
};

// expm1(x) - x for x up to 0: near 0 by its series, where the difference itself has lost its digits.
INLINE Floats beyond_line(Floats x) {
  Floats series = broadcast(1.0f);
  for (int power = 7; power > 1; --power) series = fma(series * x, broadcast(1.0f / float(power + 1)), broadcast(1.0f));
  return select(x > broadcast(-0.5f), 0.5f * x * x * series, exp(x) - 1.0f - x);
}

template <class Activation>
void activate(const void* x, void* out, int64_t rows, int64_t size, int64_t row_stride, int64_t out_stride,
              int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, size, num_threads, [&](int64_t row) {
      Activation::run(static_cast<const T*>(x) + row * row_stride, static_cast<T*>(out) + row * out_stride, size);
    });
  });
}

}  // namespace

// x and out [rows, size], contiguous; they may be the same. activation: 0 SiLU, 1 GELU's tanh form, 3 GELU,
// 4 x sigmoid(1.702 x), 5 ReLU, 6 its square.
EXPORT void pagewire_activate_each(const void* x, void* out, int64_t rows, int64_t size, int32_t activation,
                                   int32_t dtype, int32_t num_threads) {
  const auto run = activation == 0   ? activate<Each<Silu>>
                   : activation == 1 ? activate<Each<GeluTanh>>
                   : activation == 3 ? activate<Each<Gelu>>
                   : activation == 4 ? activate<Each<QuickGelu>>
                   : activation == 5 ? activate<Each<Relu>>
                                     : activate<Each<ReluSquared>>;
  run(x, out, rows, size, size, size, dtype, num_threads);
}

// x [rows, 2 size], rows row_stride apart; out [rows, size], rows out_stride apart; they may be the same.
// activation: 0 SiLU, 1 GELU's tanh form, 2 gpt-oss's, 3 GELU, 4 x sigmoid(1.702 x), 5 ReLU, 6 its square.
EXPORT void pagewire_activate(const void* x, void* out, int64_t rows, int64_t size, int64_t row_stride,
                              int64_t out_stride, int32_t activation, int32_t dtype, int32_t num_threads) {
  const auto run = activation == 0   ? activate<HalfByHalf<Silu>>
                   : activation == 1 ? activate<HalfByHalf<GeluTanh>>
                   : activation == 2 ? activate<ClampedSwiglu>
                   : activation == 3 ? activate<HalfByHalf<Gelu>>
                   : activation == 4 ? activate<HalfByHalf<QuickGelu>>
                   : activation == 5 ? activate<HalfByHalf<Relu>>
                                     : activate<HalfByHalf<ReluSquared>>;
  run(x, out, rows, size, row_stride, out_stride, dtype, num_threads);
}

// x and out [rows, size], contiguous; they may be the same.
EXPORT void pagewire_xielu(const void* x, void* out, int64_t rows, int64_t size, const Xielu* parameters, int32_t dtype,
                           int32_t num_threads) {
  const Xielu p = *parameters;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, size, num_threads, [&](int64_t row) {
      const T* const from = static_cast<const T*>(x) + row * size;
      T* const to = static_cast<T*>(out) + row * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const Floats v = load(from + i, size - i);
        const Floats capped = min(broadcast(p.least), v);  // in this order NaN survives
        const Floats below = p.negative * (beyond_line(capped) + (capped - v));
        store(to + i, p.slope * v + select(v > Floats{}, p.positive * v * v, below), size - i);
      }
    });
  });
}
