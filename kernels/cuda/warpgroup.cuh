// Products of a warpgroup (wgmma, only sm_90a): four warps compute 64 rows, while they go on with other work. The tensor
// cores read the second factor, and the first one if it is not in registers, from shared memory by themselves.
//
// Warp w has rows 16 w to 16 w + 15 of the first factor and of the sums, in the fragments of `mma` (ptx.cuh): sums [j] are
// its columns 8 j to 8 j + 7. In shared memory a matrix lies in panels of 64 columns, which begin at multiples of 1024 bytes:
// rows of 128 bytes, whose chunks are exchanged as `swizzle(8, row, chunk)` does (layout.cuh).
//
// In this order: fence_copies by each thread that has written to shared memory, a barrier, begin_products, products,
// commit_products, wait_for_products. Before the wait nobody may touch the sums, the factors in registers, or the panels.
#pragma once

#include "layout.cuh"
#include "ptx.cuh"

constexpr int PANEL = 64, PANEL_ROW_BYTES = 2 * PANEL;  // columns, of 16 bits
constexpr int GROUP_WARPS = 4, GROUP_ROWS = 16 * GROUP_WARPS, GROUP_THREADS = 32 * GROUP_WARPS;

// The place of a chunk of 16 bytes in panels of `rows` rows.
DEVICE int panel_place(int rows, int row, int chunk) {
    return (chunk / 8 * rows + row) * PANEL_ROW_BYTES + swizzle(8, row, chunk % 8) * CHUNK_BYTES;
}

// What the tensor cores are told of a matrix. distance: bytes between panels, of matrices that are read transposed.
DEVICE u64 describe_panels(const void* first, u32 distance = 16) {
    constexpr u64 EIGHT_ROWS = 8 * PANEL_ROW_BYTES, EXCHANGED_BY_128 = 1ull << 62;
    return (shared_address(first) & 0x3ffff) >> 4 | u64(distance >> 4) << 16 | EIGHT_ROWS >> 4 << 32 | EXCHANGED_BY_128;
}

#ifdef EMULATED

DEVICE void fence_copies() { emulated::current->unfenced = false; }
DEVICE void begin_products() {}
DEVICE void commit_products() { emulated::commit_products(); }
template <int PENDING, int N>
DEVICE void wait_for_products(float (&)[N][4]) {
    emulated::wait_for_products(PENDING);
}
template <class T>
float half_value(u16 bits) {
    return unpack<T>(bits).x;
}
template <class T, int N>
DEVICE void multiply_group(float (&sums)[N][4], u64 rows, u64 columns, bool adds) {
    emulated::start_product({&sums[0][0], nullptr, rows, columns, 8 * N, false, adds, half_value<T>});
}
template <class T, bool TRANSPOSED, int N>
DEVICE void multiply_group(float (&sums)[N][4], const u32 (&rows)[4], u64 columns, bool adds) {
    emulated::start_product({&sums[0][0], rows, 0, columns, 8 * N, TRANSPOSED, adds, half_value<T>});
}

#else

// Makes what this thread has written to shared memory visible to the tensor cores.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Registers that the products use have their values.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all but the last PENDING groups of products. sums: those of one that has ended.
template <int PENDING, int N>
DEVICE void wait_for_products(float (&sums)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int j = 0; j < N; j++)  // the compiler reads them no earlier
        asm volatile("" : "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])::"memory");
}

#define FOUR_SUMS(j) "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])
#define SUMS_64(j)                                                                                           \
    FOUR_SUMS(j), FOUR_SUMS(j + 1), FOUR_SUMS(j + 2), FOUR_SUMS(j + 3), FOUR_SUMS(j + 4), FOUR_SUMS(j + 5), \
        FOUR_SUMS(j + 6), FOUR_SUMS(j + 7)
#define SUMS_128(j) SUMS_64(j), SUMS_64(j + 8)
#define NAMES_64                                                                                                       \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"   \
    "%30,%31"
#define NAMES_128                                                                                                      \
    NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"   \
             "%57,%58,%59,%60,%61,%62,%63"
// The names of the operands behind the sums: rows, columns, whether to add. SIGNS: factors of 1, and what is transposed.
#define MULTIPLY_GROUP(N, TYPE, ROWS, COLUMNS, ADDS, SIGNS, ...)                                                       \
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32."   \
                 TYPE "." TYPE " {" NAMES_##N "}, " ROWS ", " COLUMNS ", adds, " SIGNS "; }"                           \
                 : SUMS_##N(0)                                                                                         \
                 : __VA_ARGS__, "l"(columns), "r"(int(adds)))
#define MULTIPLY_PANELS(N, TYPE, ROWS, COLUMNS, ADDS) \
    MULTIPLY_GROUP(N, TYPE, ROWS, COLUMNS, ADDS, "1, 1, 0, 0", "l"(rows))
#define MULTIPLY_FRAGMENTS(N, TYPE, ROWS, COLUMNS, ADDS)                                                               \
    if constexpr (TRANSPOSED)                                                                                          \
        MULTIPLY_GROUP(N, TYPE, "{" ROWS "}", COLUMNS, ADDS, "1, 1, 1", FRAGMENT);                                     \
    else                                                                                                               \
        MULTIPLY_GROUP(N, TYPE, "{" ROWS "}", COLUMNS, ADDS, "1, 1, 0", FRAGMENT)
#define FRAGMENT "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])

// Sums [64 x 8 N], which become, or to which is added if `adds`, the product of rows [64 x 16] and columns [8 N x 16].
template <class T, int N>
DEVICE void multiply_group(float (&sums)[N][4], u64 rows, u64 columns, bool adds) {
    static_assert(N == 8 || N == 16);
    if constexpr (N == 8 && is_same<T, bf16>) MULTIPLY_PANELS(64, "bf16", "%32", "%33", "%34");
    if constexpr (N == 8 && is_same<T, fp16>) MULTIPLY_PANELS(64, "f16", "%32", "%33", "%34");
    if constexpr (N == 16 && is_same<T, bf16>) MULTIPLY_PANELS(128, "bf16", "%64", "%65", "%66");
    if constexpr (N == 16 && is_same<T, fp16>) MULTIPLY_PANELS(128, "f16", "%64", "%65", "%66");
}
// The same with rows of which each warp has a fragment, and columns that may be TRANSPOSED, [16 x 8 N].
template <class T, bool TRANSPOSED, int N>
DEVICE void multiply_group(float (&sums)[N][4], const u32 (&rows)[4], u64 columns, bool adds) {
    static_assert(N == 8 || N == 16);
    if constexpr (N == 8 && is_same<T, bf16>) { MULTIPLY_FRAGMENTS(64, "bf16", "%32,%33,%34,%35", "%36", "%37"); }
    if constexpr (N == 8 && is_same<T, fp16>) { MULTIPLY_FRAGMENTS(64, "f16", "%32,%33,%34,%35", "%36", "%37"); }
    if constexpr (N == 16 && is_same<T, bf16>) { MULTIPLY_FRAGMENTS(128, "bf16", "%64,%65,%66,%67", "%68", "%69"); }
    if constexpr (N == 16 && is_same<T, fp16>) { MULTIPLY_FRAGMENTS(128, "f16", "%64,%65,%66,%67", "%68", "%69"); }
}

#endif
