// What a processor can do at most: multiplying numbers that stay in its registers, reading memory, and changing it.

#include <atomic>
#include <cstdint>

#include "parallel.h"
#include "simd.h"
#include "tiles.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(PAGEWIRE_TILES)
constexpr double kFlopPerRound = 4 * 2.0 * kTileRows * kTileWidth * kTileDepth;

float multiply(int64_t rounds) {
  alignas(64) float tile[kTileRows][kTileWidth] = {};
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.set(t, kTileRows);
  tile_config(config);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  tile_load<4>(tile, kTileBytes), tile_load<5>(tile, kTileBytes);
  tile_load<6>(tile, kTileBytes), tile_load<7>(tile, kTileBytes);
  for (int64_t i = 0; i < rounds; ++i) {
    tile_multiply_add<bf16, 0, 4, 6>(), tile_multiply_add<bf16, 1, 4, 7>();
    tile_multiply_add<bf16, 2, 5, 6>(), tile_multiply_add<bf16, 3, 5, 7>();
  }
  tile_store<0>(tile, kTileBytes);
  tile_release();
  return tile[0][0];
}
#else
constexpr int kSums = kRegisters == 32 ? 24 : 12;  // enough for their latency to be hidden
#if defined(PAGEWIRE_PAIRS)
constexpr double kFlopPerRound = kSums * 4.0 * kLanes;  // pairs
#else
constexpr double kFlopPerRound = kSums * 2.0 * kLanes;
#endif

float multiply(int64_t rounds) {
  Floats sums[kSums] = {}, factors[2] = {broadcast(1.0f), broadcast(0.5f)};
  asm volatile("" : "+m"(factors));  // unknown to the compiler
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 24
    for (int s = 0; s < kSums; ++s)
#if defined(PAGEWIRE_PAIRS)
      sums[s] = add_products(sums[s], (Pairs)factors[0], (Pairs)factors[1]);
#else
      sums[s] = fma(factors[0], factors[1], sums[s]);
#endif
  Floats total = {};
  for (const Floats& sum : sums) total += sum;
  return sum_lanes(total);
}
#endif

}  // namespace

// Floating-point operations in bf16 (float32 where the processor has none) of `rounds` on each thread.
EXPORT double probe_multiply(int64_t rounds, int32_t num_threads) {
  std::atomic<int64_t> used{0};
  parallel_for(num_threads, num_threads, [&](int64_t) { used += int64_t(multiply(rounds)); });
  return used.load() == -1 ? 0.0 : kFlopPerRound * double(rounds) * num_threads;
}

// Reads `bytes` of memory once. Returns something that depends on all of it.
EXPORT uint32_t probe_read(const char* memory, int64_t bytes, int32_t num_threads) {
  constexpr int64_t kPiece = 1 << 17, kLine = 64, kLead = 4096;
  std::atomic<uint32_t> total{0};
  parallel_for(bytes / kPiece, num_threads, [&](int64_t piece) {
    const char* from = memory + piece * kPiece;
    Words sums[4] = {};
    for (int64_t i = 0; i < kPiece; i += 4 * kLine)
      for (int line = 0; line < 4; ++line) {
        __builtin_prefetch(from + i + line * kLine + kLead, 0, 2);  // into the second-level cache
        for (int64_t at = 0; at < kLine; at += int64_t(sizeof(Words)))
          sums[line] ^= load_raw<Words>(from + i + line * kLine + at);
      }
    const Words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    for (int lane = 0; lane < kLanes; ++lane) total.fetch_xor(all[lane]);
  });
  return total.load();
}

// Vectors of float32 that are multiplied and added in registers: `rounds` on each thread, times their number of lanes.
EXPORT double probe_float(int64_t rounds, int32_t num_threads) {
  constexpr int kChains = 10;  // enough for their latency to be hidden, and few enough for 16 registers
  std::atomic<int64_t> used{0};
  parallel_for(num_threads, num_threads, [&](int64_t) {
    Floats sums[kChains] = {}, factors[2] = {broadcast(1.0f), broadcast(0.5f)};
    asm volatile("" : "+m"(factors));  // unknown to the compiler
    const Floats a = factors[0], b = factors[1];
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 10
      for (Floats& sum : sums) sum = fma(a, sum, b);
    Floats total = {};
    for (const Floats& sum : sums) total += sum;
    used += int64_t(sum_lanes(total) != 0.0f);
  });
  return used.load() == -1 ? 0.0 : double(kChains) * kLanes * double(rounds) * num_threads;
}

// Reads and writes `count` numbers once.
EXPORT void probe_change(float* memory, int64_t count, int32_t num_threads) {
  constexpr int64_t kPiece = 1 << 15, kLead = 1 << 10;
  parallel_for(count / kPiece, num_threads, [&](int64_t piece) {
    float* const at = memory + piece * kPiece;
    for (int64_t i = 0; i < kPiece; i += kLanes) {
      __builtin_prefetch(at + i + kLead);
      store(at + i, load(at + i) * 0.5f);
    }
  });
}
