// Products with a weight that stays packed, see linear.cuh.
#include "linear.cuh"

// Grid: tiles of rows, blocks of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(32 * SLICES, 3) linear_few(const __grid_constant__ Product p) {
    using K = Kind<T, Code, Scale, SPAN>;
    multiply_few<K>(p, SameRow(), Few<K>::ROWS * blockIdx.x, blockIdx.y);
}

// Grid: tiles of rows, tiles of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(Many::THREADS, 2) linear_many(const __grid_constant__ Product p) {
    multiply_many<Kind<T, Code, Scale, SPAN>>(p, SameRow(), Many::ROWS * blockIdx.x, blockIdx.y);
}

struct Unpacking {
    static constexpr int WARPS = 8;  // of a block: as many steps
};

// What lanes 4 g + t hold as word q becomes word t of lane 4 g + q.
DEVICE void exchange_words(u32 (&words)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            if (q & bit) continue;
            u32& given = lane & bit ? words[q] : words[q + bit];
            given = __shfl_xor_sync(ALL_LANES, given, bit);
        }
}

// The weight in x's type, out [n, 32 steps]: a code less zero, times its scale, plus its offset, in float32. Grid: steps,
// blocks of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(32 * Unpacking::WARPS) linear_unpacked(const __grid_constant__ Product p) {
    using K = Kind<T, Code, Scale, SPAN>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, block = blockIdx.y;
    const int step = Unpacking::WARPS * blockIdx.x + threadIdx.x / 32;
    if (step >= p.steps) return;
    const Codes<K> codes(static_cast<const unsigned char*>(p.codes) + (i64(block) * p.steps + step) * K::CODE_BYTES);
    // The scales of outputs g of all eights lie two apart, see `Product::scales`.
    const i64 first = (i64(block) * p.groups + (step >> p.group_shift) * K::SPANS) * OUTPUTS + 8 * (g / 2) + g % 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int output = OUTPUTS * block + 8 * j + g;
        u32 words[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 pairs[2];
            codes.fragment(p, half, j, pairs);
            float scale = 0, offset = 0;
            if constexpr (K::GROUPED) {
                const i64 at = first + (K::SPANS == 2 ? OUTPUTS * half : 0) + 2 * j;
                scale = to_float(static_cast<const Scale*>(p.scales)[at]);
                if (p.offsets) offset = to_float(static_cast<const Scale*>(p.offsets)[at]);
            } else if (output < p.n) {
                scale = static_cast<const float*>(p.scales)[output];
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 two = unpack<T>(pairs[i]);
                words[2 * half + i] = pack<T>(__fmaf_rn(two.x, scale, offset), __fmaf_rn(two.y, scale, offset));
            }
        }
        exchange_words(words);
        if (output < p.n)
            *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + (i64(output) * p.steps + step) * 32 + 8 * t) =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
}
