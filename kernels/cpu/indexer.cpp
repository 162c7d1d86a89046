// Which keys a token sees: those that an indexer scores highest. kernels/indexed.py says how, and has the same bits.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace {

constexpr int64_t kScores = 1 << 22;  // of single heads in memory at once, as `SCORES`

template <class T>
class Choice {
 public:
  explicit Choice(const ChooseCall& call) : call_(call) {}

  // False if a slot, a length or a block number lies outside.
  bool is_valid() const {
    for (int64_t token = 0; token < call_.tokens; ++token)
      if (call_.slots[token] >= call_.num_blocks * call_.block_size) return false;
    if (call_.query_start_loc[0] != 0) return false;
    for (int64_t request = 0; request < call_.requests; ++request) {
      const int64_t rows = end(request) - start(request), length = call_.seq_lens[request];
      if (rows < 0 || end(request) > call_.tokens || length < rows || num_blocks(length) > call_.max_blocks) return false;
      const int32_t* const blocks = blocks_of(request);
      for (int64_t i = 0; i < num_blocks(length); ++i)
        if (blocks[i] < 0 || blocks[i] >= call_.num_blocks) return false;
    }
    return true;
  }

  void store_keys() const {
    for (int64_t token = 0; token < call_.tokens; ++token)
      if (call_.slots[token] >= 0)
        std::memcpy(index() + call_.slots[token] * call_.size, static_cast<const T*>(call_.keys) + token * call_.size,
                    size_t(call_.size) * sizeof(T));
  }

  bool sees_all() const {
    return std::all_of(call_.seq_lens, call_.seq_lens + call_.requests,
                       [&](int32_t length) { return length <= call_.num_chosen; });
  }

  void choose(int64_t request) const {
    const int64_t length = call_.seq_lens[request], before = length - end(request);  // of a row: its position
    if (length <= call_.num_chosen) {
      for (int64_t row = start(request); row < end(request); ++row)
        for (int64_t i = 0; i < call_.num_chosen; ++i) chosen(row)[i] = int32_t(i);
      return;
    }
    thread_local Scratch key_memory, memory;
    if (start(request) == end(request)) return;
    key_memory.reserve(Scratch::bytes_for<float>(length * call_.size));
    float* const keys = key_memory.take<float>(length * call_.size);
    gather(request, length, keys);
    const int64_t step = std::max<int64_t>(1, kScores / (call_.heads * length));
    for (int64_t first = start(request); first < end(request); first += step) {
      const int64_t rows = std::min(step, end(request) - first), width = call_.heads * call_.size;
      const int64_t seen = std::max(call_.num_chosen, before + first + rows);
      memory.reserve(Scratch::bytes_for<float>(rows * width) +
                     Scratch::bytes_for<float>(rows * call_.heads * seen));
      float* const queries = memory.take<float>(rows * width);
      float* const products = memory.take<float>(rows * call_.heads * seen);
      widen(static_cast<const T*>(call_.queries) + first * width, queries, rows * width);
      pagewire_linear_unpacked(queries, keys, nullptr, products, rows * call_.heads, call_.size, seen, call_.size,
                               call_.size, 0, call_.num_threads);
      parallel_for(rows, call_.num_threads, [&](int64_t row) {
        float* const scores = products + row * call_.heads * seen;
        score(static_cast<const T*>(call_.weights) + (first + row) * call_.heads, scores, seen,
              before + first + row + 1);
        largest(scores, seen, chosen(first + row));
      });
    }
  }

 private:
  int64_t start(int64_t request) const { return call_.query_start_loc[request]; }
  int64_t end(int64_t request) const { return call_.query_start_loc[request + 1]; }
  int64_t num_blocks(int64_t length) const { return (length + call_.block_size - 1) / call_.block_size; }
  const int32_t* blocks_of(int64_t request) const { return call_.block_table + request * call_.block_table_stride; }
  T* index() const { return static_cast<T*>(call_.index); }
  int32_t* chosen(int64_t row) const { return call_.chosen + row * call_.num_chosen; }

  static void widen(const T* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, count - i), count - i);
  }

  // The keys [length, size] of a request.
  void gather(int64_t request, int64_t length, float* keys) const {
    const int64_t block = call_.block_size * call_.size;
    parallel_for(num_blocks(length), call_.num_threads, [&](int64_t i) {
      const int64_t count = std::min(block, length * call_.size - i * block);
      widen(index() + blocks_of(request)[i] * block, keys + i * block, count);
    });
  }

  // The sums of products [heads, seen], weighted, in their first row; -inf where a sum is no number or from `last` on.
  void score(const T* weights, float* products, int64_t seen, int64_t last) const {
    thread_local Scratch memory;
    memory.reserve(Scratch::bytes_for<float>(call_.heads));
    float* const factors = memory.take<float>(call_.heads);
    widen(weights, factors, call_.heads);
    for (int64_t head = 0; head < call_.heads; ++head) factors[head] *= call_.weight_scale;
    for (int64_t i = 0; i < seen; i += kLanes) {
      Floats sum = {};
      for (int64_t head = 0; head < call_.heads; ++head) {
        const Floats product = load(products + head * seen + i, seen - i) * call_.scale;
        sum = sum + select(product < Floats{}, Floats{}, product) * factors[head];
      }
      store(products + i, sum, seen - i);
    }
    for (int64_t i = 0; i < seen; ++i)
      if (i >= last || std::isnan(products[i])) products[i] = -INFINITY;
  }

  // The places of the largest scores [seen], ascending; of equal ones the first. Scores behind those are lost.
  void largest(const float* scores, int64_t seen, int32_t* to) const {
    thread_local Scratch memory;
    memory.reserve(Scratch::bytes_for<float>(seen));
    float* const ordered = memory.take<float>(seen);
    std::copy_n(scores, seen, ordered);
    const int64_t count = call_.num_chosen;
    std::nth_element(ordered, ordered + count - 1, ordered + seen, std::greater<float>());
    const float least = ordered[count - 1];
    int64_t missing = count - std::count_if(ordered, ordered + count, [&](float score) { return score > least; });
    for (int64_t i = 0; i < seen; ++i)
      if (scores[i] > least || (scores[i] == least && missing-- > 0)) *to++ = int32_t(i);
  }

  const ChooseCall& call_;
};

}  // namespace

// Stores the keys of the call's tokens, and writes what tokens see. Returns 1; 0 if all see all keys before them: then
// `chosen` is not written; -1 if the batch does not fit its tensors.
EXPORT int pagewire_choose(const ChooseCall* call) {
  int result = -1;
  dispatch(call->dtype, [&](auto element) {
    const Choice<decltype(element)> choice(*call);
    if (!choice.is_valid()) return;
    choice.store_keys();
    if ((result = !choice.sees_all()))
      for (int64_t request = 0; request < call->requests; ++request) choice.choose(request);
  });
  return result;
}
