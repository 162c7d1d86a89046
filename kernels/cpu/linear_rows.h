// What linear.cpp multiplies a matrix with.
#pragma once

#include <cstdint>

namespace {

template <class T>
struct Rows {
  const T* x;     // [count, k], rows x_stride apart
  const T* bias;  // [n] or null
  T* out;         // [count, n]
  int64_t count, k, n, x_stride;
};

}  // namespace
