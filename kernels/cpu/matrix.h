// The product with a matrix of any kind.
#pragma once

#include "kernels.h"

namespace {

// out [rows, matrix.n] = x [rows, matrix.k] times the matrix; rows of x are x_stride apart.
inline void multiply(const Matrix& matrix, const void* x, int64_t x_stride, void* out, int64_t rows, int32_t dtype,
                     int32_t num_threads) {
  if (matrix.integers)
    pagewire_quantised_linear(x, matrix.packed, matrix.bias, out, rows, matrix.k, matrix.n, x_stride, matrix.integers,
                              dtype, num_threads);
  else
    pagewire_linear(x, matrix.packed, matrix.bias, out, rows, matrix.k, matrix.n, x_stride, dtype, num_threads);
}

// The same, with what adapters change in it. adapters: null: none does.
inline void multiply(const Matrix& matrix, const void* x, int64_t x_stride, void* out, int64_t rows,
                     const AdapterRows* adapters, int32_t dtype, int32_t num_threads) {
  multiply(matrix, x, x_stride, out, rows, dtype, num_threads);
  if (!adapters || matrix.number < 0) return;
  const AdaptCall adapt{adapters, x, out, matrix.number, matrix.k, matrix.n, x_stride, dtype, num_threads};
  pagewire_adapt(&adapt);
}

}  // namespace
