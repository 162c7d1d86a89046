// Matrix tiles (Intel AMX): one function for each instruction that the kernels use.
//
// A tile is a register of up to 16 rows of 64 bytes. There are eight, and their shapes are set all at once. The
// instructions are spelled in assembly, for three reasons: tile numbers are part of an instruction, so they are
// template arguments; no compiler flag is needed; and the compiler is told that loads and stores touch memory, which
// GCC 12's intrinsics do not tell it.
//
// Compiled with PAGEWIRE_EMULATE_TILES the same functions are plain C++ (tiles_emulated.h) with the hardware's bits.
//
// tile_multiply_add computes, for each element of C, two chains of float32 fused multiply-adds that begin at +0: one
// over the even and one over the odd elements of the row of A, in ascending order. Then C becomes C + (even + odd).
// Subnormal numbers count as zeros, in and out. So the bits of a sum over k depend on where the steps of 32 elements
// of k begin, and on nothing else: not on the rows of A, not on the columns of B, not on the shapes of the tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace {

// Whether matrix tiles multiply elements of this type.
template <class T>
constexpr bool kTiled =
#if defined(PAGEWIRE_TILES_FP16)
    std::is_same_v<T, bf16> || std::is_same_v<T, f16>;
#elif defined(PAGEWIRE_TILES)
    std::is_same_v<T, bf16>;
#else
    false;
#endif

}  // namespace

#if defined(PAGEWIRE_TILES)

namespace {

constexpr int64_t kTileRows = 16;   // of a tile: rows of A and C; pairs of k in B
constexpr int64_t kTileBytes = 64;  // of a row: 32 elements of k in A; 16 columns in B and C
constexpr int64_t kTileDepth = PAGEWIRE_TILE_DEPTH;  // elements of k that one product takes
constexpr int64_t kTileWidth = 16;  // columns

// The shapes of the eight tiles, as LDTILECFG reads them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(kTileBytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "the size that the instruction reads");

}  // namespace

#if defined(PAGEWIRE_EMULATE_TILES)
#include "tiles_emulated.h"
#else

#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Asks Linux (5.16 or later) to let this process use tiles; false where it refuses. Its threads have the permission
// too, those started before included. Without it the first tile instruction ends the process.
inline bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Sets the shapes of this thread's tiles, and all their elements to zero.
INLINE void tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config) : "memory"); }

// Ends the use of tiles by this thread: a switch to another thread then need not save 8 KiB.
INLINE void tile_release() { asm volatile("tilerelease" : : : "memory"); }

template <int Tile>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

// Loads a tile's rows, `stride` bytes apart.
template <int Tile>
INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}

// C += A B. A: [rows][32 elements]; B: [pair of elements][column][2].
template <class T, int C, int A, int B>
INLINE void tile_multiply_add() {
  static_assert(kTiled<T>, "an element that tiles multiply");
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  else
    asm volatile("tdpfp16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// C += A B in int32. A: [rows][64 signed bytes]; B: [four elements of k][column][4 unsigned bytes].
template <int C, int A, int B>
INLINE void tile_multiply_add_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace

#endif
#endif
