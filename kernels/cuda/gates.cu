// act(gate) * up, where gate and up are the halves of a row.
#include "chunk.cuh"

struct Gate {
    const void* x;    // [rows, 2 size]
    void* out;        // [rows, size], contiguous
    i64 row_stride;   // of x, in elements
    i64 num_rows;
    int size;         // a multiple of 8
};

enum Activation { SILU, GELU_TANH, GELU };

template <int ACTIVATION>
DEVICE float activate(float x) {
    if constexpr (ACTIVATION == SILU) return x / (1.0f + expf(-x));
    if constexpr (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

constexpr int THREADS = 256;

// A thread takes chunks of 8 elements, a grid apart.
template <class T, int ACTIVATION>
__global__ void __launch_bounds__(THREADS) gate(const __grid_constant__ Gate p) {
    const int chunks = p.size / 8;
    const i64 step = i64(gridDim.x) * THREADS, end = p.num_rows * chunks;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < end; i += step) {
        const uint4* row = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + i / chunks * p.row_stride);
        const int chunk = int(i % chunks);
        static_cast<uint4*>(p.out)[i] = zip(row[chunk], row[chunks + chunk], [](u32 gate, u32 up) {
            const float2 a = unpack<T>(gate), b = unpack<T>(up);
            return pack<T>(rounded<T>(activate<ACTIVATION>(a.x)) * b.x, rounded<T>(activate<ACTIVATION>(a.y)) * b.y);
        });
    }
}
