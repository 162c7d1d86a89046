// Layers whose state is a matrix per head: the gated delta rule, and the state space of Mamba 2.
//
// A token multiplies the rows of the state by decays, and adds the product of a column of keys and a row of values. What
// it reads are sums of the rows by its keys or queries. Vectors lie along the rows, so that no sum crosses their lanes.

#include "states.h"

namespace {

// What is done to the rows of a state: each is multiplied with its decay, and gets `values` times its key.
template <int W>
struct Change {
  const float* keys;
  const float* decays;
  int64_t decay_step;  // 1, or 0 if there is one for all rows
  Floats values[W];
};

// Rows that are fetched ahead of the one in work, where they come from memory.
constexpr int64_t kAhead = 8;

// Changes the rows of a state (if there is a change), and adds them up with the factors of each of `reads`. `fetched`:
// they come from memory.
template <int Reads, int W, bool Whole>
INLINE void pass(const Lanes<W, Whole>& lanes, int64_t rows, Columns from, Columns to, bool fetched,
                 const Change<W>* change, const float* const (&reads)[2], Floats (&sums)[2][W]) {
  for (auto& sum : sums) std::fill_n(sum, W, Floats{});
  for (int64_t i = 0; i < rows; ++i) {
    // Loaded before the first store, which might change them for all that the compiler knows.
    const Floats decay = change ? broadcast(change->decays[i * change->decay_step]) : Floats{};
    const Floats key = change ? broadcast(change->keys[i]) : Floats{};
    Floats factors[2], row[W];
    for (int w = 0; w < W && fetched; ++w) __builtin_prefetch(from.at + (i + kAhead) * from.stride + w * kLanes);
    for (int r = 0; r < Reads; ++r) factors[r] = broadcast(reads[r][i]);
    for (int w = 0; w < W; ++w) row[w] = lanes.get(from.at + i * from.stride, w);
    for (int w = 0; w < W; ++w) {
      if (change) {
        row[w] = fma(key, change->values[w], row[w] * decay);
        lanes.put(to.at + i * to.stride, w, row[w]);
      }
      for (int r = 0; r < Reads; ++r) sums[r][w] = fma(factors[r], row[w], sums[r][w]);
    }
  }
}

// ---- the gated delta rule ----

// A token of one head. Scales of its query and key are applied to sums, not to the vectors.
struct DeltaToken {
  float *query, *key;                  // [rows]
  float *decay;                        // [rows], or one
  float *decayed_query, *decayed_key;  // [rows]; where all rows decay alike, the vectors as they are
  float kept;                          // the decay of all rows; 1: the vectors hold it
  float query_scale, key_scale, product;

  static DeltaToken take(Scratch& scratch, int64_t padded, bool by_row) {
    DeltaToken token = {};
    token.query = token.decayed_query = scratch.take<float>(padded);
    token.key = token.decayed_key = scratch.take<float>(padded);
    token.decay = scratch.take<float>(padded);
    if (by_row) token.decayed_query = scratch.take<float>(padded), token.decayed_key = scratch.take<float>(padded);
    return token;
  }
};

template <class T>
class DeltaRule {
 public:
  DeltaRule(const DeltaRuleCall& call, int64_t head) : call_(call), head_(head), rows_(call.key_dim) {
    thread_local Scratch scratch;
    const int64_t padded = round_up(rows_, kLanes), kept = rows_ * kStripColumns;
    scratch.reserve(10 * Scratch::bytes_for<float>(padded) + Scratch::bytes_for<float>(kept));
    for (DeltaToken& token : tokens_) token = DeltaToken::take(scratch, padded, by_row());
    kept_ = scratch.take<float>(kept);
  }

  // The rows of the state are read once per token: they are changed by it, and added up for the next one.
  template <int W, bool Whole>
  void run(const Lanes<W, Whole>& lanes, const Span& span, int64_t column) {
    const int64_t offset = (head_ * rows_) * call_.value_dim + column;
    Floats sums[2][W];
    const Change<W>* const none = nullptr;
    walk(call_.states, span, offset, rows_, kStripColumns, call_.value_dim, kept_,
         [&](int64_t number, Columns from, Columns to) INLINE_LAMBDA {
           DeltaToken& token = tokens_[number % 2];
           DeltaToken& next = tokens_[(number + 1) % 2];
           if (number == span.begin) {
             prepare(number, token);
             pass<2>(lanes, rows_, from, from, true, none, {token.decayed_key, token.decayed_query}, sums);
           }
           Change<W> change = {token.key, token.decay, by_row(), {}};
           finish(lanes, number, column, token, sums, change.values);
           if (number + 1 < span.end) {
             prepare(number + 1, next);
             pass<2>(lanes, rows_, from, to, false, &change, {next.decayed_key, next.decayed_query}, sums);
           } else {
             pass<0>(lanes, rows_, from, to, false, &change, {}, sums);
           }
         });
  }

 private:
  bool by_row() const { return call_.decays != 1; }

  void prepare(int64_t number, DeltaToken& token) const {
    const int64_t key_head = head_ * call_.key_heads / call_.value_heads;
    const T* const q = static_cast<const T*>(call_.q) + number * call_.q_stride + key_head * rows_;
    const T* const k = static_cast<const T*>(call_.k) + number * call_.k_stride + key_head * rows_;
    const float* const decay = call_.decay + (number * call_.value_heads + head_) * call_.decays;
    Floats queries = {}, keys = {}, products = {};
    for (int64_t i = 0; i < rows_; i += kLanes) {
      const Floats query = load(q + i, rows_ - i), key = load(k + i, rows_ - i);
      queries = fma(query, query, queries);
      keys = fma(key, key, keys);
      products = fma(query, key, products);
      store(token.query + i, query);
      store(token.key + i, key);
      if (!by_row()) continue;
      const Floats kept = exp(load(decay + i, rows_ - i));
      store(token.decay + i, kept);
      store(token.decayed_query + i, query * kept);
      store(token.decayed_key + i, key * kept);
    }
    token.kept = by_row() ? 1.0f : exp(broadcast(decay[0]))[0];
    if (!by_row()) token.decay[0] = token.kept;
    token.query_scale = call_.scale, token.key_scale = 1.0f;
    if (call_.normed) {
      token.query_scale /= std::sqrt(sum_lanes(queries) + call_.norm_eps);
      token.key_scale /= std::sqrt(sum_lanes(keys) + call_.norm_eps);
    }
    token.product = sum_lanes(products) * token.key_scale * token.query_scale;
  }

  // The output, query S + (key query) change, and what the key is multiplied with: change = (v - key S) beta. S has
  // decayed; its sums by key and query are given.
  template <int W, bool Whole>
  INLINE void finish(const Lanes<W, Whole>& lanes, int64_t number, int64_t column, const DeltaToken& token,
                     const Floats (&sums)[2][W], Floats (&values)[W]) const {
    const int64_t at = number * call_.value_heads + head_;
    const T* const v = static_cast<const T*>(call_.v) + number * call_.v_stride + head_ * call_.value_dim + column;
    T* const out = static_cast<T*>(call_.out) + at * call_.value_dim + column;
    for (int w = 0; w < W; ++w) {
      const Floats seen = sums[0][w] * (token.key_scale * token.kept);
      const Floats change = (lanes.get(v, w) - seen) * call_.beta[at];
      lanes.put(out, w, fma(broadcast(token.product), change, sums[1][w] * (token.query_scale * token.kept)));
      values[w] = change * token.key_scale;
    }
  }

  const DeltaRuleCall& call_;
  const int64_t head_, rows_;
  DeltaToken tokens_[2];
  float* kept_;  // see `walk`
};

template <class T>
int gated_delta_rule(const DeltaRuleCall& call) {
  const int64_t heads = call.value_heads, columns = call.value_dim, strips = strips_of(columns);
  return for_spans(call.states, heads * strips, heads * call.key_dim * columns, static_cast<T*>(call.out),
                   heads * columns, [&](Span span, int64_t item) {
                     DeltaRule<T> rule(call, item / strips);
                     with_lanes(item % strips, columns,
                                [&](auto lanes, int64_t column) { rule.run(lanes, span, column); });
                   });
}

// ---- the state space of Mamba 2 ----

template <class T>
class StateSpace {
 public:
  StateSpace(const StateSpaceCall& call, int64_t head) : call_(call), head_(head), rows_(call.state_dim) {
    thread_local Scratch scratch;
    const int64_t padded = round_up(rows_, kLanes), kept = rows_ * kStripColumns;
    scratch.reserve(2 * Scratch::bytes_for<float>(padded) + Scratch::bytes_for<float>(kept));
    write_ = scratch.take<float>(padded), read_ = scratch.take<float>(padded), kept_ = scratch.take<float>(kept);
  }

  template <int W, bool Whole>
  void run(const Lanes<W, Whole>& lanes, const Span& span, int64_t column) {
    const int64_t offset = head_ * rows_ * call_.head_dim + column, group = head_ * call_.groups / call_.heads * rows_;
    float next = decay(span.begin);
    walk(call_.states, span, offset, rows_, kStripColumns, call_.head_dim, kept_,
         [&](int64_t token, Columns from, Columns to) INLINE_LAMBDA {
           const float decayed = next;
           if (token + 1 < span.end) next = decay(token + 1);  // early, for an exponential takes a while
           widen(static_cast<const T*>(call_.b) + token * call_.b_stride + group, write_, rows_);
           widen(static_cast<const T*>(call_.c) + token * call_.c_stride + group, read_, rows_);
           const int64_t at = token * call_.heads + head_;
           const T* const x = static_cast<const T*>(call_.x) + token * call_.x_stride + head_ * call_.head_dim + column;
           T* const out = static_cast<T*>(call_.out) + at * call_.head_dim + column;
           Change<W> change = {write_, &decayed, 0, {}};
           for (int w = 0; w < W; ++w) change.values[w] = lanes.get(x, w) * call_.dt[at];
           Floats sums[2][W];
           pass<1>(lanes, rows_, from, to, token == span.begin, &change, {read_, nullptr}, sums);
           const Floats d = broadcast(call_.d ? call_.d[head_] : 0.0f);
           for (int w = 0; w < W; ++w) lanes.put(out, w, fma(d, lanes.get(x, w), sums[0][w]));
         });
  }

 private:
  float decay(int64_t token) const { return exp(broadcast(call_.dt[token * call_.heads + head_] * call_.a[head_]))[0]; }

  const StateSpaceCall& call_;
  const int64_t head_, rows_;
  float *write_, *read_;  // b and c of a token
  float* kept_;           // see `walk`
};

template <class T>
int state_space(const StateSpaceCall& call) {
  const int64_t heads = call.heads, columns = call.head_dim, strips = strips_of(columns);
  return for_spans(call.states, heads * strips, heads * call.state_dim * columns, static_cast<T*>(call.out),
                   heads * columns, [&](Span span, int64_t item) {
                     StateSpace<T> space(call, item / strips);
                     with_lanes(item % strips, columns,
                                [&](auto lanes, int64_t column) { space.run(lanes, span, column); });
                   });
}

}  // namespace

// Every argument is described at `DeltaRuleCall`. Returns 1 where the batch is not valid.
int pagewire_gated_delta_rule(const DeltaRuleCall* call) {
  int failed = 0;
  dispatch(call->states.dtype, [&](auto element) { failed = gated_delta_rule<decltype(element)>(*call); });
  return failed;
}

// Likewise, at `StateSpaceCall`.
int pagewire_state_space(const StateSpaceCall* call) {
  int failed = 0;
  dispatch(call->states.dtype, [&](auto element) { failed = state_space<decltype(element)>(*call); });
  return failed;
}
