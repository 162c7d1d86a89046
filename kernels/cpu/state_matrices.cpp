// Layers whose state is a matrix per head: the gated delta rule, and the state space of Mamba 2.
//
// A token multiplies the rows of the state by decays, adds the product of a column of keys and a row of values, and
// reads a sum of the rows. Vectors lie along the rows, so that no sum crosses their lanes.

#include "states.h"

namespace {

// Columns of a head that are computed together: W vectors, or one whose lanes from `count` on do not exist.
template <int W, bool Whole>
struct Lanes {
  int64_t count;

  template <class T>
  INLINE Floats get(const T* row, int w) const {
    return Whole ? load(row + w * kLanes) : load(row, count);
  }

  template <class T>
  INLINE void put(T* row, int w, Floats v) const {
    if (Whole)
      store(row + w * kLanes, v);
    else
      store(row, v, count);
  }
};

// Calls run(lanes, first column) for a strip of a head.
template <class Run>
INLINE void with_lanes(int64_t strip, int64_t size, const Run& run) {
  const int64_t column = strip * kStripVectors * kLanes, count = size - column;
  if (count >= kStripVectors * kLanes) return run(Lanes<kStripVectors, true>{}, column);
  for (int64_t i = 0; i < count; i += kLanes) {
    if (count - i >= kLanes)
      run(Lanes<1, true>{}, column + i);
    else
      run(Lanes<1, false>{count - i}, column + i);
  }
}

int64_t strips_of(int64_t size) { return (size + kStripVectors * kLanes - 1) / (kStripVectors * kLanes); }

// What a token does to each row of a state. The arrays have lanes behind their ends.
struct Factors {
  float* key;           // what is added to a row, by values
  float* decay;         // what the row is multiplied with before
  float* decayed_key;   // key * decay
  float* decayed_query;
  float* kept;          // see `walk`

  static Factors take(int64_t rows) {
    thread_local Scratch scratch;
    const int64_t padded = round_up(rows, kLanes), kept = rows * kStripVectors * kLanes;
    scratch.reserve(4 * Scratch::bytes_for<float>(padded) + Scratch::bytes_for<float>(kept));
    Factors factors;
    for (float** array : {&factors.key, &factors.decay, &factors.decayed_key, &factors.decayed_query})
      *array = scratch.take<float>(padded);
    factors.kept = scratch.take<float>(kept);
    return factors;
  }
};

// ---- the gated delta rule ----

// Fills the factors of a token and a head; returns the product of key and query.
template <class T>
float prepare(const DeltaRuleCall& call, const T* q, const T* k, const float* decay, const Factors& factors) {
  const int64_t size = call.key_dim;
  Floats queries = {}, keys = {}, products = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats query = load(q + i, size - i), key = load(k + i, size - i);
    queries = fma(query, query, queries);
    keys = fma(key, key, keys);
    products = fma(query, key, products);
  }
  float query_scale = call.scale, key_scale = 1.0f;
  if (call.normed) {
    query_scale /= std::sqrt(sum_lanes(queries) + call.norm_eps);
    key_scale /= std::sqrt(sum_lanes(keys) + call.norm_eps);
  }
  const Floats whole = exp(broadcast(decay[0]));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats kept = call.decays == 1 ? whole : exp(load(decay + i, size - i));
    const Floats key = load(k + i, size - i) * key_scale, query = load(q + i, size - i) * query_scale;
    store(factors.key + i, key);
    store(factors.decay + i, kept);
    store(factors.decayed_key + i, key * kept);
    store(factors.decayed_query + i, query * kept);
  }
  return sum_lanes(products) * key_scale * query_scale;
}

// change = (v - key S) beta, out = query S + (key query) change of the decayed state S, which then gets key * change.
template <class T, int W, bool Whole>
INLINE void delta_step(const Lanes<W, Whole>& lanes, const Factors& factors, int64_t rows, const T* v, float beta,
                       float product, Columns from, Columns to, T* out) {
  Floats seen[W] = {}, read[W] = {}, change[W];
  for (int64_t i = 0; i < rows; ++i) {
    const float* const row = from.at + i * from.stride;
    const Floats key = broadcast(factors.decayed_key[i]), query = broadcast(factors.decayed_query[i]);
    for (int w = 0; w < W; ++w) {
      const Floats state = lanes.get(row, w);
      seen[w] = fma(key, state, seen[w]);
      read[w] = fma(query, state, read[w]);
    }
  }
  for (int w = 0; w < W; ++w) {
    change[w] = (lanes.get(v, w) - seen[w]) * beta;
    lanes.put(out, w, fma(broadcast(product), change[w], read[w]));
  }
  for (int64_t i = 0; i < rows; ++i) {
    const Floats key = broadcast(factors.key[i]), decay = broadcast(factors.decay[i]);
    for (int w = 0; w < W; ++w)
      lanes.put(to.at + i * to.stride, w, fma(key, change[w], lanes.get(from.at + i * from.stride, w) * decay));
  }
}

template <class T>
int gated_delta_rule(const DeltaRuleCall& call) {
  const int64_t heads = call.value_heads, rows = call.key_dim, columns = call.value_dim, strips = strips_of(columns);
  const T* const q = static_cast<const T*>(call.q);
  const T* const k = static_cast<const T*>(call.k);
  const T* const v = static_cast<const T*>(call.v);
  T* const out = static_cast<T*>(call.out);
  const int64_t state_size = heads * rows * columns;
  return for_spans(call.states, heads * strips, state_size, out, heads * columns, [&](Span span, int64_t item) {
    const int64_t head = item / strips, key_head = head * call.key_heads / heads;
    const Factors factors = Factors::take(rows);
    with_lanes(item % strips, columns, [&](auto lanes, int64_t column) {
      walk(call.states, span, head * rows * columns + column, rows, kStripVectors * kLanes, columns, factors.kept,
           [&](int64_t token, Columns from, Columns to) INLINE_LAMBDA {
             const int64_t at = token * heads + head;
             const float product = prepare(call, q + token * call.q_stride + key_head * rows,
                                           k + token * call.k_stride + key_head * rows, call.decay + at * call.decays,
                                           factors);
             delta_step(lanes, factors, rows, v + token * call.v_stride + head * columns + column, call.beta[at],
                        product, from, to, out + at * columns + column);
           });
    });
  });
}

// ---- the state space of Mamba 2 ----

// S = S decay + key x, out = query S + d x.
template <class T, int W, bool Whole>
INLINE void space_step(const Lanes<W, Whole>& lanes, const Factors& factors, int64_t rows, const T* x, float d,
                       Columns from, Columns to, T* out) {
  Floats values[W], read[W] = {};
  for (int w = 0; w < W; ++w) values[w] = lanes.get(x, w);
  const Floats decay = broadcast(factors.decay[0]);
  for (int64_t i = 0; i < rows; ++i) {
    const Floats key = broadcast(factors.key[i]), query = broadcast(factors.decayed_query[i]);
    for (int w = 0; w < W; ++w) {
      const Floats state = fma(key, values[w], lanes.get(from.at + i * from.stride, w) * decay);
      read[w] = fma(query, state, read[w]);
      lanes.put(to.at + i * to.stride, w, state);
    }
  }
  for (int w = 0; w < W; ++w) lanes.put(out, w, fma(broadcast(d), values[w], read[w]));
}

template <class T>
int state_space(const StateSpaceCall& call) {
  const int64_t heads = call.heads, rows = call.state_dim, columns = call.head_dim, strips = strips_of(columns);
  const T* const x = static_cast<const T*>(call.x);
  const T* const b = static_cast<const T*>(call.b);
  const T* const c = static_cast<const T*>(call.c);
  T* const out = static_cast<T*>(call.out);
  const int64_t state_size = heads * rows * columns;
  return for_spans(call.states, heads * strips, state_size, out, heads * columns, [&](Span span, int64_t item) {
    const int64_t head = item / strips, group = head * call.groups / heads;
    const Factors factors = Factors::take(rows);
    with_lanes(item % strips, columns, [&](auto lanes, int64_t column) {
      walk(call.states, span, head * rows * columns + column, rows, kStripVectors * kLanes, columns, factors.kept,
           [&](int64_t token, Columns from, Columns to) INLINE_LAMBDA {
             const int64_t at = token * heads + head;
             const float dt = call.dt[at];
             store(factors.decay, exp(broadcast(dt * call.a[head])));
             for (int64_t i = 0; i < rows; i += kLanes) {
               store(factors.key + i, load(b + token * call.b_stride + group * rows + i, rows - i) * dt);
               store(factors.decayed_query + i, load(c + token * call.c_stride + group * rows + i, rows - i));
             }
             space_step(lanes, factors, rows, x + token * call.x_stride + head * columns + column,
                        call.d ? call.d[head] : 0.0f, from, to, out + at * columns + column);
           });
    });
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
