// Memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Pieces of 64-byte aligned memory that only grows. Its contents are lost from one `reserve` to the next.
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
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  std::unique_ptr<char, Free> memory_;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

}  // namespace
