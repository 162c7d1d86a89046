// Attention's two products by vectors.
//
// The lanes of a vector are keys in the one product and columns of V in the other, and both keep a block of
// kVectorRows x kColumns vectors in registers. Blocks hold K and V in just this order (layout.h), so both are read in
// place. What lies at positions outside the needed range stays in lanes that are masked, or is read as zeros.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention_keys.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "layout.h"
#include "simd.h"

namespace {

constexpr int kVectorRows = 6;
constexpr int kColumns = kRegisters == 32 ? 4 : 2;  // kVectorRows x kColumns accumulators fit in the registers
constexpr int kPanelKeys = kColumns * kLanes;
constexpr int kStepKeys = kPanelKeys > kSumLanes ? kPanelKeys : kSumLanes;  // that scores are computed for

// ---- products of queries and keys, into float32; K as layout.h keeps it ----

// One element of a query and of each key at a step.
template <class T>
struct SingleProduct {
  using Element = float;
  using Keys = Floats;
  using Sum = Floats;
  static INLINE void queries(const T* q, int64_t count, Element* to) {
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(q + i, count - i), count - i);
  }
  static INLINE Keys keys(const T* at) { return load(at); }
  static INLINE Floats multiply_add(Element q, Keys k, Floats sum) { return fma(broadcast(q), k, sum); }
};

// Pairs of bfloat16, taken apart.
struct SplitProduct {
  struct Element {
    float first, second;
  };
  using Keys = Words;
  using Sum = Floats;
  static INLINE void queries(const bf16* q, int64_t count, Element* to) {
    for (int64_t i = 0; i < count; i += 2, ++to) *to = {broadcast(q[i])[0], i + 1 < count ? broadcast(q[i + 1])[0] : 0.0f};
  }
  static INLINE Keys keys(const bf16* at) { return load_raw<Words>(at); }
  static INLINE Floats multiply_add(Element q, Keys k, Floats sum) {
    sum = fma(broadcast(q.first), bit_cast<Floats>(k << 16), sum);
    return fma(broadcast(q.second), bit_cast<Floats>(k & 0xffff0000u), sum);
  }
};

#if defined(PAGEWIRE_PAIRS)
// Pairs of bfloat16, multiplied by one instruction.
struct PairProduct {
  using Element = uint32_t;
  using Keys = Pairs;
  using Sum = Floats;
  static INLINE void queries(const bf16* q, int64_t count, Element* to) {
    if (count % 2) to[count / 2] = 0;
    std::memcpy(to, q, size_t(count) * sizeof(bf16));
  }
  static INLINE Keys keys(const bf16* at) { return load_raw<Pairs>(at); }
  static INLINE Floats multiply_add(Element q, Keys k, Floats sum) {
    return add_products(sum, broadcast_pair(q), k);
  }
};
using BrainProduct = PairProduct;
#else
using BrainProduct = SplitProduct;
#endif
template <class T>
struct KeyProduct : std::conditional_t<std::is_same_v<T, bf16>, BrainProduct, SingleProduct<T>> {};

// A sum as it is; or what is made of row `row` and column `c` of a block of sums.
struct AsSummed {
  AsSummed from(int64_t) const { return {}; }
  INLINE Floats operator()(Floats sum, int, int) const { return sum; }
};

// Calls visit(first, std::integral_constant<int, R>) over `rows` rows in groups of R <= kVectorRows, nearly equal.
template <int R = kVectorRows, class Visit>
INLINE void dispatch_rows(int64_t rows, int64_t first, const Visit& visit) {
  if (rows == R) return visit(first, std::integral_constant<int, R>{});
  if constexpr (R > 1) dispatch_rows<R - 1>(rows, first, visit);
}

template <class Visit>
INLINE void for_row_groups(int64_t rows, const Visit& visit) {
  const int64_t groups = (rows + kVectorRows - 1) / kVectorRows;
  for (int64_t g = 0, first = 0; g < groups; ++g) {
    const int64_t size = rows / groups + (g < rows % groups);
    dispatch_rows(size, first, visit);
    first += size;
  }
}

// Where a panel's keys lie: each vector of them, and how many elements further the next step is.
template <class T>
struct Panel {
  const T* at[kColumns];
  int64_t stride;
};

// Steps whose vectors lie in one line of the caches.
template <class T>
constexpr int64_t kLineSteps = std::max<int64_t>(1, 64 / (kLanes * kPair<T> * int64_t(sizeof(T))));

// scores[row][key] = q[row] . k[key] for R rows and one panel. With Fetch the values of its keys are fetched meanwhile.
template <int R, bool Fetch, class T, class Finish>
void multiply_keys(const typename KeyProduct<T>::Element* queries, const Panel<T>& panel, const T* const* values,
                   int64_t steps, float* scores, const Finish& finish) {
  using P = KeyProduct<T>;
  typename P::Sum sums[R][kColumns] = {};
  for (int64_t step = 0; step < steps; ++step) {
    typename P::Keys keys[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      keys[c] = P::keys(panel.at[c] + step * panel.stride);
      if (Fetch && step % kLineSteps<T> == 0) fetch(values[c * kLanes / kPair<T>] + step * kLanes * kPair<T>);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto q = queries[r * steps + step];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) sums[r][c] = P::multiply_add(q, keys[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) store(scores + r * kScoreStride + c * kLanes, finish(sums[r][c], r, c));
}

// ---- products of probabilities and values, into float32; V as layout.h keeps it ----

// One key at a time. Staged: what V is copied to where it cannot be read in place.
template <class T>
struct SingleValue {
  using Staged = float;
  using Sum = Floats;
  template <class V>
  static INLINE Floats load(const V* row, int64_t column) { return ::load(row + column); }
  static INLINE Floats multiply_add(const float* probabilities, int key, Floats v, Floats sum) {
    return fma(broadcast(probabilities[key]), v, sum);
  }
  static INLINE void keep(Floats low, Floats high, float* probabilities, int key) {
    store(probabilities + key, low);
    store(probabilities + key + kLanes, high);
  }
  static INLINE void stage(const T* row, int64_t column, int64_t count, float* to) {
    store(to, ::load(row + column, count));
  }
};

// Two consecutive keys at a time.
struct PairedValue {
  using Staged = bf16;
  using Sum = Floats;
  static INLINE void stage(const bf16* row, int64_t column, int64_t count, bf16* to) {
    std::memset(to, 0, sizeof(Words));
    std::memcpy(to, row + 2 * column, size_t(std::min<int64_t>(kLanes, count)) * 2 * sizeof(bf16));
  }
};

// Taken apart.
struct SplitValue : PairedValue {
  static INLINE Words load(const bf16* row, int64_t column) { return load_raw<Words>(row + 2 * column); }
  static INLINE Floats multiply_add(const float* probabilities, int key, Words v, Floats sum) {
    sum = fma(broadcast(probabilities[key]), bit_cast<Floats>(v << 16), sum);
    return fma(broadcast(probabilities[key + 1]), bit_cast<Floats>(v & 0xffff0000u), sum);
  }
  static INLINE void keep(Floats low, Floats high, float* probabilities, int key) {
    store(probabilities + key, low);
    store(probabilities + key + kLanes, high);
  }
};

#if defined(PAGEWIRE_PAIRS)
// Multiplied by one instruction. Probabilities are rounded to bfloat16, as in eager attention; those of the keys 2 i
// and 2 i + 1 then lie at i.
struct PairValue : PairedValue {
  static INLINE Pairs load(const bf16* row, int64_t column) { return load_raw<Pairs>(row + 2 * column); }
  static INLINE Floats multiply_add(const float* probabilities, int key, Pairs v, Floats sum) {
    return add_products(sum, broadcast_pair(load_raw<uint32_t>(probabilities + key / 2)), v);
  }
  static INLINE void keep(Floats low, Floats high, float* probabilities, int key) {
    const Pairs both = rounded_pairs(low, high);
    std::memcpy(probabilities + key / 2, &both, sizeof(both));
  }
};
using BrainValue = PairValue;
#else
using BrainValue = SplitValue;
#endif
template <class T>
struct Value : std::conditional_t<std::is_same_v<T, bf16>, BrainValue, SingleValue<T>> {};

// values[row] = sum over keys of probability[row][key] * v[key], for R rows and C vectors of V's width.
// With Fetch the keys `ahead` are fetched meanwhile.
template <class T, class V, int R, int C, bool Fetch, class Finish>
void multiply_values(const float* probabilities, const V* const* rows, const T* const* ahead, int64_t column,
                     int begin, int end, float* values, int64_t width, const Finish& finish) {
  constexpr int keys = int(kPair<T>);
  typename Value<T>::Sum sums[R][C] = {};
  for (int key = begin / keys * keys; key < end; key += keys) {
    decltype(Value<T>::load(rows[0], 0)) v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      v[c] = Value<T>::load(rows[key / keys], column + c * kLanes);
      if (Fetch && c * kLanes * keys * sizeof(T) % 64 == 0)
        fetch(ahead[key / kGranule] + key % kGranule * width + (column + c * kLanes) * keys);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        sums[r][c] = Value<T>::multiply_add(probabilities + r * kScoreStride, key, v[c], sums[r][c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(values + r * width + column + c * kLanes, finish(sums[r][c], r, c));
}

// All rows and the whole width of V, which is a multiple of kLanes here.
template <class T, class V, class Finish>
void weighted_values(const float* probabilities, int64_t num_rows, const V* const* rows, const T* const* ahead,
                     const Sight& sight, float* values, int64_t width, const Finish& finish) {
  const auto columns = [&](int64_t column, auto count) {
    for_row_groups(num_rows, [&](int64_t first, auto size) {
      const auto [begin, end] = sight(first, size.value);
      const auto multiply = first == 0 ? multiply_values<T, V, size.value, count.value, true, Finish>
                                       : multiply_values<T, V, size.value, count.value, false, Finish>;
      multiply(probabilities + first * kScoreStride, rows, ahead, column, begin, end, values + first * width, width,
               finish.from(first));
    });
  };
  constexpr int64_t step = kColumns * kLanes;
  int64_t column = 0;
  for (; column + step <= width; column += step) columns(column, std::integral_constant<int, kColumns>{});
  if constexpr (kColumns > 2 && !kCoded<T>)  // codes do without: it is seconds of compilation
    for (; column + 2 * kLanes <= width; column += 2 * kLanes) columns(column, std::integral_constant<int, 2>{});
  for (; column < width; column += kLanes) columns(column, std::integral_constant<int, 1>{});
}

// Finds the panels of a KV tile: granules that fill a vector are read in place, smaller ones are put side by side.
template <class T>
struct Panels {
  const AttentionCall& call;
  const Workspace& work;
  const int64_t granule = granule_size(call.block_size);

  Panels(const AttentionCall& call, const Workspace& work) : call(call), work(work) {}

  Panel<T> find(const KvTile<T>& keys, int first) const {
    Panel<T> panel;
    const bool in_place = granule == kGranule && call.head_dim % kPair<T> == 0;
    panel.stride = (in_place ? kGranule : kPanelKeys) * kPair<T>;
    T* gathered = reinterpret_cast<T*>(work.keys);
    for (int c = 0; c < kColumns; ++c) {
      const int key = first + c * kLanes;
      panel.at[c] = in_place ? keys.k[key / kGranule] + key % kGranule * kPair<T> : gathered + c * kLanes * kPair<T>;
    }
    const int64_t count = std::min<int64_t>(granule, kPanelKeys);
    for (int64_t i = 0; !in_place && i < kPanelKeys; i += count)
      gather(keys.k[(first + i) / granule], (first + i) % granule, count, gathered + i * kPair<T>);
    return panel;
  }

 private:
  // `count` keys of a granule, from its key `first` on.
  void gather(const T* from, int64_t first, int64_t count, T* panel) const {
    constexpr int64_t pair = kPair<T>;
    const int64_t whole = call.head_dim / pair;
    for (int64_t step = 0; step < whole; ++step)
      std::memcpy(panel + step * kPanelKeys * pair, from + (step * granule + first) * pair,
                  size_t(count * pair) * sizeof(T));
    for (int64_t i = 0; call.head_dim % pair && i < count; ++i) {
      panel[(whole * kPanelKeys + i) * pair] = from[whole * granule * pair + first + i];
      panel[(whole * kPanelKeys + i) * pair + 1] = T{};
    }
  }
};

template <class T>
class VectorAttention {
  using Element = typename KeyProduct<T>::Element;
  using Staged = typename Value<T>::Staged;

 public:
  VectorAttention(const QueryRows& rows, const Workspace& work)
      : rows_(rows),
        call_(rows.call),
        work_(work),
        panels_(rows.call, work),
        steps_((call_.head_dim + kPair<T> - 1) / kPair<T>),
        width_(values_width<T>(call_.v_head_dim)),
        queries_(reinterpret_cast<Element*>(work.queries)) {
    for (int64_t row = 0; row < rows.count; ++row)
      KeyProduct<T>::queries(rows.query<T>(row), call_.head_dim, queries_ + row * steps_);
  }

  // The partial result of every row for a KV tile. `next` is what comes after it, and is fetched meanwhile.
  void attend(int64_t kv_tile, KvTile<T>& keys, const KvTile<T>& next, const Partial& result) {
    const int begin = keys.begin / kStepKeys * kStepKeys, end = int(round_up(keys.end, kStepKeys));
    const Sight sight(rows_, kv_tile, {keys.begin, keys.end});
    for (int key = begin; key < end; key += kPanelKeys) {
      const Panel<T> panel = panels_.find(keys, key);
      for_row_groups(rows_.count, [&](int64_t first, auto size) {
        if (!sight(first, size.value).meets(key, key + kPanelKeys)) return;
        const auto multiply =
            first == 0 ? multiply_keys<size.value, true, T, AsSummed> : multiply_keys<size.value, false, T, AsSummed>;
        multiply(queries_ + first * steps_, panel, keys.v + key / kPair<T>, steps_,
                 work_.scores + first * kScoreStride + key, AsSummed{});
      });
    }
    for_row_groups(rows_.count, [&](int64_t first, auto size) {
      const KeyRange seen = sight(first, size.value);  // its products with V read no more
      const int from = seen.begin / kStepKeys * kStepKeys, to = int(round_up(seen.end, kStepKeys));
      Softmax<Value<T>>(rows_, kv_tile, from, to).run(first, size.value, work_.scores + first * kScoreStride, result);
    });
    multiply_values(sight, keys, next, result.values);
  }

 private:
  void multiply_values(const Sight& sight, KvTile<T>& keys, const KvTile<T>& next, float* values) {
    const bool ragged = width_ != call_.v_head_dim;
    const auto multiply = [&](const auto* const* rows) {
      weighted_values<T>(work_.scores, rows_.count, rows, next.k, sight, values, width_, AsSummed{});
    };
    if constexpr (std::is_same_v<Staged, T>) {
      // Also a pair of keys that lies half outside the range.
      if (ragged || keys.begin % kPair<T>) stage(keys, keys.begin, ragged ? keys.end : keys.begin + 1, keys.v);
      if (!ragged && keys.end % kPair<T>) stage(keys, keys.end - 1, keys.end, keys.v);
      multiply(keys.v);
    } else if (ragged || rows_.count > 2 * kVectorRows) {
      stage(keys, keys.begin, keys.end, staged_);
      multiply(staged_);
    } else {
      multiply(keys.v);
    }
  }

  // Copies rows of V, widened to whole vectors, with zeros for positions outside the needed range.
  void stage(const KvTile<T>& keys, int begin, int end, const Staged** staged) {
    constexpr int step = int(kPair<T>);
    for (int key = begin / step * step; key < end; key += step) {
      Staged* to = reinterpret_cast<Staged*>(work_.values) + key * width_;
      for (int64_t i = 0; i < width_; i += kLanes)
        Value<T>::stage(keys.v[key / step], i, call_.v_head_dim - i, to + i * step);
      for (int half = 0; step > 1 && half < step; ++half)
        if (key + half < keys.begin || key + half >= keys.end)
          for (int64_t i = 0; i < width_; ++i) to[i * step + half] = Staged{};
      staged[key / step] = to;
    }
  }

  const QueryRows& rows_;
  const AttentionCall& call_;
  const Workspace& work_;
  const Panels<T> panels_;
  const int64_t steps_, width_;
  Element* const queries_;
  const Staged* staged_[kKvTileKeys];
};

}  // namespace
