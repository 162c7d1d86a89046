// The threads behind parallel.h.

#include "parallel.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// How long a thread looks out for work before it sleeps: longer than the pauses within a step, short beside one.
constexpr std::chrono::microseconds kLookout{200};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class Team {
 public:
  void run(void (*body)(void*), void* data, int num_threads) {
    std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
    if (!owner) return body(data);
    while (num_threads_ < num_threads) std::thread(&Team::work, this, num_threads_++).detach();
    body_ = body;
    data_ = data;
    seats_.store(uint64_t(num_threads) << 32 | kOpen);
    round_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> hold(asleep_);
      alarm_.notify_all();
    }
    body(data);
    seats_.fetch_and(~kOpen);
    while (seats_.load() & kTaken) relax();
  }

 private:
  // The threads invited, 32 bits; is the round open; how many threads of the team are in it.
  static constexpr uint64_t kOpen = 1 << 16, kTaken = kOpen - 1;

  void work(int number) {
    for (uint64_t seen = 0;;) {
      await_round(seen);
      seen = round_.load();
      if (!join(number)) continue;
      body_(data_);
      seats_.fetch_sub(1);
    }
  }

  // Once counted in, the round cannot end before this thread leaves it.
  bool join(int number) {
    uint64_t seats = seats_.load();
    while ((seats & kOpen) && uint64_t(number) < seats >> 32)
      if (seats_.compare_exchange_weak(seats, seats + 1)) return true;
    return false;
  }

  void await_round(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kLookout;
    do {
      for (int i = 0; i < 32; ++i) {
        if (round_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> hold(asleep_);
    sleepers_.fetch_add(1);  // before the last look: who starts a round looks at this after it
    alarm_.wait(hold, [&] { return round_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  std::mutex busy_, asleep_;
  std::condition_variable alarm_;
  int num_threads_ = 1;  // the caller is one
  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
  std::atomic<uint64_t> round_{0}, seats_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace

void run_on_team(void (*body)(void*), void* data, int num_threads) {
  static Team& team = *new Team;  // its threads outlive everything
  team.run(body, data, num_threads);
}
