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
// Inside, K is transposed panel by panel into scratch so that the lanes of a vector are keys, and both matrix
// products keep a block of kRows x kColumns vectors in registers. V is read in place, in pairs of keys where the CPU
// multiplies pairs of bfloat16. Positions outside the needed range point to a row of zeros, so stale memory never
// meets the arithmetic.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int kTileKeys = 256;
constexpr int kTileRows = 96;  // query rows to aim at: enough to pay for transposing K
constexpr int kRows = 6;
constexpr int kColumns = kLanes == 16 ? 4 : 2;  // kRows x kColumns accumulators fit in the registers
constexpr int kPanelKeys = kColumns * kLanes;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Asks for memory to be brought into the second-level cache; any address will do.
INLINE void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// ---- products: how elements of q and k are kept, and multiplied into float32 ----

// Float32 after conversion.
struct SingleProduct {
  using Element = float;
  static constexpr int kWidth = 1;  // elements of q and k in one element of scratch
  template <class T>
  static INLINE Floats load(const T* row, int64_t count) {
    return ::load(row, count);
  }
  static INLINE Floats multiply_add(float a, Floats b, Floats c) { return fma(broadcast(a), b, c); }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, multiplied by one instruction.
struct PairProduct {
  using Element = uint32_t;
  static constexpr int kWidth = 2;
  static INLINE Floats load(const bf16* row, int64_t count) {
    if (count >= 2 * kLanes) return load_raw<Floats>(row);
    bf16 pairs[2 * kLanes] = {};
    std::memcpy(pairs, row, size_t(count) * sizeof(bf16));
    return load_raw<Floats>(pairs);
  }
  static INLINE Floats multiply_add(uint32_t a, Floats b, Floats c) {
    return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
  }
};
template <class T>
using Product = std::conditional_t<std::is_same_v<T, bf16>, PairProduct, SingleProduct>;
#else
template <class T>
using Product = SingleProduct;
#endif

// ---- scratch ----

// The softmax state of some rows: max logit, sum of exponentials, weighted sum of V.
struct Partial {
  float* max;
  float* sum;
  float* values;  // [rows, width]
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
  float* queries;   // [rows, steps], elements of the product
  float* panel;     // [steps, kPanelKeys], one panel of K, transposed
  float* scores;    // [rows, kTileKeys], logits and then probabilities
  float* v_floats;  // [kTileKeys, width], V as float32, when that pays
  char* zeros;      // one row of K or V
  Partial tile, total;

  static Workspace take(Scratch& scratch, int64_t rows, int64_t head_dim, int64_t width) {
    const int64_t counts[] = {rows * head_dim, head_dim * kPanelKeys, rows * kTileKeys, kTileKeys * width,
                              rows,            rows,                  rows * width,     rows,
                              rows,            rows * width,          std::max(head_dim, width)};
    size_t bytes = 0;
    for (int64_t count : counts) bytes += Scratch::bytes_for<float>(count);
    scratch.reserve(bytes);
    float* at[std::size(counts)];
    for (size_t i = 0; i < std::size(counts); ++i) at[i] = scratch.take<float>(counts[i]);
    std::memset(at[10], 0, size_t(counts[10]) * sizeof(float));
    return {at[0], at[1], at[2], at[3], reinterpret_cast<char*>(at[10]), {at[4], at[5], at[6]}, {at[7], at[8], at[9]}};
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

// to[step][key] = row[key][step] for kLanes rows of K, of which at most kLanes steps are left.
template <class P, class T>
INLINE void transpose_block(const T* const* rows, int64_t first, int64_t elements, float* to) {
  Floats block[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) block[i] = P::load(rows[i] + first, elements);
  transpose(block);
  const int64_t steps = (elements + P::kWidth - 1) / P::kWidth;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (i < steps) store(to + i * kPanelKeys, block[i]);
}

// panel[step][key] = k[key][step] for kPanelKeys rows of K. Meanwhile the rows `ahead` are fetched.
template <class T, class P = Product<T>>
void transpose_keys(const T* const* rows, const T* const* ahead, int64_t head_dim, float* panel) {
  constexpr int whole = kLanes * P::kWidth;
  for (int key = 0; key < kPanelKeys; key += kLanes) {
    float* to = panel + key;
    int64_t first = 0;
    for (; first + whole <= head_dim; first += whole, to += kLanes * kPanelKeys) {
      for (int i = 0; i < kLanes; ++i) fetch(ahead[key + i] + first);
      transpose_block<P>(rows + key, first, whole, to);
    }
    if (first < head_dim) transpose_block<P>(rows + key, first, head_dim - first, to);
  }
}

// scores[row][key] = q[row] . k[key] for R rows and one panel.
template <class P, int R>
void multiply_keys(const float* queries, const float* panel, int64_t steps, float* scores) {
  using Element = typename P::Element;
  Floats sums[R][kColumns] = {};
  for (int64_t step = 0; step < steps; ++step) {
    Floats keys[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) keys[c] = load(panel + step * kPanelKeys + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Element q = load_raw<Element>(queries + r * steps + step);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) sums[r][c] = P::multiply_add(q, keys[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) store(scores + r * kTileKeys + c * kLanes, sums[r][c]);
}

// ---- values: how probabilities and V are multiplied into float32 ----

struct SingleValue {
  static constexpr int kKeys = 1;
  template <class V>
  static INLINE Floats load(const V* const* rows, int key, int64_t column) {
    return ::load(rows[key] + column);
  }
  static INLINE Floats multiply_add(const float* probabilities, int key, Floats v, Floats sum) {
    return fma(broadcast(probabilities[key]), v, sum);
  }
  static void round_probabilities(float*, int, int) {}
  template <class T>
  static INLINE void convert(const T* const* rows, int key, int64_t column, int64_t count, float* to) {
    store(to, ::load(rows[key] + column, count));
  }
};

#if defined(__AVX512BF16__)
// Two consecutive keys at a time. Probabilities are rounded to bfloat16, as in eager attention.
struct PairedValue {
  static constexpr int kKeys = 2;
  static INLINE Floats pair(__m256i even, __m256i odd) {
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
    return (Floats)_mm512_or_si512(_mm512_cvtepu16_epi32(even), high);
  }
  static INLINE Floats load(const bf16* const* rows, int key, int64_t column) {
    return pair(load_raw<__m256i>(rows[key] + column), load_raw<__m256i>(rows[key + 1] + column));
  }
  static INLINE Floats load(const float* const* rows, int key, int64_t column) { return ::load(rows[key] + column); }
  static INLINE Floats multiply_add(const float* probabilities, int key, Floats v, Floats sum) {
    const __m512bh p = (__m512bh)_mm512_set1_epi32(load_raw<int>(probabilities + key / 2));
    return (Floats)_mm512_dpbf16_ps((__m512)sum, p, (__m512bh)v);
  }
  // Keys [begin, end), both multiples of two vectors; the pair of keys 2 i and 2 i + 1 then lies at i.
  static void round_probabilities(float* probabilities, int begin, int end) {
    for (int key = begin; key < end; key += 2 * kLanes) {
      const Floats low = ::load(probabilities + key), high = ::load(probabilities + key + kLanes);
      store(probabilities + key / 2, (Floats)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
  }
  static INLINE void convert(const bf16* const* rows, int key, int64_t column, int64_t count, float* to) {
    bf16 padded[2][kLanes] = {};
    const bf16* pointers[2] = {rows[key] + column, rows[key + 1] + column};
    if (count < kLanes)
      for (int i = 0; i < 2; ++i) {
        std::memcpy(padded[i], pointers[i], size_t(count) * sizeof(bf16));
        pointers[i] = padded[i];
      }
    store(to, load(pointers, 0, 0));
  }
};
template <class T>
using Value = std::conditional_t<std::is_same_v<T, bf16>, PairedValue, SingleValue>;
#else
template <class T>
using Value = SingleValue;
#endif

// values[row] = sum over keys of probability[row][key] * v[key], for R rows and C vectors of V's width.
// With Fetch the rows `ahead` are fetched meanwhile.
template <class V, int R, int C, bool Fetch, class T>
void multiply_values(const float* probabilities, const V* const* rows, const T* const* ahead, int64_t column,
                     int begin, int end, float* values, int64_t width) {
  constexpr int keys = Value<T>::kKeys;
  Floats sums[R][C] = {};
  for (int key = begin / keys * keys; key < end; key += keys) {
    Floats v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      v[c] = Value<T>::load(rows, key, column + c * kLanes);
      if (Fetch && c * kLanes * sizeof(T) % 64 == 0)
        for (int i = 0; i < keys; ++i) fetch(ahead[key + i] + column + c * kLanes);
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
template <class V, class T>
void weighted_values(const float* probabilities, int64_t num_rows, const V* const* rows, const T* const* ahead,
                     int begin, int end, float* values, int64_t width) {
  const auto columns = [&](int64_t column, auto count) {
    for_row_groups(num_rows, [&](int64_t first, auto size) {
      const auto multiply = first == 0 ? multiply_values<V, size.value, count.value, true, T>
                                       : multiply_values<V, size.value, count.value, false, T>;
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

// Turns a row of raw products into probabilities relative to its own maximum. Keys [begin, end) of the tile
// were computed, keys [visible_begin, visible_end) count. `distance` is key position - query position at key 0.
void softmax_row(const AttentionCall& call, float slope, int64_t distance, int begin, int end,
                 int visible_begin, int visible_end, float* scores, float* row_max, float* row_sum) {
  const Floats scale = broadcast(call.scale);
  const Floats masked = broadcast(kMinusInfinity);
  const float softcap_inverse = call.softcap ? 1.0f / call.softcap : 0.0f;
  Floats top = masked;
  for (int key = begin; key < end; key += kLanes) {
    Floats s = load(scores + key) * scale;
    if (call.softcap) s = call.softcap * tanh(s * softcap_inverse);
    const Ints keys = lane_numbers() + key;
    if (call.alibi) s = s + slope * __builtin_convertvector(keys + int32_t(distance), Floats);
    s = select((keys >= visible_begin) & (keys < visible_end), s, masked);
    store(scores + key, s);
    top = max(top, s);
  }
  *row_max = max_lanes(top);
  Floats sum = {};
  const Floats subtrahend = broadcast(*row_max == kMinusInfinity ? 0.0f : *row_max);
  for (int key = begin; key < end; key += kLanes) {
    const Floats p = exp(load(scores + key) - subtrahend);
    store(scores + key, p);
    sum += p;
  }
  *row_sum = sum_lanes(sum);
}

// Merges the next KV tile's partial result into the total. A row that saw no key of the tile stays as it is.
void merge(const Partial& total, const Partial& next, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    if (next.max[row] == kMinusInfinity) continue;
    const float top = std::max(total.max[row], next.max[row]);
    const float keep = exp(total.max[row] - top);
    const float add = exp(next.max[row] - top);
    total.max[row] = top;
    total.sum[row] = total.sum[row] * keep + next.sum[row] * add;
    for (int64_t i = row * width; i < (row + 1) * width; i += kLanes)
      store(total.values + i,
            fma(load(total.values + i), broadcast(keep), load(next.values + i) * broadcast(add)));
  }
}

void clear(const Partial& partial, int64_t rows, int64_t width) {
  std::fill_n(partial.max, rows, kMinusInfinity);
  std::fill_n(partial.sum, rows, 0.0f);
  std::fill_n(partial.values, rows * width, 0.0f);
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

 public:
  TileKernel(const AttentionCall& call, const QueryTile& tile, const Workspace& work)
      : call_(call),
        tile_(tile),
        work_(work),
        group_(call.num_heads / call.num_kv_heads),
        rows_(tile.num_tokens * group_),
        steps_((call.head_dim + P::kWidth - 1) / P::kWidth),
        width_(round_up(call.v_head_dim, kLanes)) {}

  int64_t rows() const { return rows_; }

  void load_queries() {
    for (int64_t row = 0; row < rows_; ++row) {
      const T* q = static_cast<const T*>(call_.q) + (tile_.first_token + row / group_) * call_.q_token_stride +
                   (tile_.kv_head * group_ + row % group_) * call_.q_head_stride;
      for (int64_t step = 0; step < steps_; step += kLanes)
        store(work_.queries + row * steps_ + step,
              P::load(q + step * P::kWidth, call_.head_dim - step * P::kWidth), steps_ - step);
    }
  }

  // The partial result of every row for KV tile after KV tile, in ascending order. `ahead` comes after it.
  void attend(int64_t kv_tile, const Stretch& ahead, const Partial& result) {
    const int64_t start = kv_tile * kTileKeys;
    const Keys& keys = keys_[kv_tile % 2];
    Keys& next = keys_[(kv_tile + 1) % 2];
    if (!found_) find_keys({tile_, kv_tile}, keys_[kv_tile % 2]);
    find_keys(ahead, next);
    found_ = true;

    const int panel_begin = keys.begin / kPanelKeys * kPanelKeys;
    const int panel_end = int(round_up(keys.end, kPanelKeys));
    for (int key = panel_begin; key < panel_end; key += kPanelKeys) {
      transpose_keys<T>(keys.k + key, keys.v + key, call_.head_dim, work_.panel);
      for_row_groups(rows_, [&](int64_t first, auto size) {
        multiply_keys<P, size.value>(work_.queries + first * steps_, work_.panel, steps_,
                                     work_.scores + first * kTileKeys + key);
      });
    }
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t position = tile_.first_position + row / group_;
      const int visible_begin = int(std::max<int64_t>(0, window_begin(call_, position) - start));
      const int visible_end = int(std::max<int64_t>(0, std::min<int64_t>(kTileKeys, position + 1 - start)));
      const float slope = call_.alibi ? call_.alibi[tile_.kv_head * group_ + row % group_] : 0.0f;
      softmax_row(call_, slope, start - position, panel_begin, panel_end, visible_begin, visible_end,
                  work_.scores + row * kTileKeys, result.max + row, result.sum + row);
      Value<T>::round_probabilities(work_.scores + row * kTileKeys, panel_begin, panel_end);
    }
    if (width_ != call_.v_head_dim || (!std::is_same_v<T, float> && rows_ > 2 * kRows)) {
      convert_values(keys);
      weighted_values(work_.scores, rows_, v_floats_, next.k, keys.begin, keys.end, result.values, width_);
    } else {
      weighted_values(work_.scores, rows_, keys.v, next.k, keys.begin, keys.end, result.values, width_);
    }
  }

  void write(const Partial& total) {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t head = tile_.kv_head * group_ + row % group_;
      T* out = static_cast<T*>(call_.out) +
               ((tile_.first_token + row / group_) * call_.num_heads + head) * call_.v_head_dim;
      float scale = 1.0f, sum = total.sum[row];
      if (call_.sinks) {
        const float top = std::max(total.max[row], call_.sinks[head]);
        scale = exp(total.max[row] - top);
        sum = sum * scale + exp(call_.sinks[head] - top);
      }
      for (int64_t i = 0; i < call_.v_head_dim; i += kLanes)
        store(out + i, load(total.values + row * width_ + i) * scale / sum, call_.v_head_dim - i);
    }
  }

 private:
  // Where the rows of one KV tile lie: those in [begin, end), and a row of zeros elsewhere.
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
    for (const T** rows : {keys.k, keys.v}) {
      std::fill(rows, rows + keys.begin, zeros);
      std::fill(rows + keys.end, rows + kTileKeys, zeros);
    }
    const int32_t* blocks = call_.block_table + tile.request * call_.block_table_stride;
    for (int key = keys.begin; key < keys.end;) {
      const int64_t position = start + key;
      const int64_t block = blocks[position / call_.block_size], offset = position % call_.block_size;
      const T* k = static_cast<const T*>(call_.k_cache) + block * call_.k_block_stride +
                   tile.kv_head * call_.k_head_stride + offset * call_.k_row_stride;
      const T* v = static_cast<const T*>(call_.v_cache) + block * call_.v_block_stride +
                   tile.kv_head * call_.v_head_stride + offset * call_.v_row_stride;
      const int run = int(std::min<int64_t>(keys.end - key, call_.block_size - offset));
      for (int i = 0; i < run; ++i, ++key, k += call_.k_row_stride, v += call_.v_row_stride) {
        keys.k[key] = k;
        keys.v[key] = v;
      }
    }
  }

  void convert_values(const Keys& keys) {
    constexpr int step = Value<T>::kKeys;
    for (int key = keys.begin / step * step; key < keys.end; key += step) {
      float* to = work_.v_floats + key / step * width_;
      v_floats_[key] = to;
      for (int64_t i = 0; i < width_; i += kLanes) Value<T>::convert(keys.v, key, i, call_.v_head_dim - i, to + i);
    }
  }

  const AttentionCall& call_;
  const QueryTile& tile_;
  const Workspace& work_;
  const int64_t group_, rows_, steps_, width_;
  Keys keys_[2];  // of this KV tile and of what comes after it, which is fetched meanwhile
  bool found_ = false;
  const float* v_floats_[kTileKeys];
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

  // Of one KV tile: reading the keys costs about as much as a dozen rows of arithmetic.
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
  const int64_t partial_floats = round_up(plan.rows * (width + 2), 16);
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
      clear(work.total, kernel.rows(), width);
      for (int64_t kv_tile = task.kv_tile_begin; kv_tile < task.kv_tile_end; ++kv_tile) {
        attend(kv_tile, work.tile);
        merge(work.total, work.tile, kernel.rows(), width);
      }
      return kernel.write(work.total);
    }
    const auto stored = [&](int64_t kv_tile) -> Partial {
      float* at = partial_memory + (tile.first_partial + kv_tile - tile.kv_tile_begin) * partial_floats;
      return {at + plan.rows * width, at + plan.rows * (width + 1), at};
    };
    for (int64_t kv_tile = task.kv_tile_begin; kv_tile < task.kv_tile_end; ++kv_tile)
      attend(kv_tile, stored(kv_tile));
    if (countdowns[tile.countdown].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    clear(work.total, kernel.rows(), width);
    for (int64_t kv_tile = tile.kv_tile_begin; kv_tile < tile.kv_tile_end; ++kv_tile)
      merge(work.total, stored(kv_tile), kernel.rows(), width);
    kernel.write(work.total);
  });
}

}  // namespace

// Returns 0, or 1 if the batch does not fit its tensors (then nothing was computed).
EXPORT int pagewire_attention(const AttentionCall* call) {
  if (!valid(*call)) return 1;
  dispatch(call->dtype, [&](auto element) { attention<decltype(element)>(*call); });
  return 0;
}
