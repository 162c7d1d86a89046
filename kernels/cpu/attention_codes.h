// Attention's two products where the cache holds codes of 8 bits (codes.h), by vectors.
//
// Queries, and probabilities times the scales of their values, become codes of 16 bits; their products with the codes of
// K and V are summed exactly. So what was lost when keys and values were stored is all that is lost. A row of
// probabilities has a scale for each KV tile, which depends on nothing but what the row sees there. The sums fit in 32
// bits: 256 keys of at most 32,767 * 127, and for queries the largest code follows from the size of a head.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention_keys.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_vectors.h"
#include "codes.h"
#include "layout.h"

namespace {

constexpr int64_t kLargestWideCode = 32767;

template <>
struct KeyProduct<code8> {
  using Element = uint32_t;
  using Keys = Shorts;
  using Sum = Ints;
  static INLINE Keys keys(const code8* at) { return load_codes(at); }
  static INLINE Sum multiply_add(Element q, Keys k, Sum sum) { return ::multiply_add(q, k, sum); }
};

template <>
struct Value<code8> {
  using Sum = Ints;
  static INLINE Shorts load(const code8* row, int64_t column) { return load_codes(row + 2 * column); }
  static INLINE Sum multiply_add(const float* probabilities, int key, Shorts v, Sum sum) {
    return ::multiply_add(load_raw<uint32_t>(probabilities + key / 2), v, sum);
  }
};

// Sums to logits, by the scales of the rows and of the keys; sums to values, by those of the rows.
struct ScaledLogits {
  const float* rows;
  const float* keys;
  ScaledLogits from(int64_t row) const { return {rows + row, keys}; }
  INLINE Floats operator()(Ints sum, int row, int c) const {
    return to_floats(sum) * rows[row] * load(keys + c * kLanes);
  }
};

struct ScaledValues {
  const float* rows;
  ScaledValues from(int64_t row) const { return {rows + row}; }
  INLINE Floats operator()(Ints sum, int row, int) const { return to_floats(sum) * rows[row]; }
};

// Probabilities as they are, for the scales that come next.
struct KeepFloats {
  static INLINE void keep(Floats low, Floats high, float* probabilities, int key) {
    store_pair(probabilities + key, low, high);
  }
};

class CodedAttention {
 public:
  CodedAttention(const QueryRows& rows, const Workspace& work)
      : rows_(rows),
        call_(rows.call),
        work_(work),
        panels_(rows.call, work),
        steps_((call_.head_dim + 1) / 2),
        width_(values_width<code8>(call_.v_head_dim)),
        queries_(reinterpret_cast<uint32_t*>(work.queries)) {
    const int64_t most = std::numeric_limits<int32_t>::max() / (kLargestCode * call_.head_dim);
    dispatch(call_.dtype, [&](auto element) {
      using Q = decltype(element);
      for (int64_t row = 0; row < rows.count; ++row) {
        const Q* q = rows.query<Q>(row);
        const CodeScale scale = code_scale(q, call_.head_dim, float(std::min(kLargestWideCode, most)));
        work_.row_scales[row] = scale.of_codes;
        encode(q, call_.head_dim, scale, reinterpret_cast<int16_t*>(queries_ + row * steps_));
      }
    });
  }

  // The partial result of every row for a KV tile. `next` is what comes after it, and is fetched meanwhile.
  void attend(int64_t kv_tile, const KvTile<code8>& keys, const KvTile<code8>& next, const Partial& result) {
    const int begin = keys.begin / kStepKeys * kStepKeys, end = int(round_up(keys.end, kStepKeys));
    const Sight sight(rows_, kv_tile, {keys.begin, keys.end});
    copy_scales(keys, next);
    for (int key = begin; key < end; key += kPanelKeys) {
      const Panel<code8> panel = panels_.find(keys, key);
      const ScaledLogits scaled{work_.row_scales, k_scales_ + key};
      for_row_groups(rows_.count, [&](int64_t first, auto size) {
        if (!sight(first, size.value).meets(key, key + kPanelKeys)) return;
        const auto multiply = first == 0 ? multiply_keys<size.value, true, code8, ScaledLogits>
                                         : multiply_keys<size.value, false, code8, ScaledLogits>;
        multiply(queries_ + first * steps_, panel, keys.v + key / 2, steps_,
                 work_.scores + first * kScoreStride + key, scaled.from(first));
      });
    }
    Softmax<KeepFloats>(rows_, kv_tile, begin, end).run(0, rows_.count, work_.scores, result);
    float* const value_scales = work_.row_scales + rows_.count;
    for (int64_t row = 0; row < rows_.count; ++row)
      value_scales[row] = encode_probabilities(work_.scores + row * kScoreStride, begin, end);
    weighted_values<code8>(work_.scores, rows_.count, values(keys), next.k, sight, result.values, width_,
                           ScaledValues{value_scales});
  }

 private:
  // The scales of the tile's keys side by side; those of positions that nobody wrote may be anything.
  void copy_scales(const KvTile<code8>& keys, const KvTile<code8>& next) {
    const int64_t granule = panels_.granule;
    for (int64_t i = 0; i < kKvTileKeys / granule; ++i) {
      std::memcpy(k_scales_ + i * granule, keys.k_scales[i], size_t(granule) * sizeof(float));
      std::memcpy(v_scales_ + i * granule, keys.v_scales[i], size_t(granule) * sizeof(float));
      fetch(next.k_scales[i]);
      fetch(next.v_scales[i]);
    }
  }

  // Puts codes of a row's probabilities times the scales of V, two to a float, into the place of the probabilities.
  // Returns their scale. What has probability 0 is not looked at: it may be a position that nobody wrote.
  float encode_probabilities(float* row, int begin, int end) const {
    Ints magnitudes = {};
    for (int key = begin; key < end; key += kLanes) {
      const Floats p = load(row + key);
      const Floats weighted = select(p == Floats{}, Floats{}, p * load(v_scales_ + key));
      store(row + key, weighted);
      magnitudes = max(magnitudes, magnitude(weighted));
    }
    const CodeScale scale(largest_magnitude(magnitudes), float(kLargestWideCode));
    encode(row + begin, end - begin, scale, reinterpret_cast<int16_t*>(row) + begin);
    return scale.of_codes;
  }

  // Where the rows of V lie: in the cache, or copied and filled up to whole vectors.
  const code8* const* values(const KvTile<code8>& keys) {
    if (width_ == call_.v_head_dim) return keys.v;
    for (int key = keys.begin / 2 * 2; key < keys.end; key += 2) {
      code8* const to = reinterpret_cast<code8*>(work_.values) + key * width_;
      std::memcpy(to, keys.v[key / 2], size_t(2 * call_.v_head_dim));
      std::memset(to + 2 * call_.v_head_dim, 0, size_t(2 * (width_ - call_.v_head_dim)));
      staged_[key / 2] = to;
    }
    return staged_;
  }

  const QueryRows& rows_;
  const AttentionCall& call_;
  const Workspace& work_;
  const Panels<code8> panels_;
  const int64_t steps_, width_;
  uint32_t* const queries_;  // [rows, steps], pairs of codes
  float k_scales_[kKvTileKeys], v_scales_[kKvTileKeys];
  const code8* staged_[kKvTileKeys / 2];
};

}  // namespace
