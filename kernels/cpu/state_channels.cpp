// Layers whose channels have states of their own: the scan of Mamba 1, the causal convolution, linear recurrences.
//
// Vectors lie along the channels.

#include "states.h"

namespace {

constexpr float kLog2E = 1.44269504f;

// Channels of a strip of the convolution: long enough that a token's inputs are worth fetching.
constexpr int64_t kConvChannels = 256;

// ---- the scan of Mamba 1 ----

template <class T>
class SelectiveScan {
 public:
  explicit SelectiveScan(const SelectiveScanCall& call) : call_(call), rows_(call.state_dim) {
    thread_local Scratch scratch;
    const int64_t padded = round_up(rows_, kLanes), strip = rows_ * kStripColumns;
    scratch.reserve(2 * Scratch::bytes_for<float>(padded) + 2 * Scratch::bytes_for<float>(strip));
    write_ = scratch.take<float>(padded), read_ = scratch.take<float>(padded);
    a_ = scratch.take<float>(strip), kept_ = scratch.take<float>(strip);
  }

  template <int W, bool Whole>
  void run(const Lanes<W, Whole>& lanes, const Span& span, int64_t channel) {
    const int64_t channels = call_.channels;
    const float* const d = call_.d ? call_.d + channel : nullptr;
    for (int64_t n = 0; n < rows_; ++n)
      for (int w = 0; w < W; ++w)
        store(a_ + n * kStripColumns + w * kLanes, lanes.get(call_.a + n * channels + channel, w));
    walk(call_.states, span, channel, rows_, kStripColumns, channels, kept_,
         [&](int64_t token, Columns from, Columns to) INLINE_LAMBDA {
           widen(static_cast<const T*>(call_.b) + token * call_.b_stride, write_, rows_);
           widen(static_cast<const T*>(call_.c) + token * call_.c_stride, read_, rows_);
           const T* const x = static_cast<const T*>(call_.x) + token * call_.x_stride + channel;
           T* const out = static_cast<T*>(call_.out) + token * channels + channel;
           if (token + kTokensAhead < span.end) {
             fetch(call_.dt + (token + kTokensAhead) * channels + channel, W * kLanes);
             fetch(x + kTokensAhead * call_.x_stride, W * kLanes);
             fetch<1>(out + kTokensAhead * channels, W * kLanes);
           }
           for (int w = 0; w < W; ++w) {
             const Floats dt = lanes.get(call_.dt + token * channels + channel, w), value = lanes.get(x, w);
             const Floats steps = dt * kLog2E, input = dt * value;
             Floats sum = d ? lanes.get(d, w) * value : Floats{};
             for (int64_t n = 0; n < rows_; ++n) {
               const Floats decay = exp2(steps * load(a_ + n * kStripColumns + w * kLanes));
               const Floats before = lanes.get(from.at + n * from.stride, w);
               const Floats state = fma(input, broadcast(write_[n]), before * decay);
               sum = fma(state, broadcast(read_[n]), sum);
               lanes.put(to.at + n * to.stride, w, state);
             }
             lanes.put(out, w, sum);
           }
         });
  }

 private:
  const SelectiveScanCall& call_;
  const int64_t rows_;
  float *write_, *read_;  // b and c of a token
  float* a_;              // of the strip
  float* kept_;           // see `walk`
};

template <class T>
int selective_scan(const SelectiveScanCall& call) {
  return for_spans(call.states, strips_of(call.channels), call.state_dim * call.channels, static_cast<T*>(call.out),
                   call.channels, [&](Span span, int64_t strip) {
                     SelectiveScan<T> scan(call);
                     with_lanes(strip, call.channels,
                                [&](auto lanes, int64_t channel) { scan.run(lanes, span, channel); });
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
    thread_local Scratch scratch;
    scratch.reserve(Scratch::bytes_for<float>(call_.taps * kConvChannels));
    float* const weight = scratch.take<float>(call_.taps * kConvChannels);
    const States& states = call_.states;
    const float* const read = span.read < 0 ? nullptr : states.state + span.read * states.slot_stride;
    const int64_t end = std::min(channel + kConvChannels, call_.channels);
    for (int64_t tap = 0; tap < call_.taps; ++tap)
      widen(weight_ + tap * call_.channels + channel, weight + tap * kConvChannels, end - channel);
    for (int64_t token = span.begin; token < span.end; ++token) {
      if (token + kTokensAhead < span.end) {
        fetch(x_ + (token + kTokensAhead) * call_.x_stride + channel, end - channel);
        fetch<1>(out_ + (token + kTokensAhead) * call_.channels + channel, end - channel);
      }
      for (int64_t i = channel; i < end; i += kLanes)
        if (token - call_.taps + 1 >= span.begin)
          convolve<true>(span, read, weight + i - channel, token, i, end - i);
        else
          convolve<false>(span, read, weight + i - channel, token, i, end - i);
    }
    float* const written = states.state + span.written * states.slot_stride;
    for (int64_t tap = 0; tap + 1 < call_.taps; ++tap)  // ascending: what is read in place lies ahead
      for (int64_t i = channel; i < end; i += kLanes)
        store(written + tap * call_.channels + i,
              input<false>(span, read, span.end - call_.taps + 1 + tap, i, end - i), end - i);
  }

 private:
  // The input of some channels at a token, which may lie before the span unless it is known to lie inside.
  template <bool Inside>
  INLINE Floats input(const Span& span, const float* read, int64_t token, int64_t channel, int64_t count) const {
    if (Inside || token >= span.begin) return load(x_ + token * call_.x_stride + channel, count);
    if (!read) return Floats{};
    return load(read + (token - span.begin + call_.taps - 1) * call_.channels + channel, count);
  }

  template <bool Inside>
  INLINE void convolve(const Span& span, const float* read, const float* weight, int64_t token, int64_t channel,
                       int64_t count) const {
    Floats sum = bias_ ? load(bias_ + channel, count) : Floats{};
    for (int64_t tap = 0; tap < call_.taps; ++tap)
      sum = fma(input<Inside>(span, read, token - call_.taps + 1 + tap, channel, count),
                load(weight + tap * kConvChannels), sum);
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
  const int64_t channels = call.channels;
  const auto run = [&](auto lanes, const Span& span, int64_t channel) {
    constexpr int W = lanes.kVectors;
    float* const slots = call.states.state + channel;
    Floats state[W] = {};
    for (int w = 0; w < W && span.read >= 0; ++w) state[w] = lanes.get(slots + span.read * call.states.slot_stride, w);
    for (int64_t token = span.begin; token < span.end; ++token) {
      if (token + kTokensAhead < span.end) {
        fetch(decay + (token + kTokensAhead) * call.decay_stride + channel, W * kLanes);
        fetch(x + (token + kTokensAhead) * call.x_stride + channel, W * kLanes);
        fetch<1>(out + (token + kTokensAhead) * channels + channel, W * kLanes);
      }
      for (int w = 0; w < W; ++w) {
        state[w] = fma(lanes.get(decay + token * call.decay_stride + channel, w), state[w],
                       lanes.get(x + token * call.x_stride + channel, w));
        lanes.put(out + token * channels + channel, w, state[w]);
      }
    }
    for (int w = 0; w < W; ++w) lanes.put(slots + span.written * call.states.slot_stride, w, state[w]);
  };
  return for_spans(call.states, strips_of(channels), channels, out, channels, [&](Span span, int64_t strip) {
    with_lanes(strip, channels, [&](auto lanes, int64_t channel) { run(lanes, span, channel); });
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
