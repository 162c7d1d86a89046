// The threads behind parallel.h.

#include "parallel.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

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
      keep_off_this_processor();
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
      await_round(seen, number);
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

  void await_round(uint64_t seen, int number) {
    const auto until = std::chrono::steady_clock::now() + kLookout;
    do {
      for (int i = 0; i < 32; ++i) {
        if (round_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    Sleeper self;
    std::unique_lock<std::mutex> hold(asleep_);
    if (sleeping_.size() <= size_t(number)) sleeping_.resize(size_t(number) + 1);
    sleeping_[size_t(number)] = &self;
    sleepers_.fetch_add(1);  // before the last look: who starts a round looks at this after it
    alarm_.wait(hold, [&] { return round_.load() != seen; });
    sleepers_.fetch_sub(1);
    sleeping_[size_t(number)] = nullptr;
    if (self.moved) sched_setaffinity(0, sizeof(self.allowed), &self.allowed);
  }

  // A thread that sleeps, and where it may run.
  struct Sleeper {
    pid_t thread = pid_t(syscall(SYS_gettid));
    cpu_set_t allowed = {};
    bool moved = false;  // it must not run on the processor of the one who woke it

    Sleeper() { sched_getaffinity(0, sizeof(allowed), &allowed); }
  };

  // Linux wakes a thread on the processor of the one who wakes it if it fell asleep there, or if other processes keep its
  // own busy. There it waits behind the work that it should share, or takes its place, until Linux balances the load. So
  // it may run on any other one; it takes that back once it is awake.
  void keep_off_this_processor() {
    const int here = sched_getcpu();
    for (Sleeper* sleeper : sleeping_) {
      if (!sleeper || here < 0 || CPU_COUNT(&sleeper->allowed) < 2) continue;
      cpu_set_t others = sleeper->allowed;
      CPU_CLR(size_t(here), &others);
      sleeper->moved = !sched_setaffinity(sleeper->thread, sizeof(others), &others);
    }
  }

  std::mutex busy_, asleep_;
  std::vector<Sleeper*> sleeping_;  // by number; null: it is awake
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
