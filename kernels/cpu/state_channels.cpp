// Layers whose channels have states of their own: the scan of Mamba 1, the causal convolution, linear recurrences.
//
// Vectors lie along the channels.

#include "states.h"

namespace {

// Channels of a strip of the convolution: long enough that a token's inputs are worth fetching.
constexpr int64_t kConvChannels = 256;

// ---- the scan of Mamba 1 ----

// Vectors of a scan: the chains of that many sums hide each other's latency.
constexpr int kScanVectors = 2;

struct ScanScratch {
  float* writes;  // b of a token
  float* reads;   // c of a token
  float* a;       // [state_dim, width]: of the strip
  float* kept;    // see `walk`

  static ScanScratch take(int64_t rows, int64_t width) {
    thread_local Scratch scratch;
    const int64_t padded = round_up(rows, kLanes), strip = rows * width;
    scratch.reserve(2 * Scratch::bytes_for<float>(padded) + 2 * Scratch::bytes_for<float>(strip));
    return {scratch.take<float>(padded), scratch.take<float>(padded), scratch.take<float>(strip),
            scratch.take<float>(strip)};
  }
};

template <class T>
INLINE void widen(const T* from, float* to, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(from + i, size - i));
}

template <class T, int W>
void scan_span(const SelectiveScanCall& call, const Span& span, int64_t channel, const ScanScratch& scratch) {
  const int64_t rows = call.state_dim, channels = call.channels, count = channels - channel, width = W * kLanes;
  const T* const x = static_cast<const T*>(call.x);
  T* const out = static_cast<T*>(call.out);
  for (int64_t n = 0; n < rows; ++n)
    for (int w = 0; w < W; ++w) {
      const int64_t i = w * kLanes;
      store(scratch.a + n * width + i, load(call.a + n * channels + channel + i, count - i));
    }
  Floats d[W] = {};
  for (int w = 0; w < W && call.d; ++w) d[w] = load(call.d + channel + w * kLanes, count - w * kLanes);
  walk(call.states, span, channel, rows, width, channels, scratch.kept,
       [&](int64_t token, Columns from, Columns to) INLINE_LAMBDA {
         widen(static_cast<const T*>(call.b) + token * call.b_stride, scratch.writes, rows);
         widen(static_cast<const T*>(call.c) + token * call.c_stride, scratch.reads, rows);
         Floats steps[W], inputs[W], sums[W] = {};
         for (int w = 0; w < W; ++w) {
           const int64_t i = channel + w * kLanes, left = channels - i;
           const Floats dt = load(call.dt + token * channels + i, left), value = load(x + token * call.x_stride + i, left);
           steps[w] = dt * 1.44269504f;  // of 2^x
           inputs[w] = dt * value;
         }
         for (int64_t n = 0; n < rows; ++n)
           for (int w = 0; w < W; ++w) {
             const int64_t i = w * kLanes;
             const Floats decay = exp2(steps[w] * load(scratch.a + n * width + i));
             const Floats before = load(from.at + n * from.stride + i, count - i);
             const Floats state = fma(inputs[w], broadcast(scratch.writes[n]), before * decay);
             sums[w] = fma(state, broadcast(scratch.reads[n]), sums[w]);
             store(to.at + n * to.stride + i, state, count - i);
           }
         for (int w = 0; w < W; ++w) {
           const int64_t i = channel + w * kLanes, left = channels - i;
           store(out + token * channels + i, fma(d[w], load(x + token * call.x_stride + i, left), sums[w]), left);
         }
       });
}

template <class T>
int selective_scan(const SelectiveScanCall& call) {
  const int64_t width = kScanVectors * kLanes, strips = (call.channels + width - 1) / width;
  const int64_t state_size = call.state_dim * call.channels;
  T* const out = static_cast<T*>(call.out);
  return for_spans(call.states, strips, state_size, out, call.channels, [&](Span span, int64_t strip) {
    const ScanScratch scratch = ScanScratch::take(call.state_dim, width);
    if ((strip + 1) * width <= call.channels) return scan_span<T, kScanVectors>(call, span, strip * width, scratch);
    for (int64_t channel = strip * width; channel < call.channels; channel += kLanes)
      scan_span<T, 1>(call, span, channel, scratch);
  });
}

// ---- the causal convolution ----

template <class T>
class CausalConv {
 public:
  explicit CausalConv(const CausalConvCall& call)
      : call_(call),
        x_(static_cast<const T*>(call.x)),
        weight_(static_cast<const T*>(call.weight)),
        bias_(static_cast<const T*>(call.bias)),
        out_(static_cast<T*>(call.out)) {}

  // The outputs of a span, and the inputs that come before its next token.
  void run(const Span& span, int64_t channel) const {
    const States& states = call_.states;
    const float* const read = span.read < 0 ? nullptr : states.state + span.read * states.slot_stride;
    const int64_t end = std::min(channel + kConvChannels, call_.channels);
    for (int64_t token = span.begin; token < span.end; ++token)
      for (int64_t i = channel; i < end; i += kLanes) convolve(span, read, token, i, end - i);
    float* const written = states.state + span.written * states.slot_stride;
    for (int64_t tap = 0; tap + 1 < call_.taps; ++tap)  // ascending: what is read in place lies ahead
      for (int64_t i = channel; i < end; i += kLanes)
        store(written + tap * call_.channels + i, input(span, read, span.end - call_.taps + 1 + tap, i, end - i), end - i);
  }

 private:
  // The input of some channels at a token, which may lie before the span.
  INLINE Floats input(const Span& span, const float* read, int64_t token, int64_t channel, int64_t count) const {
    if (token >= span.begin) return load(x_ + token * call_.x_stride + channel, count);
    if (!read) return Floats{};
    return load(read + (token - span.begin + call_.taps - 1) * call_.channels + channel, count);
  }

  INLINE void convolve(const Span& span, const float* read, int64_t token, int64_t channel, int64_t count) const {
    Floats sum = bias_ ? load(bias_ + channel, count) : Floats{};
    for (int64_t tap = 0; tap < call_.taps; ++tap)
      sum = fma(input(span, read, token - call_.taps + 1 + tap, channel, count),
                load(weight_ + tap * call_.channels + channel, count), sum);
    if (call_.silu) {
      sum = rounded_to<T>(sum);
      sum = sum / (1.0f + exp(-sum));
    }
    store(out_ + token * call_.channels + channel, sum, count);
  }

  const CausalConvCall& call_;
  const T* const x_;
  const T* const weight_;
  const T* const bias_;
  T* const out_;
};

template <class T>
int causal_conv(const CausalConvCall& call) {
  const CausalConv<T> conv(call);
  const int64_t strips = (call.channels + kConvChannels - 1) / kConvChannels;
  return for_spans(call.states, strips, call.taps * call.channels, static_cast<T*>(call.out), call.channels,
                   [&](Span span, int64_t strip) { conv.run(span, strip * kConvChannels); });
}

// ---- linear recurrences ----

template <class T>
int linear_recurrence(const LinearRecurrenceCall& call) {
  const T* const x = static_cast<const T*>(call.x);
  const T* const decay = static_cast<const T*>(call.decay);
  T* const out = static_cast<T*>(call.out);
  const int64_t channels = call.channels, strips = (channels + kLanes - 1) / kLanes;
  return for_spans(call.states, strips, channels, out, channels, [&](Span span, int64_t strip) {
    const int64_t channel = strip * kLanes, count = channels - channel;
    float* const slots = call.states.state + channel;
    Floats state = {};
    if (span.read >= 0) state = load(slots + span.read * call.states.slot_stride, count);
    for (int64_t token = span.begin; token < span.end; ++token) {
      state = fma(load(decay + token * call.decay_stride + channel, count), state,
                  load(x + token * call.x_stride + channel, count));
      store(out + token * channels + channel, state, count);
    }
    store(slots + span.written * call.states.slot_stride, state, count);
  });
}

}  // namespace

// Every argument is described at `SelectiveScanCall`. Returns 1 where the batch is not valid.
int pagewire_selective_scan(const SelectiveScanCall* call) {
  int failed = 0;
  dispatch(call->states.dtype, [&](auto element) { failed = selective_scan<decltype(element)>(*call); });
  return failed;
}

// Likewise, at `CausalConvCall`.
int pagewire_causal_conv(const CausalConvCall* call) {
  int failed = 0;
  dispatch(call->states.dtype, [&](auto element) { failed = causal_conv<decltype(element)>(*call); });
  return failed;
}

// Likewise, at `LinearRecurrenceCall`.
int pagewire_linear_recurrence(const LinearRecurrenceCall* call) {
  int failed = 0;
  dispatch(call->states.dtype, [&](auto element) { failed = linear_recurrence<decltype(element)>(*call); });
  return failed;
}
