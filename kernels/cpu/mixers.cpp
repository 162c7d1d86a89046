// What layers with states compute between their first product and their last: `kernels/mixers.py`, compiled.
//
// The same kernels in the same order, so the bits are the same.

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "matrix.h"
#include "rows.h"
#include "scratch.h"
#include "simd.h"

namespace {

thread_local Scratch thread_opened;

// log(1 + e^x). Of e at most 1, log(1 + e) is 2 atanh(e / (2 + e)), whose series ends below the last place.
INLINE Floats softplus(Floats x) {
  const Floats e = exp(select(x < Floats{}, x, -x)), ratio = e / (2.0f + e), square = ratio * ratio;
  Floats p = broadcast(1.0f / 13);
  p = fma(p, square, broadcast(1.0f / 11));
  p = fma(p, square, broadcast(1.0f / 9));
  p = fma(p, square, broadcast(1.0f / 7));
  p = fma(p, square, broadcast(1.0f / 5));
  p = fma(p, square, broadcast(1.0f / 3));
  p = fma(p, square, broadcast(1.0f));
  return fma(2.0f * ratio, p, max(Floats{}, x));  // in this order NaN survives
}

// A group of numbers that gates open.
template <class T, bool Sigmoid>
struct Opening {
  const T* x;
  const T* gates;
  int64_t size;
  bool single;

  INLINE Floats gate(int64_t i) const {
    const Floats v = single ? broadcast(gates[0]) : load(gates + i, size - i);
    return Sigmoid ? sigmoid(v) : v / (1.0f + exp(-v));
  }

  INLINE Floats opened(int64_t i) const { return load(x + i, size - i) * gate(i); }

  void run(T* out) const {
    for (int64_t i = 0; i < size; i += kLanes) store(out + i, opened(i), size - i);
  }

  // With a norm of what was opened, or `first` not set, before that.
  void run(T* out, const T* weight, float eps, bool first) const {
    thread_opened.reserve(Scratch::bytes_for<float>(round_up(size, kLanes)));
    float* const kept = thread_opened.take<float>(round_up(size, kLanes));
    Floats squares = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats v = first ? opened(i) : load(x + i, size - i);
      store(kept + i, v);
      squares = fma(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats normed = rounded_to<T>(rounded_to<T>(load(kept + i) * scale) * load(weight + i, size - i));
      store(out + i, first ? normed : normed * gate(i), size - i);
    }
  }
};

template <class T, bool Sigmoid>
void open_by(const T* x, const T* gates, T* out, int64_t rows, int64_t groups, int64_t gates_stride, int64_t group_stride,
             const OutputGate& form, int num_threads) {
  for_rows(rows * groups, form.group, num_threads, [&](int64_t item) {
    const int64_t group = item % groups, first = item * form.group;
    const T* const own = gates + item / groups * gates_stride + group * group_stride;
    const Opening<T, Sigmoid> opening{x + first, own, form.group, form.single != 0};
    if (form.weight)
      opening.run(out + first, static_cast<const T*>(form.weight) + group * form.weight_stride, form.eps, form.first);
    else
      opening.run(out + first);
  });
}

// Calls body(row, i, numbers of the row from i on that are left) for all vectors of all rows.
template <class Body>
void for_vectors(int64_t rows, int64_t size, int num_threads, const Body& body) {
  for_rows(rows, size, num_threads, [&](int64_t row) {
    for (int64_t i = 0; i < size; i += kLanes) body(row, i, size - i);
  });
}

// What a mixer makes of the tokens of a call.
class Mixing {
 public:
  Mixing(const Mixer& mixer, const MixerCall& call)
      : mixer_(mixer), call_(call), tokens_(call.num_tokens), element_(call.dtype == 0 ? 4 : 2) {}

  // 0, or 1 where the spans are not valid.
  int run() const {
    switch (mixer_.kind) {
      case 1: return short_conv();
      case 2: return gated_delta();
      case 3: return state_space();
      default: return selective_scan();
    }
  }

 private:
  int short_conv() const {
    const int64_t size = mixer_.conv.channels;
    multiply_each(given(0), call_.given_stride, given(2 * size), call_.given_stride, call_.out, size);
    if (const int failure = convolve(call_.out, size)) return failure;
    multiply_each(given(size), call_.given_stride, call_.convolved, size, call_.out, size);
    return 0;
  }

  int gated_delta() const {
    DeltaRuleCall rule = mixer_.delta;
    const int64_t heads = rule.value_heads, keys = rule.key_heads * rule.key_dim, channels = mixer_.conv.channels;
    const int64_t width = mixer_.factors.n, size = heads * rule.decays;
    multiply(mixer_.factors, call_.x, mixer_.factors.k, call_.factors);
    if (const int failure = convolve(given(0), call_.given_stride)) return failure;
    float* const decay = call_.numbers;
    float* const rates = decay + tokens_ * size;
    const void* steps = place(call_.factors, heads);
    if (mixer_.steps.packed) {
      multiply(mixer_.steps, steps, width, call_.out);
      steps = call_.out;
    }
    pagewire_step_sizes(steps, mixer_.bias, mixer_.decay, decay, tokens_, size, steps == call_.out ? size : width,
                        mixer_.least, mixer_.most, call_.dtype, call_.num_threads);
    pagewire_rates(call_.factors, rates, tokens_, heads, width, mixer_.rate, call_.dtype, call_.num_threads);
    rule.states = states_of(rule.states);
    rule.q = call_.convolved;
    rule.k = place(call_.convolved, keys);
    rule.v = place(call_.convolved, 2 * keys);
    rule.q_stride = rule.k_stride = rule.v_stride = channels;
    rule.decay = decay;
    rule.beta = rates;
    rule.out = call_.out;
    if (const int failure = pagewire_gated_delta_rule(&rule)) return failure;
    const int64_t values = heads * rule.value_dim;
    if (mixer_.gates.packed) {
      multiply(mixer_.gates, place(call_.factors, width - mixer_.gates.k), width, call_.convolved);
      open(call_.convolved, values, values);
    } else {
      open(given(channels), values);
    }
    return 0;
  }

  int state_space() const {
    StateSpaceCall space = mixer_.space;
    const int64_t size = space.heads * space.head_dim, channels = mixer_.conv.channels;
    if (const int failure = convolve(given(size), call_.given_stride)) return failure;
    pagewire_step_sizes(given(size + channels), mixer_.bias, nullptr, call_.numbers, tokens_, space.heads,
                        call_.given_stride, mixer_.least, mixer_.most, call_.dtype, call_.num_threads);
    space.states = states_of(space.states);
    space.x = call_.convolved;
    space.b = place(call_.convolved, size);
    space.c = place(call_.convolved, size + space.groups * space.state_dim);
    space.x_stride = space.b_stride = space.c_stride = channels;
    space.dt = call_.numbers;
    space.out = call_.out;
    if (const int failure = pagewire_state_space(&space)) return failure;
    open(given(0), size);
    return 0;
  }

  int selective_scan() const {
    SelectiveScanCall scan = mixer_.scan;
    const int64_t channels = scan.channels, width = mixer_.factors.n, rank = mixer_.steps.k;
    if (const int failure = convolve(given(0), call_.given_stride)) return failure;
    multiply(mixer_.factors, call_.convolved, channels, call_.factors);
    char* const writes = place(call_.factors, rank);
    char* const reads = place(call_.factors, rank + scan.state_dim);
    if (mixer_.step_norm) {
      norm(call_.factors, mixer_.step_norm, rank);
      norm(writes, mixer_.write_norm, scan.state_dim);
      norm(reads, mixer_.read_norm, scan.state_dim);
    }
    multiply(mixer_.steps, call_.factors, width, call_.out);
    pagewire_step_sizes(call_.out, nullptr, nullptr, call_.numbers, tokens_, channels, channels, mixer_.least, mixer_.most,
                        call_.dtype, call_.num_threads);
    scan.states = states_of(scan.states);
    scan.x = call_.convolved;
    scan.b = writes;
    scan.c = reads;
    scan.x_stride = channels;
    scan.b_stride = scan.c_stride = width;
    scan.dt = call_.numbers;
    scan.out = call_.out;
    if (const int failure = pagewire_selective_scan(&scan)) return failure;
    open(given(channels), channels);
    return 0;
  }

  // ---- the parts ----

  char* place(void* x, int64_t column) const { return static_cast<char*>(x) + column * element_; }

  const char* given(int64_t column) const { return static_cast<const char*>(call_.given) + column * element_; }

  void multiply(const Matrix& matrix, const void* x, int64_t x_stride, void* out) const {
    ::multiply(matrix, x, x_stride, out, tokens_, call_.adapters, call_.dtype, call_.num_threads);
  }

  // out [tokens, size] = a * b, each rounded.
  void multiply_each(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* out, int64_t size) const {
    dispatch(call_.dtype, [&](auto element) {
      using T = decltype(element);
      for_vectors(tokens_, size, call_.num_threads, [&](int64_t row, int64_t i, int64_t left) {
        const Floats x = load(static_cast<const T*>(a) + row * a_stride + i, left);
        store(static_cast<T*>(out) + row * size + i, x * load(static_cast<const T*>(b) + row * b_stride + i, left), left);
      });
    });
  }

  // Columns of factors, in place.
  void norm(void* x, const void* weight, int64_t size) const {
    pagewire_rms_norm(x, weight, x, tokens_, 1, size, mixer_.factors.n, size, mixer_.factors.n, size, mixer_.eps, 0,
                      call_.dtype, call_.num_threads);
  }

  int convolve(const void* x, int64_t x_stride) const {
    CausalConvCall conv = mixer_.conv;
    conv.states = states_of(conv.states);
    conv.x = x;
    conv.x_stride = x_stride;
    conv.out = call_.convolved;
    return pagewire_causal_conv(&conv);
  }

  void open(const void* gates, int64_t size) const { open(gates, size, call_.given_stride); }

  void open(const void* gates, int64_t size, int64_t stride) const {
    pagewire_open_by(call_.out, gates, call_.out, tokens_, size / mixer_.gate.group, stride, mixer_.gate.group,
                     &mixer_.gate, call_.dtype, call_.num_threads);
  }

  // A layer's own states, with the tokens of the call.
  States states_of(States states) const {
    states.row_starts = call_.row_starts;
    states.spans = call_.spans;
    states.num_rows = call_.num_rows;
    states.num_spans = call_.num_spans;
    states.num_tokens = tokens_;
    states.dtype = call_.dtype;
    states.num_threads = call_.num_threads;
    return states;
  }

  const Mixer& mixer_;
  const MixerCall& call_;
  const int64_t tokens_, element_;
};

}  // namespace

// x, out [rows, groups, form->group], contiguous; they may be the same. gates likewise, or [rows, groups] single ones,
// rows and groups with strides.
void pagewire_open_by(const void* x, const void* gates, void* out, int64_t rows, int64_t groups, int64_t gates_stride,
                      int64_t group_stride, const OutputGate* form, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const auto run = form->sigmoid ? open_by<T, true> : open_by<T, false>;
    run(static_cast<const T*>(x), static_cast<const T*>(gates), static_cast<T*>(out), rows, groups, gates_stride,
        group_stride, *form, num_threads);
  });
}

// x [rows, size], rows x_stride apart; bias, factor [size] or null; out [rows, size].
void pagewire_step_sizes(const void* x, const float* bias, const float* factor, float* out, int64_t rows, int64_t size,
                         int64_t x_stride, float least, float most, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_vectors(rows, size, num_threads, [&](int64_t row, int64_t i, int64_t left) {
      Floats v = load(static_cast<const T*>(x) + row * x_stride + i, left);
      if (bias) v = v + load(bias + i, left);
      v = min(broadcast(most), max(broadcast(least), softplus(v)));  // in this order NaN survives
      store(out + row * size + i, factor ? v * load(factor + i, left) : v, left);
    });
  });
}

// x [rows, size], rows x_stride apart; out [rows, size].
void pagewire_rates(const void* x, float* out, int64_t rows, int64_t size, int64_t x_stride, float most, int32_t dtype,
                    int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    for_vectors(rows, size, num_threads, [&](int64_t row, int64_t i, int64_t left) {
      store(out + row * size + i, most * sigmoid(load(static_cast<const T*>(x) + row * x_stride + i, left)), left);
    });
  });
}

// Every argument is described at `MixerCall`. Returns 1 where the spans are not valid.
int pagewire_mix(const Mixer* mixer, const MixerCall* call) { return Mixing(*mixer, *call).run(); }
