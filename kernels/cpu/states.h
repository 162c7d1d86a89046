// States of layers, and the order in which tokens change them.
//
// A row's tokens are computed one after the other, and a strip of columns (or channels) by itself: its arithmetic is the
// same whether the tokens come in one call or in many. Rows and strips are shared out over the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace {

// Below this many elements of states and inputs a second thread costs more than it brings.
constexpr int64_t kParallelStates = 1 << 14;

// Vectors of a strip. Sums over them must fit the registers, and 128 rows of them the first cache.
constexpr int kStripVectors = 4;
constexpr int64_t kStripColumns = kStripVectors * kLanes;

struct Span {
  int32_t begin, end;     // tokens
  int32_t read, written;  // slots; read -1: zeros
};

INLINE Span span_of(const States& states, int64_t number) {
  Span span;
  std::memcpy(&span, states.spans + 4 * number, sizeof(span));
  return span;
}

// Whether the spans touch nothing but the memory of the arguments, and follow each other as they should.
bool valid(const States& states) {
  if (states.row_starts[0] != 0 || states.row_starts[states.num_rows] != states.num_spans) return false;
  int64_t token = 0;
  for (int64_t row = 0; row < states.num_rows; ++row) {
    const int64_t first = states.row_starts[row], last = states.row_starts[row + 1];
    if (last < first || last > states.num_spans) return false;
    for (int64_t number = first; number < last; ++number) {
      const Span span = span_of(states, number);
      if (span.begin != token || span.end <= token || span.end > states.num_tokens) return false;
      if (span.read < -1 || span.read >= states.num_slots) return false;
      if (span.written < 0 || span.written >= states.num_slots) return false;
      if (number > first && span.read != span_of(states, number - 1).written) return false;
      token = span.end;
    }
  }
  return true;
}

// Calls body(span, strip) for all spans of each row in their order, for every strip; then fills what is padding in
// `out` [tokens, size] with zeros. Returns 1, and does nothing, where the batch is not valid.
template <class T, class Body>
int for_spans(const States& states, int64_t strips, int64_t state_size, T* out, int64_t size, const Body& body) {
  if (!valid(states)) return 1;
  const int64_t tokens = states.num_spans ? span_of(states, states.num_spans - 1).end : 0;
  const int64_t work = states.num_spans * state_size + tokens * size;
  parallel_for(states.num_rows * strips, work < kParallelStates ? 1 : states.num_threads, [&](int64_t item) {
    const int64_t row = item / strips, strip = item % strips;
    for (int64_t number = states.row_starts[row]; number < states.row_starts[row + 1]; ++number)
      body(span_of(states, number), strip);
  });
  std::memset(static_cast<void*>(out + tokens * size), 0, size_t((states.num_tokens - tokens) * size) * sizeof(T));
  return 0;
}

// Columns (or channels) that are computed together: W vectors, or one whose lanes from `count` on do not exist.
template <int W, bool Whole>
struct Lanes {
  static constexpr int kVectors = W;
  int64_t count;

  template <class T>
  INLINE Floats get(const T* row, int w) const {
    return Whole ? load(row + w * kLanes) : load(row, count);
  }

  template <class T>
  INLINE void put(T* row, int w, Floats v) const {
    if (Whole)
      store(row + w * kLanes, v);
    else
      store(row, v, count);
  }
};

int64_t strips_of(int64_t size) { return (size + kStripColumns - 1) / kStripColumns; }

// Calls run(lanes, first column) for all columns of a strip.
template <class Run>
INLINE void with_lanes(int64_t strip, int64_t size, const Run& run) {
  const int64_t begin = strip * kStripColumns, end = std::min(begin + kStripColumns, size);
  if (end - begin == kStripColumns) return run(Lanes<kStripVectors, true>{}, begin);
  for (int64_t column = begin; column < end; column += kLanes) {
    if (end - column >= kLanes)
      run(Lanes<1, true>{}, column);
    else
      run(Lanes<1, false>{end - column}, column);
  }
}

// Copies numbers as float32, with zeros behind them.
template <class T>
INLINE void widen(const T* from, float* to, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(from + i, size - i));
}

// Tokens whose inputs are fetched ahead. They lie so far apart that the processor does not see them coming.
constexpr int64_t kTokensAhead = 8;

// Fetches `count` elements, for writing or not.
template <int Writes = 0, class T>
INLINE void fetch(const T* at, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(at + i, Writes);
}

// Some columns of a state: its rows lie `stride` apart.
struct Columns {
  float* at;
  int64_t stride;
};

// Calls step(token, from, to) for the tokens of a span in their order. A step reads the state before its token at
// `from`, and writes the one after it to `to`, which may be the same. Between two tokens it is in `kept` [rows, width].
template <class Step>
INLINE void walk(const States& states, const Span& span, int64_t offset, int64_t rows, int64_t width, int64_t stride,
                 float* kept, const Step& step) {
  const Columns between{kept, width};
  const Columns written{states.state + span.written * states.slot_stride + offset, stride};
  Columns from = between;
  if (span.read >= 0)
    from = {states.state + span.read * states.slot_stride + offset, stride};
  else
    std::fill_n(kept, rows * width, 0.0f);
  for (int64_t token = span.begin; token < span.end; ++token) {
    const Columns to = token + 1 < span.end ? between : written;
    step(token, from, to);
    from = to;
  }
}

}  // namespace
