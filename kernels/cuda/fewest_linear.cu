// Products of up to eight rows with a weight that stays packed, as fast as it can be read: a step is 32 columns of linear.cuh.
//
// A warp reads 32 outputs of its part of the columns, some steps ahead, into registers. The weight is the first factor, 16
// outputs at a time, and the rows are the second: of one row no more is multiplied than of eight. All of x lies in shared
// memory. Sums of a group are multiplied with its scale once, however many steps it has: results are as exact as those of
// linear.cu, but their bits are others, and depend on how many warps a block has.
#include "linear.cuh"

struct Fewest {
    static constexpr int ROWS = 8;
    template <class K>
    static constexpr int AHEAD = 4 / K::WORDS;  // steps whose codes are on their way
    template <class K>
    static constexpr int MOST_WARPS = 16 / K::SPANS;  // of a block: two spans of a step need more registers
    static constexpr int PADDING = 16;  // bytes between rows of x: eight of them begin in different banks
    static constexpr int TOTAL_STRIDE = OUTPUTS + 1;
};

// Of 16 outputs each and eight rows: a lane has outputs g and g + 8, rows 2 t and 2 t + 1.
using FewestSums = float[2][4];

// The scales, or offsets, of a lane's outputs 8 j + g in a group.
template <class S>
struct OwnFactors {
    static constexpr int CHUNKS = int(sizeof(S)) / 2;
    uint4 chunks[CHUNKS];

    DEVICE void read(const unsigned char* group) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            chunks[i] = reinterpret_cast<const uint4*>(group)[CHUNKS * (threadIdx.x % 32 / 8) + i];
    }
    DEVICE float operator[](int j) const {
        const bool second = threadIdx.x & 4;
        if constexpr (CHUNKS == 2) {
            const uint4& two = chunks[j / 2];
            return __uint_as_float(j % 2 ? (second ? two.w : two.z) : second ? two.y : two.x);
        } else {
            const uint4& four = chunks[0];
            const float2 both = unpack<S>(j == 0 ? four.x : j == 1 ? four.y : j == 2 ? four.z : four.w);
            return second ? both.y : both.x;
        }
    }
};

// Adds the products with a half step: 16 columns.
template <class K>
DEVICE void multiply_half(const Product& p, const Codes<K>& codes, int half, const u32 (&x)[4], FewestSums& to) {
    const u32 rows[2] = {x[2 * half], x[2 * half + 1]};
#pragma unroll
    for (int q = 0; q < 2; q++) {
        u32 upper[2], lower[2];
        codes.fragment(p, half, 2 * q, upper);
        codes.fragment(p, half, 2 * q + 1, lower);
        const u32 weights[4] = {upper[0], lower[0], upper[1], lower[1]};
        mma<typename K::T>(to[q], weights, rows);
    }
}

// What a warp has added up.
template <class K>
struct FewestPart {
    using Scale = typename K::Scale;
    const unsigned char *scales, *offsets;  // of the block's outputs; offsets: null: 0
    FewestSums sums = {}, products = {};    // products: of the group so far
    float of_rows[4] = {};                  // sums of x in the group, the same for every output
    OwnFactors<Scale> next_scales, next_offsets;

    DEVICE FewestPart(const Product& p, int block, int step) {
        const i64 begin = i64(block) * p.groups * K::GROUP_BYTES;
        scales = static_cast<const unsigned char*>(p.scales) + begin;
        offsets = p.offsets ? static_cast<const unsigned char*>(p.offsets) + begin : nullptr;
        if constexpr (K::GROUPED) read((step >> p.group_shift) * K::SPANS);
    }
    // Starts to read the factors of a group.
    DEVICE void read(int group) {
        next_scales.read(scales + i64(group) * K::GROUP_BYTES);
        if (offsets) next_offsets.read(offsets + i64(group) * K::GROUP_BYTES);
    }
    // Ends a group, and starts to read the factors of the next. last: there is none.
    DEVICE void end(int group, bool last) {
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 2 * q + i / 2;
                sums[q][i] = __fmaf_rn(products[q][i], next_scales[j], sums[q][i]);
                if (offsets) sums[q][i] = __fmaf_rn(of_rows[i % 2], next_offsets[j], sums[q][i]);
                products[q][i] = 0.0f;
            }
#pragma unroll
        for (int i = 0; i < 4; i++) of_rows[i] = 0.0f;
        if (!last) read(group + 1);
    }
    // Adds a step. x: the fragments of the rows. last: it is the warp's last.
    DEVICE void add(const Product& p, const Codes<K>& codes, const u32 (&x)[4], int step, bool last) {
        constexpr u32 ONE = is_same<typename K::T, bf16> ? 0x3f803f80u : 0x3c003c00u;
        const u32 ones[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if constexpr (!K::GROUPED) {
                multiply_half<K>(p, codes, half, x, sums);
            } else {
                multiply_half<K>(p, codes, half, x, products);
                const u32 rows[2] = {x[2 * half], x[2 * half + 1]};
                if (offsets) mma<typename K::T>(of_rows, ones, rows);
                if constexpr (K::SPANS == 2) end(2 * step + half, last && half == 1);
            }
        }
        if constexpr (K::GROUPED && K::SPANS == 1)
            if (last || (u32(step + 1) & ((1u << p.group_shift) - 1)) == 0) end(step >> p.group_shift, last);
    }
};

// Starts to copy all rows of x. Returns the bytes from one to the next.
template <class T>
DEVICE int copy_rows(const Product& p, unsigned char* rows) {
    const int chunks = p.steps * ROW_BYTES / CHUNK_BYTES, stride = p.steps * ROW_BYTES + Fewest::PADDING;
    for (int row = 0; row < p.m; row++)
        for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x)
            copy_async_16(rows + row * stride + CHUNK_BYTES * chunk,
                          static_cast<const T*>(p.x) + row * p.x_stride + 8 * chunk, true);
    commit_copies();
    return stride;
}

// Grid: as many blocks as run at once. Each takes blocks of outputs in turn, and each of its warps a part of the columns:
// AHEAD steps or a multiple of them. Shared memory: the rows, and the sums of the warps [warps, ROWS, TOTAL_STRIDE].
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(32 * Fewest::MOST_WARPS<Kind<T, Code, Scale, SPAN>>)
    linear_fewest(const __grid_constant__ Product p) {
    using K = Kind<T, Code, Scale, SPAN>;
    constexpr int AHEAD = Fewest::AHEAD<K>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int parts = p.steps / AHEAD, begin = warp * parts / warps * AHEAD, end = (warp + 1) * parts / warps * AHEAD;
    const int blocks = (p.n + OUTPUTS - 1) / OUTPUTS;
    Codes<K> ring[AHEAD];
    auto codes_of = [&](int block, int step) {
        return static_cast<const unsigned char*>(p.codes) + (i64(block) * p.steps + step) * K::CODE_BYTES;
    };
    auto start = [&](int block) {
        if (block < blocks && begin < end)
#pragma unroll
            for (int i = 0; i < AHEAD; i++) ring[i] = Codes<K>(codes_of(block, begin + i));
    };
    start(blockIdx.x);
    unsigned char* const rows = shared_memory();
    const int stride = copy_rows<T>(p, rows);
    float* const totals = reinterpret_cast<float*>(rows + p.m * stride);
    wait_for_copies<0>();
    __syncthreads();
    // The first row stands for those that are not there: nobody stores what comes of them.
    const unsigned char* const own = rows + (lane % 8 < p.m ? lane % 8 : 0) * stride + lane / 8 * CHUNK_BYTES;
    for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
        FewestPart<K> part(p, block, begin);
        const unsigned char *next = codes_of(block, begin), *x_of_step = own + begin * ROW_BYTES;
#pragma unroll 1
        for (int first = begin; first < end; first += AHEAD, x_of_step += AHEAD * ROW_BYTES) {
            next += AHEAD * K::CODE_BYTES;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                u32 x[4];
                ldmatrix_x4(x, x_of_step + i * ROW_BYTES);
                const int step = first + i;
                part.add(p, ring[i], x, step, step == end - 1);
                if (step + AHEAD < end) ring[i] = Codes<K>(next + i * K::CODE_BYTES);
            }
        }
        start(block + gridDim.x);
        __syncthreads();  // the sums of the block before are read
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 2 * (lane % 4) + i % 2, output = 16 * q + lane / 4 + 8 * (i / 2);
                totals[(warp * Fewest::ROWS + row) * Fewest::TOTAL_STRIDE + output] = part.sums[q][i];
            }
        __syncthreads();  // these sums are there
        for (int row = warp; row < p.m; row += warps) {
            float total = 0;  // of output `lane`
            for (int other = 0; other < warps; other++)
                total += totals[(other * Fewest::ROWS + row) * Fewest::TOTAL_STRIDE + lane];
            store<K>(p, row, OUTPUTS * block + lane, total);
        }
    }
}
