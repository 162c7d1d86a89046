// The experts of a layer: which of them a token is sent to, and their weighted sum.
//
// Rows are ordered by expert once, so those of an expert stand together, and each product is one call for all experts:
// threads share out (expert, chunk of rows, panels), whatever expert they belong to. The products are those of linear.cpp
// and quantised.cpp. What adapters change in a product is a call for all experts, too: their rows are ordered by expert and
// adapter. A token's results are added in ascending order of the experts, in float32, and rounded once: its
// bits depend on nothing but the token.

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace {

constexpr int64_t kParallelElements = 1 << 15;  // below which one thread is faster

class ExpertRows {
 public:
  ExpertRows(const Experts& experts, const ExpertsCall& call)
      : experts_(experts), call_(call), rows_(call.num_tokens * call.num_chosen) {
    thread_local Scratch scratch;
    const int64_t groups = call.adapters ? experts.count * call.adapters->count : 0;
    scratch.reserve(Scratch::bytes_for<int64_t>(experts.count + 1) + Scratch::bytes_for<int64_t>(groups + 1) +
                    3 * Scratch::bytes_for<int64_t>(rows_));
    starts_ = scratch.take<int64_t>(experts.count + 1);
    order_ = scratch.take<int64_t>(rows_);
    places_ = scratch.take<int64_t>(rows_);
    adapted_starts_ = scratch.take<int64_t>(groups + 1);
    adapted_ = scratch.take<int64_t>(rows_);
  }

  // 1: there is no such expert.
  int run() {
    for (int64_t i = 0; i < rows_; ++i)
      if (call_.ids[i] < 0 || call_.ids[i] >= experts_.count) return 1;
    if (!rows_) return 0;
    order();
    if (call_.adapters) order_adapted();
    dispatch(call_.dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t hidden = experts_.up->k, width = experts_.up->n, size = experts_.down->k;
      T* const states = static_cast<T*>(call_.scratch);
      T* const between = states + rows_ * hidden;
      const int num_threads = rows_ * hidden < kParallelElements ? 1 : call_.num_threads;
      parallel_for(rows_, num_threads, [&](int64_t place) {
        const T* const x = static_cast<const T*>(call_.x) + order_[place] / call_.num_chosen * hidden;
        T* const to = states + place * hidden;
        if (!experts_.weighs_inputs) return void(std::memcpy(to, x, size_t(hidden) * sizeof(T)));
        const float weight = call_.weights[order_[place]];
        for (int64_t i = 0; i < hidden; i += kLanes) store(to + i, load(x + i, hidden - i) * weight, hidden - i);
      });
      multiply(experts_.up, states, hidden, between);
      if (experts_.gated)
        pagewire_activate(between, between, rows_, size, width, width, experts_.activation, call_.dtype, call_.num_threads);
      else
        pagewire_activate_each(between, between, rows_, width, experts_.activation, call_.dtype, call_.num_threads);
      multiply(experts_.down, between, width, states);
      parallel_for(call_.num_tokens, num_threads, [&](int64_t token) { add(states, hidden, token); });
    });
    return 0;
  }

 private:
  // Counts and sorts. `order_`: of each place the token and choice that stand there; `places_`: of each token its
  // places, ascending, and so its experts.
  void order() {
    std::fill(starts_, starts_ + experts_.count + 1, 0);
    for (int64_t i = 0; i < rows_; ++i) ++starts_[call_.ids[i] + 1];
    for (int64_t e = 0; e < experts_.count; ++e) starts_[e + 1] += starts_[e];
    for (int64_t i = 0; i < rows_; ++i) order_[places_[i] = starts_[call_.ids[i]]++] = i;
    for (int64_t e = experts_.count; e > 0; --e) starts_[e] = starts_[e - 1];  // each has moved to the next one's
    starts_[0] = 0;
    for (int64_t i = 0; i < rows_; i += call_.num_chosen) std::sort(places_ + i, places_ + i + call_.num_chosen);
  }

  // Counts and sorts the places of tokens that have adapters, by expert and then by adapter.
  void order_adapted() {
    const AdapterRows& adapters = *call_.adapters;
    const auto for_places = [&](const auto& body) {
      for (int64_t i = 0; i < adapters.count; ++i)
        for (int64_t row = adapters.starts[i]; row < adapters.starts[i + 1]; ++row)
          for (int64_t c = 0; c < call_.num_chosen; ++c) {
            const int64_t place = places_[adapters.rows[row] * call_.num_chosen + c];
            body(call_.ids[order_[place]] * adapters.count + i, place);
          }
    };
    const int64_t groups = experts_.count * adapters.count;
    std::fill(adapted_starts_, adapted_starts_ + groups + 1, 0);
    for_places([&](int64_t group, int64_t) { ++adapted_starts_[group + 1]; });
    for (int64_t g = 0; g < groups; ++g) adapted_starts_[g + 1] += adapted_starts_[g];
    for_places([&](int64_t group, int64_t place) { adapted_[adapted_starts_[group]++] = place; });
    for (int64_t g = groups; g > 0; --g) adapted_starts_[g] = adapted_starts_[g - 1];  // as above
    adapted_starts_[0] = 0;
  }

  // The product with all experts' matrices, with what adapters change in it.
  void multiply(const Matrix* matrices, const void* x, int64_t x_stride, void* out) const {
    const GroupedCall grouped{matrices, starts_, x, out, experts_.count, x_stride, call_.dtype, call_.num_threads};
    pagewire_grouped(&grouped);
    if (!call_.adapters || matrices->number < 0) return;
    const AdapterRows rows{adapted_, adapted_starts_, call_.adapters->tables, call_.adapters->count, experts_.count};
    const AdaptCall adapt{&rows,       x,           out,      matrices->number, matrices->k,
                          matrices->n, x_stride, call_.dtype, call_.num_threads};
    pagewire_adapt(&adapt);
  }

  template <class T>
  void add(const T* rows, int64_t size, int64_t token) const {
    T* const out = static_cast<T*>(call_.out) + token * size;
    const int64_t* const places = places_ + token * call_.num_chosen;
    for (int64_t i = 0; i < size; i += kLanes) {
      Floats sum = {};
      for (int64_t c = 0; c < call_.num_chosen; ++c) {
        const float weight = experts_.weighs_inputs ? 1.0f : call_.weights[order_[places[c]]];
        sum = sum + load(rows + places[c] * size + i, size - i) * weight;
      }
      store(out + i, sum, size - i);
    }
  }

  const Experts& experts_;
  const ExpertsCall& call_;
  const int64_t rows_;
  int64_t *starts_, *order_, *places_;
  int64_t *adapted_starts_, *adapted_;  // rows with adapters, see AdapterRows
};

// The softmax of a row's logits, in float32.
template <class T>
void softmax(const T* logits, float* to, int64_t size) {
  Floats most = broadcast(-INFINITY), total = {};
  const auto logit = [&](int64_t i) INLINE_LAMBDA {  // behind the end: as small as can be
    return select(lane_numbers() < broadcast(int32_t(std::min<int64_t>(size - i, kLanes))), load(logits + i, size - i),
                  broadcast(-INFINITY));
  };
  for (int64_t i = 0; i < size; i += kLanes) most = max(most, logit(i));
  const float largest = max_lanes(most);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats e = exp(logit(i) - largest);
    total = total + e;
    store(to + i, e, size - i);
  }
  const float sum = sum_lanes(total);
  for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(to + i, size - i) / sum, size - i);
}

// How a router chooses the experts of a row.
class Choice {
 public:
  Choice(const Routing& routing, int64_t experts) : routing_(routing), experts_(experts) {
    thread_local Scratch scratch;
    scratch.reserve(3 * Scratch::bytes_for<float>(experts) + Scratch::bytes_for<float>(routing.groups));
    logits_ = scratch.take<float>(experts);
    scores_ = scratch.take<float>(experts);
    left_ = scratch.take<float>(experts);
    of_groups_ = scratch.take<float>(routing.groups);
  }

  // The experts of a row of logits, and their weights.
  template <class T>
  void run(const T* logits, int64_t* ids, float* weights) const {
    score(logits);
    for (int64_t i = 0; i < experts_; ++i) left_[i] = routing_.bias ? scores_[i] + routing_.bias[i] : scores_[i];
    if (routing_.kept_groups < routing_.groups) leave_out_groups();
    float sum = 0;
    for (int64_t c = 0; c < routing_.num_chosen; ++c) {
      ids[c] = std::max_element(left_, left_ + experts_) - left_;
      sum += weights[c] = routing_.margin > 0 ? near_share(ids[c]) : scores_[ids[c]];
      left_[ids[c]] = -INFINITY;
    }
    for (int64_t c = 0; c < routing_.num_chosen; ++c) {
      const float share = routing_.normalised ? weights[c] / (sum + routing_.epsilon) : weights[c];
      dispatch(routing_.weight_dtype, [&](auto element) {
        weights[c] = rounded_to<decltype(element)>(broadcast(share * routing_.factor))[0];
      });
    }
  }

 private:
  template <class T>
  void score(const T* logits) const {
    if (routing_.margin > 0)
      for (int64_t i = 0; i < experts_; i += kLanes) store(logits_ + i, load(logits + i, experts_ - i), experts_ - i);
    if (!routing_.sigmoid) return softmax(logits, scores_, experts_);
    for (int64_t i = 0; i < experts_; i += kLanes)
      store(scores_ + i, sigmoid(load(logits + i, experts_ - i)), experts_ - i);
  }

  // Leaves out all groups but the best; of equal ones those with the least numbers are kept.
  void leave_out_groups() const {
    const int64_t size = experts_ / routing_.groups;
    for (int64_t g = 0; g < routing_.groups; ++g) {
      float first = -INFINITY, second = -INFINITY;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) {
        second = std::max(second, std::min(first, left_[i]));
        first = std::max(first, left_[i]);
      }
      of_groups_[g] = routing_.best > 1 ? first + second : first;
    }
    for (int64_t g = 0; g < routing_.groups; ++g) {
      int64_t better = 0;
      for (int64_t other = 0; other < routing_.groups; ++other)
        better += of_groups_[other] > of_groups_[g] || (of_groups_[other] == of_groups_[g] && other < g);
      if (better >= routing_.kept_groups) std::fill_n(left_ + g * size, size, -INFINITY);
    }
  }

  // The score of an expert that is chosen next, where there is a margin.
  float near_share(int64_t id) const {
    const float own = logits_[id];
    float total = 0;
    for (int64_t i = 0; i < experts_; ++i) {
      const bool is_far = (own - logits_[i]) / std::max(std::fabs(logits_[i]), own) > routing_.margin;
      if (left_[i] != -INFINITY && !is_far) total += std::exp(logits_[i] - own);
    }
    return 1 / total;
  }

  const Routing& routing_;
  const int64_t experts_;
  float *logits_, *scores_, *left_, *of_groups_;
};

}  // namespace

// Rows of matrices, dense and quantised ones.
EXPORT void pagewire_grouped(const GroupedCall* call) {
  const auto is_dense = [](const Matrix& matrix) { return !matrix.integers; };
  const Matrix* const end = call->matrices + call->count;
  if (std::any_of(call->matrices, end, is_dense)) pagewire_linear_grouped(call);
  if (!std::all_of(call->matrices, end, is_dense)) pagewire_quantised_grouped(call);
}

// Returns 1 if an id is of no expert; nothing is written then.
EXPORT int pagewire_experts(const Experts* experts, const ExpertsCall* call) { return ExpertRows(*experts, *call).run(); }

// logits [rows, experts], contiguous, to the experts of each row, the first choice first (of equal ones that with the
// least number), and to their weights. Where a logit is NaN, so are all weights, and the ids are of experts.
EXPORT void pagewire_route(const void* logits, int64_t* ids, float* weights, int64_t rows, int64_t experts,
                           const Routing* routing, int32_t dtype) {
  const Choice choice(*routing, experts);
  const int64_t chosen = routing->num_chosen;
  dispatch(dtype, [&](auto element) {
    const auto* const from = static_cast<const decltype(element)*>(logits);
    for (int64_t row = 0; row < rows; ++row) choice.run(from + row * experts, ids + row * chosen, weights + row * chosen);
  });
}

// x [size] as float32.
EXPORT void pagewire_floats(const void* x, float* out, int64_t size, int32_t dtype, int32_t num_threads) {
  constexpr int64_t kChunk = 4096;
  if (size < kParallelElements) num_threads = 1;
  dispatch(dtype, [&](auto element) {
    const auto* const from = static_cast<const decltype(element)*>(x);
    parallel_for((size + kChunk - 1) / kChunk, num_threads, [&](int64_t chunk) {
      const int64_t end = std::min(size, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < end; i += kLanes) store(out + i, load(from + i, end - i), end - i);
    });
  });
}

// out += sigmoid(gate) * x, every step rounded; out and x [rows, size], gate [rows]; all of them contiguous.
EXPORT void pagewire_add_gated(void* out, const void* x, const void* gate, int64_t rows, int64_t size, int32_t dtype,
                               int32_t num_threads) {
  if (rows * size < kParallelElements) num_threads = 1;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads, [&](int64_t row) {
      T* const to = static_cast<T*>(out) + row * size;
      const Floats open = rounded_to<T>(sigmoid(broadcast(static_cast<const T*>(gate)[row])));
      for (int64_t i = 0; i < size; i += kLanes) {
        const Floats gated = rounded_to<T>(open * load(static_cast<const T*>(x) + row * size + i, size - i));
        store(to + i, load(to + i, size - i) + gated, size - i);
      }
    });
  });
}
