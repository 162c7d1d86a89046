// The kernels that look through logits.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kBlock = 4096;  // elements gone over together before one of them is searched for

struct Found {
  float value;
  int64_t index;
};

template <class T>
INLINE Floats load_or_least(const T* x, int64_t left) {
  if (left >= kLanes) return load(x);
  return select(lane_numbers() < broadcast(int32_t(left)), load(x, left), broadcast(-INFINITY));
}

// x where the low kLanes bits of `bits` are set, -inf elsewhere.
INLINE Floats where_set(uint32_t bits, Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_mov_ps((__m512)broadcast(-INFINITY), __mmask16(bits), (__m512)x);
#else
  const Ints set = (broadcast(int32_t(bits)) & (broadcast(1) << lane_numbers())) != 0;
  return select(set, x, broadcast(-INFINITY));
#endif
}

// Calls see(i, v) for the columns [start, end), kLanes at a time, while it returns true: v is -inf where a column is
// not allowed. Words that allow nothing are passed over, if `skip`. start is a multiple of 32.
template <bool skip, class T, class See>
INLINE void for_allowed(const T* x, const uint32_t* allowed, int64_t start, int64_t end, const See& see) {
  for (int64_t word = start; word < end; word += 32) {
    uint32_t bits = allowed[word / 32];
    if (skip && bits == 0) continue;
    for (int64_t i = word; i < word + 32 && i < end; i += kLanes, bits >>= kLanes)
      if (!see(i, where_set(bits, load_or_least(x + i, end - i)))) return;
  }
}

// The largest of what is allowed of x, and the first place that holds it; NaN if there is one.
template <class T>
Found largest_allowed(const T* x, const uint32_t* allowed, int64_t size) {
  Found best = {-INFINITY, 0};
  Ints nan = {};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = start + kBlock < size ? start + kBlock : size;
    Floats top = broadcast(-INFINITY);
    for_allowed<true>(x, allowed, start, end, [&](int64_t, Floats v) INLINE_LAMBDA {
      nan |= v != v;
      top = max(v, top);
      return true;
    });
    const float value = max_lanes(top);
    if (value > best.value) best = {value, start};
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (nan[lane]) return {NAN, 0};
  if (best.value == -INFINITY) return {-INFINITY, 0};
  int64_t first = -1;
  for_allowed<true>(x, allowed, best.index, size, [&](int64_t i, Floats v) INLINE_LAMBDA {
    if (first < 0 && max_lanes(v) == best.value) first = i;
    return first < 0;
  });
  while (!(allowed[first / 32] >> first % 32 & 1 && load(x + first, 1)[0] == best.value)) ++first;
  return {best.value, first};
}

// The largest of x and the first place that holds it; NaN if there is one.
template <class T>
Found largest(const T* x, int64_t size) {
  Found best = {-INFINITY, 0};
  Ints nan = {};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = start + kBlock < size ? start + kBlock : size;
    Floats top = broadcast(-INFINITY);
    for (int64_t i = start; i < end; i += kLanes) {
      const Floats v = load_or_least(x + i, end - i);
      nan |= v != v;
      top = max(v, top);
    }
    const float value = max_lanes(top);
    if (value > best.value) best = {value, start};
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (nan[lane]) return {NAN, 0};
  // By vectors, then by elements.
  while (best.index < size && max_lanes(load_or_least(x + best.index, size - best.index)) != best.value)
    best.index += kLanes;
  while (best.index < size && load(x + best.index, 1)[0] != best.value) ++best.index;
  return best;
}

// exp(-depth) times 2^44, in operations rounded one by one: the same bits on every device.
INLINE Floats scaled_probability(Floats depth) {
  depth = min(depth, broadcast(32.0f));
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = depth * broadcast(1.44269504f) + magic;
  const Floats n = shifted - magic;
  const Floats r = (n * broadcast(0.693359375f) - depth) + n * broadcast(-2.12194440e-4f);
  Floats p = broadcast(1.9875691500e-4f);  // Cephes' polynomial for (e^r - 1 - r) / r^2
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  p = (p * (r * r) + r) + broadcast(1.0f);
  const Words exponent = uint32_t(127 + 44) - (bit_cast<Words>(shifted) - bit_cast<Words>(magic));
  return p * bit_cast<Floats>(exponent << 23);
}

// 2^53 times a number between 0 and 1, which is odd: Philox4x32-10 of a seed and a position.
uint64_t uniform(uint64_t seed, uint64_t position) {
  uint64_t c0 = uint32_t(position), c1 = position >> 32, c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    const uint64_t p0 = 0xD2511F53 * c0, p1 = 0xCD9E8D57 * c2;
    c0 = p1 >> 32 ^ c1 ^ k0;
    c2 = p0 >> 32 ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
  }
  return (c0 >> 6 << 26 | c1 >> 6) * 2 + 1;
}

// The masses of a row's tokens, of which truncation leaves the first ones of an order: most likely first, ties by
// lower id. workers/sample/fixed_point.py is the reference, to the bit.
template <class T>
class Masses {
 public:
  Masses(const T* x, int64_t size, float peak, const Draw& draw)
      : x_(x), size_(size), draw_(draw), truncates_(draw.top_k > 0 || draw.top_p < 1), masses_(padded(size)) {
    if (truncates_) bins_.resize(padded(size));
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats depth = (broadcast(peak) - load_or_least(x + i, size - i)) / broadcast(draw.temperature);
      const Floats p = scaled_probability(depth);
      for (int lane = 0; lane < kLanes; ++lane) masses_[i + lane] = int64_t(p[lane]);
      if (!truncates_) continue;
      const Ints bins = min(max((bit_cast<Ints>(depth) >> kBinShift) - kFirstBin, Ints{}), broadcast(kBins - 1));
      for (int lane = 0; lane < kLanes; ++lane) bins_[i + lane] = int16_t(bins[lane]);
    }
    if (draw.min_mass > 0)
      for (int64_t& mass : masses_) mass = mass < draw.min_mass ? 0 : mass;
  }

  // The first token by id at which the sum of masses is more than a random part of it all.
  int64_t token() {
    if (draw_.top_k > 0) {
      const auto present = [](int64_t mass) { return int64_t(mass > 0); };
      const int64_t count = sum(present);
      if (draw_.top_k < count) keep(present, draw_.top_k);
    }
    const auto itself = [](int64_t mass) { return mass; };
    int64_t total = sum(itself);
    if (draw_.top_p < 1) {
      keep(itself, std::min(std::max(int64_t(std::ceil(draw_.top_p * double(total))), int64_t(1)), total));
      total = sum(itself);
    }
    const uint64_t part = uniform(uint64_t(draw_.seed), uint64_t(draw_.position));
    const int64_t target = int64_t((unsigned __int128)part * uint64_t(total) >> 53);
    int64_t reached = 0, i = 0;
    for (; i < size_; i += kLanes) {
      int64_t next = reached;
      for (int lane = 0; lane < kLanes; ++lane) next += masses_[i + lane];
      if (next > target) break;
      reached = next;
    }
    while ((reached += masses_[i]) <= target) ++i;
    return i;
  }

 private:
  static constexpr int32_t kBinShift = 17, kFirstBin = (127 - 12) << 6, kBins = 18 << 6;

  // Whole vectors; what is behind the row has no mass.
  static size_t padded(int64_t size) { return size_t((size + kLanes - 1) / kLanes * kLanes); }

  template <class Weight>
  int64_t sum(const Weight& weight) const {
    int64_t total = 0;
    for (const int64_t mass : masses_) total += weight(mass);
    return total;
  }

  // Leaves the shortest prefix of the order whose weights sum up to `need`. A histogram finds the bin in which that is
  // reached; within it, halves are left out until one token is left.
  template <class Weight>
  void keep(const Weight& weight, int64_t need) {
    std::vector<int64_t> in_bin(kBins);
    for (int64_t i = 0; i < size_; ++i) in_bin[bins_[i]] += weight(masses_[i]);
    int32_t edge = 0;
    for (; in_bin[edge] < need; ++edge) need -= in_bin[edge];
    std::vector<std::pair<float, int64_t>> order;
    for (int64_t i = 0; i < size_; ++i) {
      if (bins_[i] == edge && masses_[i] > 0) order.emplace_back(-load(x_ + i, 1)[0], i);
      if (bins_[i] > edge) masses_[i] = 0;
    }
    auto first = order.begin(), last = order.end();
    while (last - first > 1) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last);
      int64_t before = 0;
      for (auto entry = first; entry != middle; ++entry) before += weight(masses_[entry->second]);
      if (before >= need) {
        last = middle;
      } else {
        need -= before;
        first = middle;
      }
    }
    for (; last != order.end(); ++last) masses_[last->second] = 0;
  }

  const T* x_;
  int64_t size_;
  Draw draw_;
  bool truncates_;
  std::vector<int64_t> masses_;
  std::vector<int16_t> bins_;
};

}  // namespace

// x [rows, size], rows row_stride apart; allowed [rows, ceil(size / 32)] or null; values and ids [rows].
EXPORT void pagewire_largest(const void* x, const uint32_t* allowed, float* values, int64_t* ids, int64_t rows,
                             int64_t size, int64_t row_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads, [&](int64_t row) {
      const T* from = static_cast<const T*>(x) + row * row_stride;
      const Found found =
          allowed ? largest_allowed(from, allowed + row * ((size + 31) / 32), size) : largest(from, size);
      values[row] = found.value;
      ids[row] = found.index;
    });
  });
}

// x [rows, size], rows row_stride apart; allowed [rows, ceil(size / 32)]; out [rows, size].
EXPORT void pagewire_only_allowed(const void* x, const uint32_t* allowed, float* out, int64_t rows, int64_t size,
                                  int64_t row_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads, [&](int64_t row) {
      const T* from = static_cast<const T*>(x) + row * row_stride;
      const uint32_t* bits = allowed + row * ((size + 31) / 32);
      float* to = out + row * size;
      for_allowed<false>(from, bits, 0, size,
                         [&](int64_t i, Floats v) INLINE_LAMBDA {
                           store(to + i, v, size - i);
                           return true;
                         });
    });
  });
}

// depths, masses [size].
EXPORT void pagewire_fixed_point_probabilities(const float* depths, int64_t* masses, int64_t size, int32_t num_threads) {
  parallel_for((size + kBlock - 1) / kBlock, num_threads, [&](int64_t block) {
    const int64_t end = size < (block + 1) * kBlock ? size : (block + 1) * kBlock;
    for (int64_t i = block * kBlock; i < end; i += kLanes) {
      const int64_t left = end - i;
      const Floats p = scaled_probability(left >= kLanes ? load(depths + i) : load(depths + i, left));
      for (int lane = 0; lane < (left < kLanes ? int(left) : kLanes); ++lane) masses[i + lane] = int64_t(p[lane]);
    }
  });
}

// x [rows, size], rows row_stride apart; peaks [rows], their largest; draws [rows]; ids [rows]: the tokens drawn. Rows
// with temperature 0 keep theirs.
EXPORT void pagewire_draw(const void* x, const float* peaks, const Draw* draws, int64_t* ids, int64_t rows,
                          int64_t size, int64_t row_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads, [&](int64_t row) {
      if (draws[row].temperature > 0)
        ids[row] = Masses<T>(static_cast<const T*>(x) + row * row_stride, size, peaks[row], draws[row]).token();
    });
  });
}
