// Rows of elements shared out over threads.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kParallelElements = 1 << 15;

// Calls body(row) for all rows, on several threads if they hold enough elements.
template <class Body>
void for_rows(int64_t rows, int64_t elements_per_row, int num_threads, const Body& body) {
  const int64_t chunk = 1 + kParallelElements / (4 * (elements_per_row + 1));
  const int64_t chunks = (rows + chunk - 1) / chunk;
  if (rows * elements_per_row < kParallelElements) num_threads = 1;
  parallel_for(chunks, num_threads, [&](int64_t c) {
    const int64_t end = (c + 1) * chunk < rows ? (c + 1) * chunk : rows;
    for (int64_t row = c * chunk; row < end; ++row) body(row);
  });
}

}  // namespace
