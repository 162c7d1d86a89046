// Rows of tables that tokens begin with.
#pragma once

#include <cstring>

#include "kernels.h"
#include "simd.h"

// Writes row `number` of a table to `to` [hidden], as numbers of `dtype`.
inline void embed(const EmbeddingRows& from, int64_t number, void* to, int64_t hidden, int32_t dtype) {
  const char* const numbers = static_cast<const char*>(from.rows) + number * from.row_bytes;
  if (from.form) {
    const int64_t before = number * from.scale_bytes;
    pagewire_dequantise(reinterpret_cast<const uint8_t*>(numbers), static_cast<const char*>(from.scales) + before,
                        from.offsets ? static_cast<const char*>(from.offsets) + before : nullptr, to, 1, hidden,
                        from.form, dtype, 1);
  } else {
    std::memcpy(to, numbers, size_t(from.row_bytes));
  }
  if (from.factor == 1) return;
  dispatch(dtype, [&](auto element) {
    auto* const x = static_cast<decltype(element)*>(to);
    for (int64_t i = 0; i < hidden; i += kLanes) store(x + i, load(x + i, hidden - i) * from.factor, hidden - i);
  });
}

// Adds row `number` of a table of numbers to x [hidden], if there is a table.
inline void add_row(const EmbeddingRows& from, int64_t number, void* to, int64_t hidden, int32_t dtype) {
  if (!from.rows) return;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const T* const more = reinterpret_cast<const T*>(static_cast<const char*>(from.rows) + number * from.row_bytes);
    T* const x = static_cast<T*>(to);
    for (int64_t i = 0; i < hidden; i += kLanes)
      store(x + i, load(x + i, hidden - i) + load(more + i, hidden - i), hidden - i);
  });
}

// Norms rows x [rows, hidden], if there is a norm.
inline void norm_rows(const Norm& norm, void* x, int64_t rows, int64_t hidden, int32_t dtype) {
  if (!norm.weight) return;
  if (norm.centred)
    pagewire_layer_norm(x, nullptr, norm.weight, norm.bias, nullptr, x, rows, hidden, norm.eps, dtype, 1);
  else
    pagewire_rms_norm(x, norm.weight, x, rows, 1, hidden, hidden, hidden, hidden, hidden, norm.eps, norm.offset, dtype, 1);
}

// Points a stack's angles of token `row` to those of a position: copies them out of the tables of all positions.
inline void lay_angles(const StackCall& stack, int64_t row, const Angles* tables, int64_t num_tables, int64_t position) {
  for (int64_t i = 0; i < num_tables; ++i) {
    const Angles &of_step = stack.angles[i], &all = tables[i];
    const size_t size = size_t(2 * all.half) * (stack.attention.dtype == 0 ? 4 : 2);
    std::memcpy(static_cast<char*>(const_cast<void*>(of_step.cos)) + row * size,
                static_cast<const char*>(all.cos) + position * size, size);
    std::memcpy(static_cast<char*>(const_cast<void*>(of_step.sin)) + row * size,
                static_cast<const char*>(all.sin) + position * size, size);
  }
}
