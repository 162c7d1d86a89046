// Copies whole blocks of the KV cache, in all layers at once.
#include "ptx.cuh"

struct CopyBlocks {
    const u64* caches;   // [num_caches]: addresses of K and V caches, each contiguous
    const i64* pairs;    // [num_pairs, 2]: source and target block; no block is both
    i64 block_chunks;    // of 16 bytes, in a block of one cache
};

constexpr int THREADS = 256;

// Grid (pieces of a block, pair, cache).
template <int CHUNKS>
__global__ void __launch_bounds__(THREADS) copy_blocks(const __grid_constant__ CopyBlocks p) {
    uint4* cache = reinterpret_cast<uint4*>(p.caches[blockIdx.z]);
    const uint4* source = cache + p.pairs[2 * blockIdx.y] * p.block_chunks;
    uint4* target = cache + p.pairs[2 * blockIdx.y + 1] * p.block_chunks;
    const i64 first = i64(blockIdx.x) * THREADS * CHUNKS + threadIdx.x;
    uint4 held[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (first + i * THREADS < p.block_chunks) held[i] = source[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (first + i * THREADS < p.block_chunks) target[first + i * THREADS] = held[i];
}
