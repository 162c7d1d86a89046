// Work shared out over a team of threads.
//
// A step is a chain of many short kernels. Waking a thread costs up to 0.1 ms, more than most of them take, so the
// team's threads look out for the next kernel for a while before they sleep, and a kernel never waits for a thread
// that has not come in time: whoever comes takes the next item.
#pragma once

#include <atomic>
#include <cstdint>

// Calls body(data) here and on up to num_threads - 1 threads of the team; returns when all that came are done.
// One caller at a time has the team; others, and bodies that call it themselves, run alone.
void run_on_team(void (*body)(void*), void* data, int num_threads);

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
  if (num_threads > 1)
    run_on_team(drain, &shared, num_threads);
  else
    drain(&shared);
}
