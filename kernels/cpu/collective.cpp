// Sums and exchanges between the ranks of a group, which are processes of one machine that share memory.
//
// The region has a post for each rank, and two slots for each rank's data. A rank writes its data to the slot of the
// next round, posts the round, and waits until all others have posted it; then it reads their slots. It posts the next
// round only when it has read, and by then all have posted this one: so whoever writes to a slot knows that nobody
// reads any more what was in it two rounds ago, and there is one meeting for each exchange.
//
// A link goes from one rank to another: a ring of pieces with two posts. The sender posts how many it has written, the
// receiver how many it has read. So the sender is ahead by as much as the ring holds.
//
// A wait has no limit. If a rank ends, the core ends the others.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

// The others are a few microseconds behind as a rule. Then the processor is yielded in between, in case they have none,
// and at last the rank sleeps: a sleeper costs who wakes it a system call.
constexpr std::chrono::microseconds kSpinning{20}, kYielding{200};
constexpr int64_t kParallelElements = 1 << 15, kChunk = 1 << 13;
constexpr int64_t kShareAlignment = 64;  // elements: vectors and cache lines of two ranks do not overlap
// From this size on each rank adds up only a share of the elements and the others copy it, which takes two meetings.
constexpr int64_t kSharedBytes = 1 << 16;

struct alignas(64) Post {
  std::atomic<uint32_t> round;
  std::atomic<uint32_t> sleepers;  // that wait for this round
};

Post* posts(const Group& group) { return static_cast<Post*>(group.region); }

char* slot(const Group& group, int rank, uint32_t round) {
  char* const first = static_cast<char*>(group.region) + group.size * sizeof(Post);
  return first + (2 * rank + (round & 1)) * group.slot_bytes;
}

uint32_t next_round(const Group& group) {
  return posts(group)[group.rank].round.load(std::memory_order_relaxed) + 1;
}

bool is_at(const Post& post, uint32_t round) { return int32_t(post.round.load() - round) >= 0; }

void await(Post& post, uint32_t round) {
  const auto start = std::chrono::steady_clock::now();
  for (auto waited = start - start; waited < kYielding; waited = std::chrono::steady_clock::now() - start) {
    for (int i = 0; i < 64; ++i) {
      if (is_at(post, round)) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    if (waited > kSpinning) sched_yield();
  }
  post.sleepers.fetch_add(1);  // before the last look: who posts looks at this after it
  for (uint32_t seen; int32_t((seen = post.round.load()) - round) < 0;)
    syscall(SYS_futex, &post.round, FUTEX_WAIT, seen, nullptr, nullptr, 0);
  post.sleepers.fetch_sub(1);
}

void announce(Post& post, uint32_t round) {
  post.round.store(round);
  if (post.sleepers.load()) syscall(SYS_futex, &post.round, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Posts the next round and waits for all others.
void meet(const Group& group) {
  const uint32_t round = next_round(group);
  announce(posts(group)[group.rank], round);
  for (int rank = 0; rank < group.size; ++rank) await(posts(group)[rank], round);
}

// out[i] = the sum of the ranks' elements i, in their order, for i in [begin, end).
template <class T>
void add_up(const Group& group, uint32_t round, T* out, int64_t begin, int64_t end, int num_threads) {
  const int64_t chunks = (end - begin + kChunk - 1) / kChunk;
  if (end - begin < kParallelElements) num_threads = 1;
  parallel_for(chunks, num_threads, [&](int64_t chunk) {
    const int64_t last = std::min(end, begin + (chunk + 1) * kChunk);
    for (int64_t i = begin + chunk * kChunk; i < last; i += kLanes) {
      Floats sum = load(reinterpret_cast<const T*>(slot(group, 0, round)) + i, last - i);
      for (int rank = 1; rank < group.size; ++rank)
        sum += load(reinterpret_cast<const T*>(slot(group, rank, round)) + i, last - i);
      store(out + i, sum, last - i);
    }
  });
}

// The first of the n elements that `rank` adds up.
int64_t share_of(int rank, int size, int64_t n) {
  return std::min(n, (n * rank / size + kShareAlignment - 1) / kShareAlignment * kShareAlignment);
}

enum LinkPost { kWritten, kRead, kNumPosts };

Post& post(const Link& link, LinkPost which) { return static_cast<Post*>(link.region)[which]; }

char* piece(const Link& link, uint32_t number) {
  char* const first = static_cast<char*>(link.region) + kNumPosts * sizeof(Post);
  return first + number % link.num_pieces * link.piece_bytes;
}

// All ranks' n elements fit into a slot.
template <class T>
void reduce_piece(const Group& group, T* data, int64_t n, int num_threads) {
  const uint32_t round = next_round(group);
  std::memcpy(slot(group, group.rank, round), data, n * sizeof(T));
  meet(group);
  if (group.size == 2 || n * int64_t(sizeof(T)) < kSharedBytes)
    return add_up(group, round, data, 0, n, num_threads);
  T* const sums = reinterpret_cast<T*>(slot(group, group.rank, round + 1));
  const int size = group.size;
  add_up(group, round, sums, share_of(group.rank, size, n), share_of(group.rank + 1, size, n), num_threads);
  meet(group);
  for (int rank = 0; rank < size; ++rank) {
    const int64_t begin = share_of(rank, size, n), end = share_of(rank + 1, size, n);
    const T* const from = reinterpret_cast<const T*>(slot(group, rank, round + 1));
    std::memcpy(data + begin, from + begin, (end - begin) * sizeof(T));
  }
}

}  // namespace

// The bytes of a region, which begins on a cache line and holds zeros at first.
int64_t pagewire_region_bytes(int32_t size, int64_t slot_bytes) {
  return size * (int64_t(sizeof(Post)) + 2 * slot_bytes);
}

// data[n] becomes the sum of the ranks' data.
void pagewire_all_reduce(const Group* group, void* data, int64_t n, int32_t dtype, int32_t num_threads) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t piece = group->slot_bytes / sizeof(T);
    for (int64_t start = 0; start < n; start += piece)
      reduce_piece(*group, static_cast<T*>(data) + start, std::min(piece, n - start), num_threads);
  });
}

// x[rows, row_bytes] of each rank becomes out[rows, size, row_bytes] in all of them.
void pagewire_all_gather(const Group* group, const void* x, void* out, int64_t rows, int64_t row_bytes) {
  const int64_t bytes = rows * row_bytes, out_row = group->size * row_bytes;
  for (int64_t start = 0; start < bytes; start += group->slot_bytes) {
    const int64_t end = std::min(bytes, start + group->slot_bytes);
    const uint32_t round = next_round(*group);
    std::memcpy(slot(*group, group->rank, round), static_cast<const char*>(x) + start, end - start);
    meet(*group);
    for (int rank = 0; rank < group->size; ++rank) {
      const char* from = slot(*group, rank, round);
      char* const to = static_cast<char*>(out) + rank * row_bytes;
      for (int64_t at = start, part; at < end; at += part, from += part) {
        const int64_t row = at / row_bytes, column = at % row_bytes;
        part = std::min(end - at, row_bytes - column);
        std::memcpy(to + row * out_row + column, from, part);
      }
    }
  }
}

// data[bytes] becomes that of rank `source`.
void pagewire_broadcast(const Group* group, void* data, int64_t bytes, int32_t source) {
  for (int64_t start = 0; start < bytes; start += group->slot_bytes) {
    const int64_t part = std::min(bytes - start, group->slot_bytes);
    const uint32_t round = next_round(*group);
    char* const piece = static_cast<char*>(data) + start;
    if (group->rank == source) std::memcpy(slot(*group, source, round), piece, part);
    meet(*group);
    if (group->rank != source) std::memcpy(piece, slot(*group, source, round), part);
  }
}

void pagewire_barrier(const Group* group) { meet(*group); }

// The bytes of a link's region, which begins on a cache line and holds zeros at first. num_pieces: a power of two.
int64_t pagewire_link_bytes(int64_t piece_bytes, int64_t num_pieces) {
  return kNumPosts * int64_t(sizeof(Post)) + num_pieces * piece_bytes;
}

// Returns once all of data[bytes] is in the ring.
void pagewire_send(const Link* link, const void* data, int64_t bytes) {
  Post& written = post(*link, kWritten);
  for (int64_t start = 0; start < bytes; start += link->piece_bytes) {
    const uint32_t number = written.round.load(std::memory_order_relaxed);
    await(post(*link, kRead), number + 1 - uint32_t(link->num_pieces));
    std::memcpy(piece(*link, number), static_cast<const char*>(data) + start,
                std::min(link->piece_bytes, bytes - start));
    announce(written, number + 1);
  }
}

// data[bytes] becomes what the sender's next call has sent, which is of the same size.
void pagewire_receive(const Link* link, void* data, int64_t bytes) {
  Post& read = post(*link, kRead);
  for (int64_t start = 0; start < bytes; start += link->piece_bytes) {
    const uint32_t number = read.round.load(std::memory_order_relaxed);
    await(post(*link, kWritten), number + 1);
    std::memcpy(static_cast<char*>(data) + start, piece(*link, number), std::min(link->piece_bytes, bytes - start));
    announce(read, number + 1);
  }
}
