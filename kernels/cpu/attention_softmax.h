// Logits to probabilities, and the merging of partial results.
#pragma once

#include <algorithm>
#include <limits>

#include "attention_keys.h"
#include "attention_plan.h"
#include "simd.h"

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
// Sums that a row's probabilities are added up in, key after key in turn: as many whatever the width of a vector, so that
// every instruction set adds in the same order.
constexpr int kSumLanes = 32;
constexpr int64_t kSoftmaxRows = 8;  // rows whose scores stay in the first-level cache together

// What turns the raw products of some rows with one KV tile into probabilities, relative to each row's own maximum.
// Keys [begin, end) of the tile, multiples of kSumLanes, were computed; those that a row does not see get probability 0.
// Keep::keep(low, high, scores, key) puts the probabilities of 2 kLanes keys into the place of their logits.
//
// All rows' maxima come first, then all exponentials: the one sum across lanes that a row's exponentials wait for is
// over by the time it is their turn.
template <class Keep>
class Softmax {
 public:
  Softmax(const QueryRows& rows, int64_t kv_tile, int begin, int end)
      : rows_(rows), call_(rows.call), terms_(call_.terms), kv_tile_(kv_tile), begin_(begin), end_(end),
        // A plain scale needs no pass of its own: it goes into the exponent.
        plain_(!terms_.softcap && !terms_.alibi && !terms_.relative_bias && call_.scale > 0.0f),
        factor_(plain_ ? call_.scale * kLog2E : kLog2E) {}

  // Rows [first, first + count); scores [count, kScoreStride]; their maxima and sums go to the partial result.
  void run(int64_t first, int64_t count, float* scores, const Partial& result) const {
    for (; count > 0; first += kSoftmaxRows, count -= kSoftmaxRows, scores += kSoftmaxRows * kScoreStride)
      run_chunk(first, std::min(count, kSoftmaxRows), scores, result);
  }

 private:
  struct Visible {
    int begin, end;
    bool all(int first, int last) const { return begin <= first && last <= end; }
  };

  void run_chunk(int64_t first, int64_t count, float* scores, const Partial& result) const {
    Visible visible[kSoftmaxRows];
    Floats lanes[kSoftmaxRows];
    for (int64_t i = 0; i < count; ++i) {
      visible[i] = {rows_.visible_begin(kv_tile_, first + i), rows_.visible_end(kv_tile_, first + i)};
      float* const row = scores + i * kScoreStride;
      if (!plain_) transform(first + i, row);
      if (terms_.chosen) hide_others(first + i, row);
      lanes[i] = visible[i].all(begin_, end_) ? tops<false>(row, visible[i]) : tops<true>(row, visible[i]);
    }
    for (int64_t i = 0; i < count; ++i) result.max[first + i] = max_lanes(lanes[i]) * factor_;
    for (int64_t i = 0; i < count; ++i) {
      float* const row = scores + i * kScoreStride;
      const float top = result.max[first + i], base = top == kMinusInfinity ? 0.0f : -top;
      lanes[i] = visible[i].all(begin_, end_) ? exponentiate<false>(row, base, visible[i])
                                              : exponentiate<true>(row, base, visible[i]);
    }
    for (int64_t i = 0; i < count; ++i) result.sum[first + i] = sum_lanes(lanes[i]);
  }

  void transform(int64_t row, float* scores) const {
    const float softcap_inverse = terms_.softcap ? 1.0f / terms_.softcap : 0.0f;
    const float slope = terms_.alibi ? terms_.alibi[rows_.head(row)] : 0.0f;
    const int64_t distance = kv_tile_ * kKvTileKeys - rows_.position(row);  // from the query to key 0
    const float* const bias =
        terms_.relative_bias ? terms_.relative_bias + (2 * rows_.head(row) + 1) * terms_.bias_radius + distance : nullptr;
    for (int key = begin_; key < end_; key += kLanes) {
      Floats s = load(scores + key) * broadcast(call_.scale);
      if (terms_.softcap) s = terms_.softcap * tanh(s * softcap_inverse);
      const Ints keys = lane_numbers() + (key + int32_t(distance));
      if (terms_.alibi) s = s + slope * __builtin_convertvector(keys, Floats);
      if (bias) s = s + load(bias + key);
      store(scores + key, s);
    }
  }

  // Hides the keys that were not chosen for the row's token.
  void hide_others(int64_t row, float* scores) const {
    const int32_t* const chosen = terms_.chosen + rows_.token(row) * terms_.num_chosen;
    const int32_t* const end = chosen + terms_.num_chosen;
    const int64_t first = kv_tile_ * kKvTileKeys;
    float kept[kKvTileKeys];
    std::fill(kept + begin_, kept + end_, kMinusInfinity);
    for (const int32_t* at = std::lower_bound(chosen, end, first + begin_); at < end && *at < first + end_; ++at)
      if (*at >= first + begin_) kept[*at - first] = scores[*at - first];
    std::copy(kept + begin_, kept + end_, scores + begin_);
  }

  template <bool Masked>
  static INLINE Floats masked(Floats v, int key, const Visible& visible, float otherwise) {
    if (!Masked) return v;
    const Ints keys = lane_numbers() + key;
    return select((keys >= visible.begin) & (keys < visible.end), v, broadcast(otherwise));
  }

  template <bool Masked>
  Floats tops(const float* scores, const Visible& visible) const {
    Floats tops[2] = {broadcast(kMinusInfinity), broadcast(kMinusInfinity)};
    for (int key = begin_; key < end_; key += 2 * kLanes)
      for (int i = 0; i < 2; ++i) {
        const int at = key + i * kLanes;
        tops[i] = max(tops[i], masked<Masked>(load(scores + at), at, visible, kMinusInfinity));
      }
    return max(tops[0], tops[1]);
  }

  template <bool Masked>
  Floats exponentiate(float* scores, float base, const Visible& visible) const {
    const Floats factors = broadcast(factor_), bases = broadcast(base);
    Floats sums[kSumLanes / kLanes] = {};
    for (int key = begin_; key < end_; key += kSumLanes) {
#pragma GCC unroll 8
      for (int i = 0; i < kSumLanes / kLanes; i += 2) {
        Floats p[2];
        for (int j = 0; j < 2; ++j) {
          const int at = key + (i + j) * kLanes;
          p[j] = masked<Masked>(exp2(fma(load(scores + at), factors, bases)), at, visible, 0.0f);
          sums[i + j] += p[j];
        }
        Keep::keep(p[0], p[1], scores, key + i * kLanes);
      }
    }
    for (int count = kSumLanes / kLanes / 2; count > 0; count /= 2)
      for (int i = 0; i < count; ++i) sums[i] += sums[i + count];
    return sums[0];
  }

  const QueryRows& rows_;
  const AttentionCall& call_;
  const LogitTerms& terms_;
  const int64_t kv_tile_;
  const int begin_, end_;
  const bool plain_;
  const float factor_;
};

// Merges the next KV tile's partial result into the total. A row that saw no key of the tile stays as it is.
void merge(const Partial& total, const Partial& next, int64_t rows, int64_t width) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const Floats before = load(total.max + first), found = load(next.max + first), top = max(before, found);
    float keep[kLanes], add[kLanes];
    store(keep, exp2(before - top));
    store(add, exp2(found - top));
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, rows - first); ++lane) {
      const int64_t row = first + lane;
      if (next.max[row] == kMinusInfinity) continue;
      total.max[row] = std::max(total.max[row], next.max[row]);
      total.sum[row] = total.sum[row] * keep[lane] + next.sum[row] * add[lane];
      for (int64_t i = row * width; i < (row + 1) * width; i += kLanes)
        store(total.values + i,
              fma(load(total.values + i), broadcast(keep[lane]), load(next.values + i) * broadcast(add[lane])));
    }
  }
}

}  // namespace
