// Work shared out over the threads of the OpenMP runtime that the process has already.
//
// A second OpenMP runtime would bring a second set of threads that spin beside PyTorch's. So nothing here is
// compiled with -fopenmp or linked against one: Python hands over the address of GOMP_parallel (libgomp has
// it, and LLVM's and Intel's runtimes offer it too). Without one, everything runs on the calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

using GompParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);

inline GompParallel gomp_parallel = nullptr;

// Calls body(i) for every i in [0, count), in no promised order, on up to num_threads threads.
template <class Body>
void parallel_for(int64_t count, int num_threads, const Body& body) {
  struct Shared {
    const Body& body;
    int64_t count;
    std::atomic<int64_t> next;
  } shared{body, count, {0}};
  const auto drain = [](void* data) {
    auto& work = *static_cast<Shared*>(data);
    for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.count;) work.body(i);
  };
  if (num_threads > count) num_threads = int(count);
  if (num_threads > 1 && gomp_parallel)
    gomp_parallel(drain, &shared, unsigned(num_threads), 0);
  else
    drain(&shared);
}
