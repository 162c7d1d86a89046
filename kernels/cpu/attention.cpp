// Attention over a paged KV cache, for CPUs.
//
// The unit of arithmetic is a KV tile: kTileKeys consecutive positions, counted from position 0 of the
// sequence. For one query row and one KV tile the kernel computes a partial result (max logit, sum of
// exponentials, weighted sum of V), and the partial results of a row's tiles are merged in ascending order.
// Nothing else enters a row's arithmetic: not the rows computed beside it, not the chunk of the prompt it
// arrives in, not the thread that runs it. So the output has the same bits in any batch.
//
// The unit of scheduling is a task: one query tile (all query heads of one KV head, for some consecutive
// tokens) against a range of KV tiles. A query tile that holds too much of the step's work is cut into
// several tasks. Each of those stores its partial results, and whichever finishes last merges them.
//
// Inside, the lanes of a vector are keys in the one matrix product and columns of V in the other, and both keep a
// block of kRows x kColumns vectors in registers. Blocks hold K and V in just this order (layout.h), so both are read
// in place. What lies at positions outside the needed range stays in lanes that are masked, or is read as zeros.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int kTileKeys = 256;
constexpr int kTileRows = 96;  // query rows to aim at: enough to pay for reading K and V
constexpr int kRows = 6;
constexpr int kColumns = kLanes == 16 ? 4 : 2;  // kRows x kColumns accumulators fit in the registers
constexpr int kPanelKeys = kColumns * kLanes;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Asks for memory to be brought into the second-level cache; any address will do.
INLINE void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// ---- products of queries and keys, into float32; K as layout.h keeps it ----

// One element of a query and of each key at a step.
template <class T>
struct SingleProduct {
  using Element = float;
  using Keys = Floats;
  static INLINE Element query(const T* q, int64_t) { return broadcast(*q)[0]; }
  static INLINE Keys keys(const T* at) { return load(at); }
  static INLINE Floats multiply_add(Element q, Keys k, Floats sum) { return fma(broadcast(q), k, sum); }
};

// Pairs of bfloat16, taken apart.
struct SplitProduct {
  struct Element {
    float first, second;
  };
  using Keys = Words;
  static INLINE Element query(const bf16* q, int64_t left) {
    return {broadcast(q[0])[0], left > 1 ? broadcast(q[1])[0] : 0.0f};
  }
  static INLINE Keys keys(const bf16* at) { return load_raw<Words>(at); }
  static INLINE Floats multiply_add(Element q, Keys k, Floats sum) {
    sum = fma(broadcast(q.first), bit_cast<Floats>(k << 16), sum);
    return fma(broadcast(q.second), bit_cast<Floats>(k & 0xffff0000u), sum);
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, multiplied by one instruction.
struct PairProduct {
  using Element = uint32_t;
  using Keys = __m512bh;
  static INLINE Element query(const bf16* q, int64_t left) {
    return uint32_t(q[0].bits) | (left > 1 ? uint32_t(q[1].bits) << 16 : 0);
  }
  static INLINE Keys keys(const bf16* at) { return load_raw<__m512bh>(at); }
  static INLINE Floats multiply_add(Element q, Keys k, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(q)), k);
  }
};
using BrainProduct = PairProduct;
#else
using BrainProduct = SplitProduct;
#endif
template <class T>
using Product = std::conditional_t<std::is_same_v<T, bf16>, BrainProduct, SingleProduct<T>>;

// ---- scratch ----

// The softmax state of some rows: max logit (times the logarithm of e to base 2), sum of exponentials, weighted sum
// of V. There is room for a multiple of kLanes rows.
struct Partial {
  float* max;
  float* sum;
  float* values;  // [rows, width]

  static constexpr int64_t floats(int64_t rows, int64_t width) { return round_up(rows, kGranule) * (width + 2); }
  static Partial at(float* memory, int64_t rows) {
    rows = round_up(rows, kGranule);
    return {memory, memory + rows, memory + 2 * rows};
  }
};

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory that a thread keeps between calls and that only grows.
class Scratch {
 public:
  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes <= capacity_) return;
    memory_.reset();
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, size_t(round_up(int64_t(bytes), 64)))));
    if (!memory_) std::abort();
    capacity_ = bytes;
  }
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += bytes_for<T>(count);
    return taken;
  }
  template <class T>
  static size_t bytes_for(int64_t count) {
    return size_t(round_up(count * int64_t(sizeof(T)), 64));
  }

 private:
  std::unique_ptr<char, FreeMemory> memory_;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

// What one thread needs to work on one query tile.
struct Workspace {
  float* queries;  // [rows, steps], elements of the product
  float* panel;    // [steps, kPanelKeys], keys of small blocks side by side
  float* scores;   // [rows, kTileKeys], logits and then probabilities
  float* values;   // [kTileKeys, width], V where it cannot be read in place
  char* zeros;     // a granule of keys
  Partial tile, total;

  static Workspace take(Scratch& scratch, int64_t rows, int64_t head_dim, int64_t width) {
    head_dim = round_up(head_dim, 2);
    const int64_t counts[] = {rows * head_dim,     head_dim * kPanelKeys,         rows * kTileKeys, kTileKeys * width,
                              kGranule * head_dim, Partial::floats(rows, width), Partial::floats(rows, width)};
    size_t bytes = 0;
    for (int64_t count : counts) bytes += Scratch::bytes_for<float>(count);
    scratch.reserve(bytes);
    float* at[std::size(counts)];
    for (size_t i = 0; i < std::size(counts); ++i) at[i] = scratch.take<float>(counts[i]);
    std::memset(at[4], 0, size_t(counts[4]) * sizeof(float));
    return {at[0], at[1], at[2], at[3], reinterpret_cast<char*>(at[4]), Partial::at(at[5], rows),
            Partial::at(at[6], rows)};
  }
};

// ---- the two matrix products ----

// Calls visit(first, std::integral_constant<int, R>) over `rows` rows in groups of R <= kRows, nearly equal.
template <int R = kRows, class Visit>
INLINE void dispatch_rows(int64_t rows, int64_t first, const Visit& visit) {
  if (rows == R) return visit(first, std::integral_constant<int, R>{});
  if constexpr (R > 1) dispatch_rows<R - 1>(rows, first, visit);
}

template <class Visit>
INLINE void for_row_groups(int64_t rows, const Visit& visit) {
  const int64_t groups = (rows + kRows - 1) / kRows;
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

// scores[row][key] = q[row] . k[key] for R rows and one panel. With Fetch the values of its keys are fetched meanwhile.
template <class P, int R, bool Fetch, class T>
void multiply_keys(const typename P::Element* queries, const Panel<T>& panel, const T* const* values, int64_t steps,
                   float* scores) {
  Floats sums[R][kColumns] = {};
  for (int64_t step = 0; step < steps; ++step) {
    typename P::Keys keys[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      keys[c] = P::keys(panel.at[c] + step * panel.stride);
      if (Fetch) fetch(values[c * kLanes / kPair<T>] + step * kLanes * kPair<T>);
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
    for (int c = 0; c < kColumns; ++c) store(scores + r * kTileKeys + c * kLanes, sums[r][c]);
}

// ---- products of probabilities and values, into float32; V as layout.h keeps it ----

// One key at a time. Staged: what V is copied to where it cannot be read in place.
template <class T>
struct SingleValue {
  using Staged = float;
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

#if defined(__AVX512BF16__)
// Multiplied by one instruction. Probabilities are rounded to bfloat16, as in eager attention; those of the keys 2 i
// and 2 i + 1 then lie at i.
struct PairValue : PairedValue {
  static INLINE __m512bh load(const bf16* row, int64_t column) { return load_raw<__m512bh>(row + 2 * column); }
  static INLINE Floats multiply_add(const float* probabilities, int key, __m512bh v, Floats sum) {
    const __m512bh p = (__m512bh)_mm512_set1_epi32(load_raw<int>(probabilities + key / 2));
    return (Floats)_mm512_dpbf16_ps((__m512)sum, p, v);
  }
  static INLINE void keep(Floats low, Floats high, float* probabilities, int key) {
    store(probabilities + key / 2, (Floats)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }
};
using BrainValue = PairValue;
#else
using BrainValue = SplitValue;
#endif
template <class T>
using Value = std::conditional_t<std::is_same_v<T, bf16>, BrainValue, SingleValue<T>>;

// values[row] = sum over keys of probability[row][key] * v[key], for R rows and C vectors of V's width.
// With Fetch the keys `ahead` are fetched meanwhile.
template <class T, class V, int R, int C, bool Fetch>
void multiply_values(const float* probabilities, const V* const* rows, const T* const* ahead, int64_t column,
                     int begin, int end, float* values, int64_t width) {
  constexpr int keys = int(kPair<T>);
  Floats sums[R][C] = {};
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
        sums[r][c] = Value<T>::multiply_add(probabilities + r * kTileKeys, key, v[c], sums[r][c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(values + r * width + column + c * kLanes, sums[r][c]);
}

// All rows and the whole width of V, which is a multiple of kLanes here.
template <class T, class V>
void weighted_values(const float* probabilities, int64_t num_rows, const V* const* rows, const T* const* ahead,
                     int begin, int end, float* values, int64_t width) {
  const auto columns = [&](int64_t column, auto count) {
    for_row_groups(num_rows, [&](int64_t first, auto size) {
      const auto multiply = first == 0 ? multiply_values<T, V, size.value, count.value, true>
                                       : multiply_values<T, V, size.value, count.value, false>;
      multiply(probabilities + first * kTileKeys, rows, ahead, column, begin, end, values + first * width, width);
    });
  };
  constexpr int64_t step = kColumns * kLanes;
  int64_t column = 0;
  for (; column + step <= width; column += step) columns(column, std::integral_constant<int, kColumns>{});
  if constexpr (kColumns > 2)
    for (; column + 2 * kLanes <= width; column += 2 * kLanes) columns(column, std::integral_constant<int, 2>{});
  for (; column < width; column += kLanes) columns(column, std::integral_constant<int, 1>{});
}

// ---- softmax ----

constexpr float kLog2E = 1.44269504f;

// What turns the raw products of one query row with one KV tile into probabilities. Keys [begin, end) of the tile,
// whole panels, were computed; keys [visible_begin, visible_end) count.
struct SoftmaxRow {
  const AttentionCall& call;
  float slope;       // of ALiBi
  int64_t distance;  // key position - query position at key 0
  int begin, end, visible_begin, visible_end;

  // Probabilities relative to the row's own maximum.
  template <class T>
  void run(float* scores, float* row_max, float* row_sum) const {
    // A plain scale needs no pass of its own: it goes into the exponent.
    const bool plain = !call.softcap && !call.alibi && call.scale > 0.0f;
    if (!plain) transform(scores);
    const float factor = plain ? call.scale * kLog2E : kLog2E;
    if (visible_begin <= begin && end <= visible_end)
      exponentiate<T, false>(factor, scores, row_max, row_sum);
    else
      exponentiate<T, true>(factor, scores, row_max, row_sum);
  }

 private:
  void transform(float* scores) const {
    const float softcap_inverse = call.softcap ? 1.0f / call.softcap : 0.0f;
    for (int key = begin; key < end; key += kLanes) {
      Floats s = load(scores + key) * broadcast(call.scale);
      if (call.softcap) s = call.softcap * tanh(s * softcap_inverse);
      const Ints keys = lane_numbers() + (key + int32_t(distance));
      if (call.alibi) s = s + slope * __builtin_convertvector(keys, Floats);
      store(scores + key, s);
    }
  }

  template <bool Masked>
  INLINE Floats visible(Floats v, int key, float otherwise) const {
    if (!Masked) return v;
    const Ints keys = lane_numbers() + key;
    return select((keys >= visible_begin) & (keys < visible_end), v, broadcast(otherwise));
  }

  template <class T, bool Masked>
  void exponentiate(float factor, float* scores, float* row_max, float* row_sum) const {
    Floats tops[2] = {broadcast(kMinusInfinity), broadcast(kMinusInfinity)};
    for (int key = begin; key < end; key += 2 * kLanes)
      for (int i = 0; i < 2; ++i) {
        const int at = key + i * kLanes;
        tops[i] = max(tops[i], visible<Masked>(load(scores + at), at, kMinusInfinity));
      }
    *row_max = max_lanes(max(tops[0], tops[1])) * factor;
    const Floats base = broadcast(*row_max == kMinusInfinity ? 0.0f : -*row_max);
    Floats sums[2] = {};
    for (int key = begin; key < end; key += 2 * kLanes) {
      Floats p[2];
      for (int i = 0; i < 2; ++i) {
        const int at = key + i * kLanes;
        p[i] = visible<Masked>(exp2(fma(load(scores + at), broadcast(factor), base)), at, 0.0f);
        sums[i] += p[i];
      }
      Value<T>::keep(p[0], p[1], scores, key);
    }
    *row_sum = sum_lanes(sums[0] + sums[1]);
  }
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

// ---- tiles ----

struct QueryTile {
  int64_t request, kv_head;
  int64_t first_token, num_tokens;  // tokens of the batch
  int64_t first_position;           // in the sequence
  int64_t kv_tile_begin, kv_tile_end;
  int64_t first_partial = -1;  // where its KV tiles store partial results, when cut into several tasks
  int64_t countdown = -1;      // and which countdown tells the last of these
};

struct Task {
  int64_t query_tile;
  int64_t kv_tile_begin, kv_tile_end;
};

// Keys and values that some query tile needs.
struct Stretch {
  const QueryTile& query_tile;
  int64_t kv_tile;
};

int64_t window_begin(const AttentionCall& call, int64_t position) {
  return call.window ? std::max<int64_t>(0, position + 1 - call.window) : 0;
}

template <class T>
class TileKernel {
  using P = Product<T>;
  using Element = typename P::Element;
  using Staged = typename Value<T>::Staged;

 public:
  TileKernel(const AttentionCall& call, const QueryTile& tile, const Workspace& work)
      : call_(call),
        tile_(tile),
        work_(work),
        group_(call.num_heads / call.num_kv_heads),
        rows_(tile.num_tokens * group_),
        steps_((call.head_dim + kPair<T> - 1) / kPair<T>),
        width_(round_up(call.v_head_dim, kLanes)),
        granule_(granule_size(call.block_size)),
        queries_(reinterpret_cast<Element*>(work.queries)) {}

  int64_t rows() const { return rows_; }

  void load_queries() {
    for (int64_t row = 0; row < rows_; ++row) {
      const T* q = static_cast<const T*>(call_.q) + (tile_.first_token + row / group_) * call_.q_token_stride +
                   (tile_.kv_head * group_ + row % group_) * call_.q_head_stride;
      for (int64_t step = 0; step < steps_; ++step)
        queries_[row * steps_ + step] = P::query(q + step * kPair<T>, call_.head_dim - step * kPair<T>);
    }
  }

  // The partial result of every row for KV tile after KV tile, in ascending order. `ahead` comes after it.
  void attend(int64_t kv_tile, const Stretch& ahead, const Partial& result) {
    Keys& keys = keys_[kv_tile % 2];
    Keys& next = keys_[(kv_tile + 1) % 2];
    if (!found_) find_keys({tile_, kv_tile}, keys);
    find_keys(ahead, next);
    found_ = true;

    const int begin = keys.begin / kPanelKeys * kPanelKeys, end = int(round_up(keys.end, kPanelKeys));
    for (int key = begin; key < end; key += kPanelKeys) {
      const Panel<T> panel = find_panel(keys, key);
      for_row_groups(rows_, [&](int64_t first, auto size) {
        const auto multiply =
            first == 0 ? multiply_keys<P, size.value, true, T> : multiply_keys<P, size.value, false, T>;
        multiply(queries_ + first * steps_, panel, keys.v + key / kPair<T>, steps_,
                 work_.scores + first * kTileKeys + key);
      });
    }
    const int64_t start = kv_tile * kTileKeys;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t position = tile_.first_position + row / group_;
      const int visible_begin = int(std::max<int64_t>(0, window_begin(call_, position) - start));
      const int visible_end = int(std::max<int64_t>(0, std::min<int64_t>(kTileKeys, position + 1 - start)));
      const float slope = call_.alibi ? call_.alibi[tile_.kv_head * group_ + row % group_] : 0.0f;
      SoftmaxRow{call_, slope, start - position, begin, end, visible_begin, visible_end}.template run<T>(
          work_.scores + row * kTileKeys, result.max + row, result.sum + row);
    }
    multiply_values(keys, next, result.values);
  }

  void write(const Partial& total) {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t head = tile_.kv_head * group_ + row % group_;
      T* out = static_cast<T*>(call_.out) +
               ((tile_.first_token + row / group_) * call_.num_heads + head) * call_.v_head_dim;
      float scale = 1.0f, sum = total.sum[row];
      if (call_.sinks) {
        const float sink = call_.sinks[head] * kLog2E, top = std::max(total.max[row], sink);
        scale = exp2(broadcast(total.max[row] - top))[0];
        sum = sum * scale + exp2(broadcast(sink - top))[0];
      }
      for (int64_t i = 0; i < call_.v_head_dim; i += kLanes)
        store(out + i, load(total.values + row * width_ + i) * scale / sum, call_.v_head_dim - i);
    }
  }

 private:
  // Where one KV tile lies: granules of K, zeros where none of [begin, end) is in them; rows of V in [begin, end).
  struct Keys {
    int begin, end;
    const T* k[kTileKeys];
    const T* v[kTileKeys];
  };

  void find_keys(const Stretch& stretch, Keys& keys) {
    const QueryTile& tile = stretch.query_tile;
    const int64_t start = stretch.kv_tile * kTileKeys;
    const int64_t last_position = tile.first_position + tile.num_tokens - 1;
    keys.begin = int(std::max<int64_t>(0, window_begin(call_, tile.first_position) - start));
    keys.end = int(std::min<int64_t>(kTileKeys, last_position + 1 - start));

    const T* zeros = reinterpret_cast<const T*>(work_.zeros);
    std::fill_n(keys.k, kTileKeys / granule_, zeros);
    std::fill_n(keys.v, kTileKeys / kPair<T>, zeros);
    const int32_t* blocks = call_.block_table + tile.request * call_.block_table_stride;
    for (int key = int(keys.begin / granule_ * granule_); key < keys.end; key += int(granule_)) {
      const int64_t block = blocks[(start + key) / call_.block_size], row = (start + key) % call_.block_size;
      keys.k[key / granule_] = static_cast<const T*>(call_.k_cache) + block * call_.k_block_stride +
                               tile.kv_head * call_.k_head_stride + row * call_.head_dim;
      const T* v = static_cast<const T*>(call_.v_cache) + block * call_.v_block_stride +
                   tile.kv_head * call_.v_head_stride + row * call_.v_head_dim;
      for (int64_t i = 0; i < granule_; i += kPair<T>) keys.v[(key + i) / kPair<T>] = v + i * call_.v_head_dim;
    }
  }

  // Granules that fill a vector are read in place; smaller ones are put side by side.
  Panel<T> find_panel(const Keys& keys, int first) const {
    Panel<T> panel;
    const bool in_place = granule_ == kGranule && call_.head_dim % kPair<T> == 0;
    panel.stride = (in_place ? kGranule : kPanelKeys) * kPair<T>;
    T* gathered = reinterpret_cast<T*>(work_.panel);
    for (int c = 0; c < kColumns; ++c) {
      const int key = first + c * kLanes;
      panel.at[c] = in_place ? keys.k[key / kGranule] + key % kGranule * kPair<T> : gathered + c * kLanes * kPair<T>;
    }
    const int64_t count = std::min<int64_t>(granule_, kPanelKeys);
    for (int64_t i = 0; !in_place && i < kPanelKeys; i += count)
      gather(keys.k[(first + i) / granule_], (first + i) % granule_, count, gathered + i * kPair<T>);
    return panel;
  }

  // `count` keys of a granule, from its key `first` on.
  void gather(const T* granule, int64_t first, int64_t count, T* panel) const {
    constexpr int64_t pair = kPair<T>;
    const int64_t whole = call_.head_dim / pair;
    for (int64_t step = 0; step < whole; ++step)
      std::memcpy(panel + step * kPanelKeys * pair, granule + (step * granule_ + first) * pair,
                  size_t(count * pair) * sizeof(T));
    for (int64_t i = 0; whole < steps_ && i < count; ++i) {
      panel[(whole * kPanelKeys + i) * pair] = granule[whole * granule_ * pair + first + i];
      panel[(whole * kPanelKeys + i) * pair + 1] = T{};
    }
  }

  void multiply_values(Keys& keys, const Keys& next, float* values) {
    const bool ragged = width_ != call_.v_head_dim;
    const auto multiply = [&](const auto* const* rows) {
      weighted_values<T>(work_.scores, rows_, rows, next.k, keys.begin, keys.end, values, width_);
    };
    if constexpr (std::is_same_v<Staged, T>) {
      // A pair of which one half is nobody's, too.
      if (ragged || keys.begin % kPair<T>) stage(keys, keys.begin, ragged ? keys.end : keys.begin + 1, keys.v);
      if (!ragged && keys.end % kPair<T>) stage(keys, keys.end - 1, keys.end, keys.v);
      multiply(keys.v);
    } else if (ragged || rows_ > 2 * kRows) {
      stage(keys, keys.begin, keys.end, staged_);
      multiply(staged_);
    } else {
      multiply(keys.v);
    }
  }

  // Copies rows of V, widened to whole vectors, with zeros for positions outside the needed range.
  void stage(const Keys& keys, int begin, int end, const Staged** staged) {
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

  const AttentionCall& call_;
  const QueryTile& tile_;
  const Workspace& work_;
  const int64_t group_, rows_, steps_, width_, granule_;
  Element* const queries_;
  Keys keys_[2];  // of this KV tile and of what comes after it, which is fetched meanwhile
  bool found_ = false;
  const Staged* staged_[kTileKeys];
};

// ---- the plan of one call ----

// A few microseconds of work: less than that, and waking a second thread costs more than it brings.
constexpr int64_t kParallelWork = 64;

struct Plan {
  std::vector<QueryTile> query_tiles;
  std::vector<Task> tasks;
  std::vector<int64_t> countdowns;  // the number of tasks of each query tile that was cut
  int64_t num_partials = 0;
  int64_t rows = 0;  // of the largest query tile
  int num_threads = 1;

  void build(const AttentionCall& call) {
    query_tiles.clear();
    tasks.clear();
    countdowns.clear();
    num_partials = rows = 0;
    int64_t work = 0;
    for (int64_t request = 0; request < call.num_requests; ++request) work += add_request(call, request);
    num_threads = work < kParallelWork ? 1 : call.num_threads;
    // Four tasks per thread at least, as far as the work can be cut.
    const int64_t most_work = num_threads == 1 ? work : std::max<int64_t>(1, work / (4 * num_threads));
    for (size_t i = 0; i < query_tiles.size(); ++i) add_tasks(int64_t(i), most_work);
  }

 private:
  int64_t add_request(const AttentionCall& call, int64_t request) {
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / group);
    const int64_t first = call.query_start_loc[request];
    const int64_t length = call.query_start_loc[request + 1] - first;
    const int64_t first_position = call.seq_lens[request] - length;
    const int64_t num_tiles = (length + tile_tokens - 1) / tile_tokens;
    int64_t work = 0;
    for (int64_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) {
      for (int64_t t = num_tiles - 1; t >= 0; --t) {  // the longest first
        QueryTile tile;
        tile.request = request;
        tile.kv_head = kv_head;
        tile.first_token = first + t * tile_tokens;
        tile.num_tokens = std::min(tile_tokens, length - t * tile_tokens);
        tile.first_position = first_position + t * tile_tokens;
        tile.kv_tile_begin = window_begin(call, tile.first_position) / kTileKeys;
        tile.kv_tile_end = (tile.first_position + tile.num_tokens - 1) / kTileKeys + 1;
        rows = std::max(rows, tile.num_tokens * group);
        work += cost(tile) * (tile.kv_tile_end - tile.kv_tile_begin);
        query_tiles.push_back(tile);
      }
    }
    return work;
  }

  // Of one KV tile: reading it costs about as much as a dozen rows of arithmetic.
  static int64_t cost(const QueryTile& tile) { return tile.num_tokens + 12; }

  void add_tasks(int64_t index, int64_t most_work) {
    QueryTile& tile = query_tiles[size_t(index)];
    const int64_t kv_tiles = tile.kv_tile_end - tile.kv_tile_begin;
    const int64_t pieces = std::min(kv_tiles, (kv_tiles * cost(tile) + most_work - 1) / most_work);
    if (pieces > 1) {
      tile.first_partial = num_partials;
      num_partials += kv_tiles;
      tile.countdown = int64_t(countdowns.size());
      countdowns.push_back(pieces);
    }
    for (int64_t piece = 0; piece < pieces; ++piece)
      tasks.push_back({index, tile.kv_tile_begin + kv_tiles * piece / pieces,
                       tile.kv_tile_begin + kv_tiles * (piece + 1) / pieces});
  }
};

// Whether all lengths and block numbers are such that only memory of the arguments is touched.
bool valid(const AttentionCall& call) {
  if (call.num_requests > 0 && call.query_start_loc[0] != 0) return false;
  if (call.dtype == 1 && call.block_size % kPair<bf16>) return false;
  for (int64_t request = 0; request < call.num_requests; ++request) {
    const int64_t end = call.query_start_loc[request + 1];
    const int64_t length = end - call.query_start_loc[request];
    const int64_t seq_len = call.seq_lens[request];
    if (length < 0 || end > call.num_tokens) return false;
    if (length == 0) continue;
    const int64_t num_blocks = (seq_len + call.block_size - 1) / call.block_size;
    if (seq_len < length || num_blocks > call.max_blocks) return false;
    const int32_t* blocks = call.block_table + request * call.block_table_stride;
    for (int64_t i = window_begin(call, seq_len - length) / call.block_size; i < num_blocks; ++i)
      if (blocks[i] < 0 || blocks[i] >= call.num_blocks) return false;
  }
  return true;
}

thread_local Plan thread_plan;
thread_local Scratch thread_workspace;
thread_local Scratch thread_partials;

template <class T>
void attention(const AttentionCall& call) {
  const int64_t num_queries = call.query_start_loc[call.num_requests];
  T* out = static_cast<T*>(call.out);
  const int64_t token_size = call.num_heads * call.v_head_dim;
  std::memset(out + num_queries * token_size, 0, size_t((call.num_tokens - num_queries) * token_size) * sizeof(T));

  Plan& plan = thread_plan;
  plan.build(call);
  const int64_t width = round_up(call.v_head_dim, kLanes);
  const int64_t partial_floats = Partial::floats(plan.rows, width);
  Scratch& partials = thread_partials;
  partials.reserve(Scratch::bytes_for<float>(plan.num_partials * partial_floats) +
                   Scratch::bytes_for<std::atomic<int64_t>>(int64_t(plan.countdowns.size())));
  float* partial_memory = partials.take<float>(plan.num_partials * partial_floats);
  auto* countdowns = partials.take<std::atomic<int64_t>>(int64_t(plan.countdowns.size()));
  for (size_t i = 0; i < plan.countdowns.size(); ++i)
    new (countdowns + i) std::atomic<int64_t>(plan.countdowns[i]);

  parallel_for(int64_t(plan.tasks.size()), plan.num_threads, [&](int64_t i) {
    const Task& task = plan.tasks[size_t(i)];
    const QueryTile& tile = plan.query_tiles[size_t(task.query_tile)];
    const Workspace work = Workspace::take(thread_workspace, plan.rows, call.head_dim, width);
    TileKernel<T> kernel(call, tile, work);
    kernel.load_queries();
    // Threads take tasks in turn, so the task after the next is most likely this thread's.
    const Task& later = plan.tasks[std::min(size_t(i + plan.num_threads), plan.tasks.size() - 1)];
    const auto attend = [&](int64_t kv_tile, const Partial& result) {
      if (kv_tile + 1 < task.kv_tile_end)
        kernel.attend(kv_tile, {tile, kv_tile + 1}, result);
      else
        kernel.attend(kv_tile, {plan.query_tiles[size_t(later.query_tile)], later.kv_tile_begin}, result);
    };
    if (tile.first_partial < 0) {
      attend(task.kv_tile_begin, work.total);
      for (int64_t kv_tile = task.kv_tile_begin + 1; kv_tile < task.kv_tile_end; ++kv_tile) {
        attend(kv_tile, work.tile);
        merge(work.total, work.tile, kernel.rows(), width);
      }
      return kernel.write(work.total);
    }
    const auto stored = [&](int64_t kv_tile) {
      return Partial::at(partial_memory + (tile.first_partial + kv_tile - tile.kv_tile_begin) * partial_floats,
                         plan.rows);
    };
    for (int64_t kv_tile = task.kv_tile_begin; kv_tile < task.kv_tile_end; ++kv_tile)
      attend(kv_tile, stored(kv_tile));
    if (countdowns[tile.countdown].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Partial total = stored(tile.kv_tile_begin);
    for (int64_t kv_tile = tile.kv_tile_begin + 1; kv_tile < tile.kv_tile_end; ++kv_tile)
      merge(total, stored(kv_tile), kernel.rows(), width);
    kernel.write(total);
  });
}

}  // namespace

// Returns 0, or 1 if the batch does not fit its tensors (then nothing was computed).
EXPORT int pagewire_attention(const AttentionCall* call) {
  if (!valid(*call)) return 1;
  dispatch(call->dtype, [&](auto element) { attention<decltype(element)>(*call); });
  return 0;
}
