// What LoRA adapters add to a product: out += scale * b (a x), for the rows that have adapters.
//
// An adapter's rows are read and written where they lie, by their indices. First h = scale * a x is made for all rows,
// in float32, then b's rows are added up, each times its number of h. Every element of h is one chain of sums in the order
// of k, over the lanes of a vector, and every element of the result one chain in the order of the rank: its bits do
// not depend on the rows beside it. Sums are added to the product's result, which has been rounded.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace {

constexpr int64_t kParallelWork = 1 << 17;  // multiply-adds below which one thread is faster
constexpr int kBlock = 4;                   // rows whose sums are in registers together, and ranks of a
constexpr int kVectors = kRegisters == 32 ? 4 : 2;
constexpr int64_t kRowChunk = 8, kRankChunk = 16, kColumnChunk = 1024;  // of a work item
constexpr int64_t kLead = 8192;  // bytes that the reading of an adapter for one row runs ahead
constexpr int64_t kPanel = 64;  // columns of b that lie together, a multiple of what is summed up at a time

// A link of the chain along k: x in the model's type, a in that or in float32.
template <class T, class A>
struct Link {
  static constexpr int64_t depth = kLanes;
  using Factor = Floats;
  template <class E>
  static INLINE Factor whole(const E* from) { return load(from); }
  template <class E>
  static INLINE Factor part(const E* from, int64_t left) { return load(from, left); }
  static INLINE Floats add(Floats sum, Factor x, Factor a) { return fma(x, a, sum); }
};

#if defined(PAGEWIRE_PAIRS)
template <>
struct Link<bf16, bf16> {
  static constexpr int64_t depth = 2 * kLanes;
  using Factor = Pairs;
  static INLINE Factor whole(const bf16* from) { return load_raw<Pairs>(from); }
  static INLINE Factor part(const bf16* from, int64_t left) {
    bf16 elements[depth] = {};
    std::memcpy(elements, from, size_t(left) * sizeof(bf16));
    return load_raw<Pairs>(elements);
  }
  static INLINE Floats add(Floats sum, Factor x, Factor a) { return add_products(sum, x, a); }
};
#endif

// Fetches what will be read soon: an adapter's matrices lie one behind the other in the order of their use.
template <class E>
INLINE void ahead(const E* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + kLead, 0, 3);
}

// A part of an adapter and its rows.
struct Job {
  const Delta* delta;
  const int64_t* rows;
  int64_t count;
  float* h;  // [count, rank]

  int64_t row_chunks() const { return (count + kRowChunk - 1) / kRowChunk; }
  int64_t shrinks() const { return row_chunks() * ((delta->rank + kRankChunk - 1) / kRankChunk); }
  int64_t expansions() const { return row_chunks() * ((delta->n + kColumnChunk - 1) / kColumnChunk); }
};

template <class T>
class Adaptation {
 public:
  explicit Adaptation(const AdaptCall& call) : call_(call), jobs_(jobs_of_thread()) {
    jobs_.clear();
    const AdapterRows& adapters = *call.adapters;
    const auto* const tables = static_cast<const Deltas* const*>(adapters.tables);
    int64_t width = 0;
    for (int64_t i = 0; i < adapters.matrices * adapters.count; ++i) {
      const int64_t first = adapters.starts[i], count = adapters.starts[i + 1] - first;
      if (!count) continue;
      const Deltas& deltas = tables[i % adapters.count][call.product + i / adapters.count];
      for (int64_t part = 0; part < deltas.count; ++part) {
        const Delta& delta = deltas.parts[part];
        jobs_.push_back({&delta, adapters.rows + first, count, nullptr});
        width += count * delta.rank;
        work_ += count * (call.k + delta.n) * delta.rank;
      }
    }
    thread_local Scratch scratch;
    scratch.reserve(Scratch::bytes_for<float>(width));
    float* h = scratch.take<float>(width);
    for (Job& job : jobs_) {
      job.h = h;
      h += job.count * job.delta->rank;
    }
  }

  void run() const {
    if (jobs_.empty()) return;
    const auto shrink = [this](const Job& job, int64_t item) {
      if (job.delta->is_float)
        this->template shrink<float>(job, item);
      else
        this->template shrink<T>(job, item);
    };
    const auto expand = [this](const Job& job, int64_t item) {
      if (!job.delta->b && job.delta->rank)  // b of no rows may be null, too
        this->replace(job, item);
      else if (job.delta->is_float)
        this->template expand<float>(job, item);
      else
        this->template expand<T>(job, item);
    };
    for_items([](const Job& job) { return job.shrinks(); }, shrink);
    for_items([](const Job& job) { return job.expansions(); }, expand);
  }

 private:
  static std::vector<Job>& jobs_of_thread() {
    thread_local std::vector<Job> jobs;
    return jobs;
  }

  // Calls body(job, item) for as many items of each job as `count` says.
  template <class Count, class Body>
  void for_items(const Count& count, const Body& body) const {
    thread_local std::vector<int64_t> kept;
    std::vector<int64_t>& ends = kept;  // a lambda would take the name for its own thread's
    ends.clear();
    for (const Job& job : jobs_) ends.push_back((ends.empty() ? 0 : ends.back()) + count(job));
    parallel_for(ends.back(), work_ < kParallelWork ? 1 : call_.num_threads, [&](int64_t item) {
      const size_t i = size_t(std::upper_bound(ends.begin(), ends.end(), item) - ends.begin());
      body(jobs_[i], i ? item - ends[i - 1] : item);
    });
  }

  // h = scale * a x, for some rows and ranks.
  template <class A>
  void shrink(const Job& job, int64_t item) const {
    const Delta& delta = *job.delta;
    const int64_t begin = item % job.row_chunks() * kRowChunk, end = std::min(begin + kRowChunk, job.count);
    const int64_t first = item / job.row_chunks() * kRankChunk, last = std::min(first + kRankChunk, delta.rank);
    const A* const a = static_cast<const A*>(delta.a);
    for (int64_t row = begin; row < end;) {
      const int rows = end - row >= kBlock ? kBlock : 1;
      const T* x[kBlock];
      for (int r = 0; r < rows; ++r) x[r] = static_cast<const T*>(call_.x) + job.rows[row + r] * call_.x_stride;
      for (int64_t rank = first; rank < last;) {
        const int ranks = last - rank >= kBlock ? kBlock : 1;
        const A* const from = a + rank * call_.k;
        float* const h = job.h + row * delta.rank + rank;
        if (rows > 1 && ranks > 1) dots<kBlock, kBlock>(x, from, delta, h);
        if (rows > 1 && ranks == 1) dots<kBlock, 1>(x, from, delta, h);
        if (rows == 1 && ranks > 1) dots<1, kBlock>(x, from, delta, h);
        if (rows == 1 && ranks == 1) dots<1, 1>(x, from, delta, h);
        rank += ranks;
      }
      row += rows;
    }
  }

  template <int kRows, int kRanks, class A>
  void dots(const T* const* x, const A* a, const Delta& delta, float* h) const {
    using L = Link<T, A>;
    const int64_t k = call_.k;
    Floats sums[kRows][kRanks] = {};
    const auto link = [&](int64_t i, const auto& factor) INLINE_LAMBDA {
      typename L::Factor columns[kRanks];
#pragma GCC unroll 4
      for (int c = 0; c < kRanks; ++c) {
        columns[c] = factor(a + c * k + i);
        if (kRows == 1) ahead(a + c * k + i);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto row = factor(x[r] + i);
#pragma GCC unroll 4
        for (int c = 0; c < kRanks; ++c) sums[r][c] = L::add(sums[r][c], row, columns[c]);
      }
    };
    int64_t i = 0;
    for (; i + L::depth <= k; i += L::depth) link(i, [](const auto* from) INLINE_LAMBDA { return L::whole(from); });
    if (i < k) link(i, [&](const auto* from) INLINE_LAMBDA { return L::part(from, k - i); });
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kRanks; ++c) h[r * delta.rank + c] = delta.scale * sum_lanes(sums[r][c]);
  }

  // out += h b, for some rows and columns.
  template <class B>
  void expand(const Job& job, int64_t item) const {
    const Delta& delta = *job.delta;
    const int64_t begin = item % job.row_chunks() * kRowChunk, end = std::min(begin + kRowChunk, job.count);
    const int64_t first = item / job.row_chunks() * kColumnChunk, last = std::min(first + kColumnChunk, delta.n);
    constexpr int64_t step = kVectors * kLanes;
    for (int64_t column = first; column < last; column += step)
      for (int64_t row = begin; row < end;) {
        const int rows = end - row >= kBlock ? kBlock : 1;
        if (rows > 1)
          sum_columns<kBlock, B>(job, row, column);
        else
          sum_columns<1, B>(job, row, column);
        row += rows;
      }
  }

  template <int kRows, class B>
  void sum_columns(const Job& job, int64_t row, int64_t column) const {
    const Delta& delta = *job.delta;
    const int64_t left = delta.n - column;
    const B* const b = static_cast<const B*>(delta.b) + column / kPanel * kPanel * delta.rank + column % kPanel;
    const float* const h = job.h + row * delta.rank;
    Floats sums[kRows][kVectors] = {};
    for (int64_t rank = 0; rank < delta.rank; ++rank) {
      Floats factors[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const B* const from = b + rank * kPanel + v * kLanes;
        factors[v] = load(from);
        if (kRows == 1) ahead(from);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          sums[r][v] = fma(broadcast(h[r * delta.rank + rank]), factors[v], sums[r][v]);
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors && v * kLanes < left; ++v)
        keep(delta, sums[r][v], job.rows[row + r], column + v * kLanes, left - v * kLanes);
  }

  // Adds a sum to the product's result, and applies what else changes it.
  INLINE void keep(const Delta& delta, Floats sum, int64_t row, int64_t column, int64_t left) const {
    T* const out = static_cast<T*>(call_.out) + row * call_.n + delta.first + column;
    Floats value = load(out, left) + sum;
    if (delta.gain) value = value * load(delta.gain + column, left);
    if (delta.shift) value = value + load(delta.shift + column, left);
    store(out, value, left);
  }

  // out = h + shift, for some rows and columns.
  void replace(const Job& job, int64_t item) const {
    const Delta& delta = *job.delta;
    const int64_t begin = item % job.row_chunks() * kRowChunk, end = std::min(begin + kRowChunk, job.count);
    const int64_t first = item / job.row_chunks() * kColumnChunk, last = std::min(first + kColumnChunk, delta.n);
    for (int64_t row = begin; row < end; ++row) {
      const float* const h = job.h + row * delta.rank;
      T* const out = static_cast<T*>(call_.out) + job.rows[row] * call_.n + delta.first;
      for (int64_t column = first; column < last; column += kLanes) {
        const int64_t left = last - column;
        Floats value = load(h + column, left);
        if (delta.shift) value = value + load(delta.shift + column, left);
        store(out + column, value, left);
      }
    }
  }

  const AdaptCall& call_;
  std::vector<Job>& jobs_;
  int64_t work_ = 0;
};

}  // namespace

EXPORT void pagewire_adapt(const AdaptCall* call) {
  dispatch(call->dtype, [&](auto element) { Adaptation<decltype(element)>(*call).run(); });
}
