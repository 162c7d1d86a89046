// RMS norm of rows, optionally after adding them to a residual. A row stays in registers between its two passes.
#include "chunk.cuh"

struct RmsNorm {
    const void* x;         // [outer, inner, size], size contiguous
    void* residual;        // [outer * inner, size], contiguous: becomes residual + x. Null: x itself is normed
    const void* weight;    // [size]
    void* out;             // [outer * inner, size], contiguous; may be x
    i64 outer_stride, inner_stride;  // of x, in elements
    int inner, size;
    float eps, offset;
};

// Sums over a block; every thread gets the result.
template <int THREADS>
DEVICE float sum_block(float x) {
    __shared__ float sums[THREADS / 32];
    x = sum_lanes(x);
    if constexpr (THREADS > 32) {
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0.0f;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; warp++) x += sums[warp];
    }
    return x;
}

// A block computes one row. A thread holds CHUNKS runs of 8 elements, THREADS runs apart.
// size is a multiple of 8 and at most 8 * THREADS * CHUNKS; rows are aligned to 16 bytes.
template <class T, int THREADS, int CHUNKS, bool ADD>
__global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ RmsNorm p) {
    const int row = blockIdx.x, chunks = p.size / 8;
    const T* x = static_cast<const T*>(p.x) + row / p.inner * p.outer_stride + row % p.inner * p.inner_stride;
    T* residual = static_cast<T*>(p.residual) + i64(row) * p.size;
    uint4 held[CHUNKS];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        held[i] = make_uint4(0, 0, 0, 0);
        if (chunk >= chunks) continue;
        held[i] = reinterpret_cast<const uint4*>(x)[chunk];
        if constexpr (ADD) held[i] = add<T>(held[i], reinterpret_cast<const uint4*>(residual)[chunk]);
        if constexpr (ADD) reinterpret_cast<uint4*>(residual)[chunk] = held[i];
        squares += sum_of_squares<T>(held[i]);
    }
    const float scale = rsqrtf(sum_block<THREADS>(squares) / float(p.size) + p.eps);
    T* out = static_cast<T*>(p.out) + i64(row) * p.size;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        if (chunk >= chunks) continue;
        const uint4 weight = reinterpret_cast<const uint4*>(p.weight)[chunk];
        reinterpret_cast<uint4*>(out)[chunk] = scaled<T>(held[i], scale, weight, p.offset);
    }
}
