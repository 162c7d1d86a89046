// What the kernels rely on of the compiler and the chip, one thing at a time. See probes.py.
#include "attention.cuh"
#include "exact.cuh"

struct Product {
    const void* a;  // [16, 16]
    const void* b;  // [16, 8]
    float* out;     // [3, 16, 8]
};

// D = A B, three times: B through ldmatrix.trans of two matrices, of four, and transposed before, through ldmatrix.
template <class T>
__global__ void __launch_bounds__(32) multiply_fragments(const __grid_constant__ Product p) {
    u8* shared = shared_memory();
    const int lane = threadIdx.x;
    copy_async_16(shared + 16 * lane, static_cast<const u8*>(p.a) + 16 * lane, true);
    commit_copies();
    copy_async_16(shared + 512 + 16 * lane, static_cast<const u8*>(p.b) + 16 * (lane % 16), lane < 16);
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
    u16* const transposed = reinterpret_cast<u16*>(shared + 1024);  // [8, 16]
    const u16* const b = reinterpret_cast<const u16*>(shared + 512);
    for (int i = lane; i < 128; i += 32) transposed[i] = b[i % 16 * 8 + i / 16];
    __syncwarp();
    u32 left[4], right[3][2], four[4];
    ldmatrix_x4(left, shared + (lane % 16) * 32 + lane / 16 * 16);
    ldmatrix_x2_transposed(right[0], shared + 512 + (lane % 16) * 16);
    ldmatrix_x4_transposed(four, shared + 512 + lane * 16);  // the last two matrices are zeros, which were not read
    right[1][0] = four[0] | four[2], right[1][1] = four[1] | four[3];
    ldmatrix_x2(right[2], shared + 1024 + (lane % 8) * 32 + lane / 8 % 2 * 16);
    for (int way = 0; way < 3; way++) {
        float d[4] = {0, 0, 0, 0};
        mma<T>(d, left, right[way]);
        for (int i = 0; i < 4; i++)
            p.out[way * 128 + (lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = d[i];
    }
}

struct Arithmetic {
    const float* x;
    const float* y;
    float* out;      // [5, count]: sum, difference, product, quotient, and product plus x
    double* wide;    // [2, count]: product of doubles, and the same rounded up
    u64* high;       // [count]: the high half of a product of the numbers' bits, each 2^40 times
    int count;
};

__global__ void __launch_bounds__(128) compute_exactly(const __grid_constant__ Arithmetic p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) return;
    const float x = p.x[i], y = p.y[i];
    p.out[i] = add_exact(x, y);
    p.out[p.count + i] = subtract_exact(x, y);
    p.out[2 * p.count + i] = multiply_exact(x, y);
    p.out[3 * p.count + i] = divide_exact(x, y);
    p.out[4 * p.count + i] = add_exact(multiply_exact(x, y), x);
    p.wide[i] = multiply_exact(double(x), double(y));
    p.wide[p.count + i] = round_up(p.wide[i]);
    p.high[i] = multiply_high(u64(__float_as_uint(x)) << 30, u64(__float_as_uint(y)) << 30);
}

struct Convert {
    const float* x;
    u8* out;
    int count;
};

template <class F8>
__global__ void __launch_bounds__(128) convert(const __grid_constant__ Convert p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.out[i] = from_float<F8>(p.x[i]).bits;
}

struct Widen {
    const u8* x;  // [256]
    float* out;   // [5, 256]: as float32, as halves of bf16 and fp16 pairs, and of words of both
};

template <class T, class F8>
DEVICE float widened(u32 word, int place) {
    u32 even, odd;
    widen_word<T, F8>(word, even, odd);
    const float2 pair = unpack<T>(place % 2 ? odd : even);
    return place / 2 ? pair.y : pair.x;
}

template <class F8>
__global__ void __launch_bounds__(256) widen_all(const __grid_constant__ Widen p) {
    const int i = threadIdx.x;
    p.out[i] = to_float(F8{p.x[i]});
    p.out[256 + i] = unpack<bf16>(widen<bf16, F8>(p.x[i] << 8)).y;
    p.out[512 + i] = unpack<fp16>(widen<fp16, F8>(p.x[i])).x;
    const u32 word = reinterpret_cast<const u32*>(p.x)[i / 4];
    p.out[768 + i] = widened<bf16, F8>(word, i % 4);
    p.out[1024 + i] = widened<fp16, F8>(word, i % 4);
}

struct Fill {
    u32* out;  // [blocks]
    int words;
};

// The sum of the numbers 0 to words - 1, written to the whole of a block's shared memory by one half of its threads and
// read by the other.
__global__ void __launch_bounds__(256) fill_shared(const __grid_constant__ Fill p) {
    u32* const words = reinterpret_cast<u32*>(shared_memory());
    const int half = blockDim.x / 2, thread = threadIdx.x % half;
    if (threadIdx.x == 0) p.out[blockIdx.x] = 0;
    if (threadIdx.x < half)
        for (int i = thread; i < p.words; i += half) words[i] = i;
    __syncthreads();
    if (threadIdx.x < half) return;
    u32 sum = 0;
    for (int i = thread; i < p.words; i += half) sum += words[i];
    atomicAdd(&p.out[blockIdx.x], sum);
}
