// Small kernels that test the emulation itself.
#include "ptx.cuh"

struct Convert {
    const float* x;
    u8* out;
    int count;
};

template <class F8>
__global__ void convert(const __grid_constant__ Convert p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.out[i] = from_float<F8>(p.x[i]).bits;
}

struct Widen {
    const u8* x;
    float* out;  // [3, 256]: as float32, as half of a bf16 pair, as half of an fp16 pair
};

template <class F8>
__global__ void widen_all(const __grid_constant__ Widen p) {
    const int i = threadIdx.x;
    p.out[i] = to_float(F8{p.x[i]});
    p.out[256 + i] = unpack<bf16>(widen<bf16, F8>(p.x[i] << 8)).y;
    p.out[512 + i] = unpack<fp16>(widen<fp16, F8>(p.x[i])).x;
}

struct Product {
    const void* a;  // [16, 16]
    const void* b;  // [16, 8]
    float* out;     // [16, 8]
};

// D = A B, through shared memory, asynchronous copies, ldmatrix and mma.
template <class T>
__global__ void product(const __grid_constant__ Product p) {
    u8* shared = shared_memory();
    const int lane = threadIdx.x;
    copy_async_16(shared + 16 * lane, static_cast<const u8*>(p.a) + 16 * lane, true);
    commit_copies();
    copy_async_16(shared + 512 + 16 * lane, static_cast<const u8*>(p.b) + 16 * (lane % 16), lane < 16);
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
    u32 a[4], b[2];
    ldmatrix_x4(a, shared + (lane % 16) * 32 + lane / 16 * 16);
    ldmatrix_x2_transposed(b, shared + 512 + (lane % 16) * 16);
    float d[4] = {0, 0, 0, 0};
    mma<T>(d, a, b);
    for (int i = 0; i < 4; i++) p.out[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = d[i];
}

struct Fail {
    int* out;
};

enum Failure { DEADLOCK, MASK, MISALIGNED, UNMAPPED, TOO_MUCH_SHARED, UNSET };

template <int FAILURE>
__global__ void fail(const __grid_constant__ Fail p) {
    const int thread = threadIdx.x;
    if (FAILURE == DEADLOCK && thread < 40) __syncthreads();
    if (FAILURE == MASK) __shfl_sync(0xffff, thread, 0);
    if (FAILURE == MISALIGNED) copy_async_16(shared_memory() + 4, p.out, true);
    if (FAILURE == UNMAPPED) reinterpret_cast<int*>(u64(4096))[thread] = 1;
    if (FAILURE == TOO_MUCH_SHARED) shared_memory()[256] = 1;
    if (FAILURE == UNSET) p.out[thread] = reinterpret_cast<int*>(shared_memory())[thread];
}
