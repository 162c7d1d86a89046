// The kernels that look through logits.

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
  while (best.index < size && load(x + best.index, 1)[0] != best.value) ++best.index;
  return best;
}

}  // namespace

// x [rows, size], rows row_stride apart; values and ids [rows].
EXPORT void pagewire_largest(const void* x, float* values, int64_t* ids, int64_t rows, int64_t size,
                             int64_t row_stride, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, num_threads, [&](int64_t row) {
      const Found found = largest(static_cast<const T*>(x) + row * row_stride, size);
      values[row] = found.value;
      ids[row] = found.index;
    });
  });
}
