// Rows rounded to 8 bits, for quantised_linear.cu. Signed integers have a scale for a row, and are those of
// reference/quantised.py, as are floats, which have a scale for each 128 columns.
#include "ptx.cuh"

struct QuantisedRows {
    const void* x;    // [m, 8 chunks], rows aligned to 16 bytes
    void* codes;      // [m, 8 chunks], contiguous, bytes
    void* scales;     // see `Product::x_scales`
    i64 x_stride;     // in elements
    int m, chunks;
};

constexpr int ROW_THREADS = 256;
constexpr int GROUP_LANES = 16;  // each with 8 columns of the 128 that have one scale

// The largest magnitude of eight elements, as bits: those of a NaN are larger than infinity's.
template <class T>
DEVICE u32 largest_of(uint4 chunk) {
    const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = unpack<T>(pairs[i]);
        largest = max(largest, max(__float_as_uint(pair.x) & 0x7fffffffu, __float_as_uint(pair.y) & 0x7fffffffu));
    }
    return largest;
}

// The maximum over a block, in every thread.
DEVICE u32 max_block(u32 x) {
    __shared__ u32 of_warps[ROW_THREADS / 32];
    x = max_lanes(x);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < ROW_THREADS / 32; warp++) x = max(x, of_warps[warp]);
    return x;
}

// How numbers with a largest magnitude, as bits, are rounded: what they are multiplied with, and the scale of the codes.
template <class Pair>
struct Rounding {
    static constexpr float MOST = is_same<Pair, s8x2> ? 127.0f : 448.0f;
    float factor, scale;

    DEVICE explicit Rounding(u32 bits) {
        const float largest = __uint_as_float(bits);
        const bool finite = bits < 0x7f800000u;
        factor = finite ? fminf(__fdiv_rn(MOST, largest), 3.4028234663852886e38f) : 0.0f;
        scale = finite ? __fdiv_rn(largest, MOST) : __uint_as_float(0x7fffffffu);
    }
    // The codes of eight elements. Those of numbers that are not finite are any: the scale is NaN.
    template <class T>
    DEVICE uint2 codes(uint4 chunk) const {
        const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        u32 words[2] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = unpack<T>(pairs[i]);
            const u32 two = code(__fmul_rn(pair.x, factor)) | code(__fmul_rn(pair.y, factor)) << 8;
            words[i / 2] |= two << 16 * (i % 2);
        }
        return make_uint2(words[0], words[1]);
    }
    DEVICE static u32 code(float x) {
        if constexpr (is_same<Pair, s8x2>) return __float2int_rn(x) & 0xff;
        return fp8_bits<4>(x);
    }
};

// Grid: rows.
template <class T, class Pair>
__global__ void __launch_bounds__(ROW_THREADS) quantise_rows(const __grid_constant__ QuantisedRows p) {
    const int row = blockIdx.x;
    const uint4* const x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + row * p.x_stride);
    uint2* const codes = static_cast<uint2*>(p.codes) + i64(row) * p.chunks;
    float* const scales = static_cast<float*>(p.scales) + row;
    if constexpr (is_same<Pair, s8x2>) {
        u32 largest = 0;
        for (int chunk = threadIdx.x; chunk < p.chunks; chunk += ROW_THREADS) largest = max(largest, largest_of<T>(x[chunk]));
        const Rounding<Pair> rounding(max_block(largest));
        for (int chunk = threadIdx.x; chunk < p.chunks; chunk += ROW_THREADS)
            codes[chunk] = rounding.template codes<T>(x[chunk]);
        if (threadIdx.x == 0) scales[0] = rounding.scale;
    } else {
        for (int first = 0; first < p.chunks; first += ROW_THREADS) {
            const int chunk = first + threadIdx.x;
            const uint4 own = chunk < p.chunks ? x[chunk] : make_uint4(0, 0, 0, 0);
            const Rounding<Pair> rounding(max_lanes<GROUP_LANES>(largest_of<T>(own)));
            if (chunk >= p.chunks) continue;
            codes[chunk] = rounding.template codes<T>(own);
            if (chunk % GROUP_LANES == 0) scales[i64(chunk / GROUP_LANES) * p.m] = rounding.scale;
        }
    }
}
