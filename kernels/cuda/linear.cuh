// Products with weights that stay packed: out = x W' + bias, where W[n, k] = scale[n, g] * (code[n, k] - zero) +
// offset[n, g] and column k is in group g. Codes are integers, or floats of 8 bits, without zero and offset. They become
// numbers of x's type in registers, exactly; tensor cores multiply them, and scales and offsets are applied to sums in
// float32.
//
// The order of every sum follows from k alone, so a row's bits depend neither on the other rows nor on the kernel. A step
// is 32 columns. Steps are divided into SLICES slices. In a slice, from 0 and in ascending order, each span of columns with
// one scale (a step, or half of it where groups have 16 columns) is added:
//
//     y = fma(sum of x * (code - zero), scale, y);  y = fma(sum of x, offset, y)
//
// Without groups a slice is one sum. Then slices are added in ascending order, in float32: there are no atomics. Without
// groups the scale is applied after that. `linear_few` has a warp for each slice, so few rows use many warps; `linear_many`
// has all slices in turn. linear.cu has them for a weight, experts.cu for the experts of a layer.
//
// Rows in 8 bits (quantised_linear.cu) are rows of pairs of bytes: wherever a column is said here, it is two of theirs. The
// sums of integers are exact, in any order. Floats have a scale for ROW_GROUP_STEPS steps of a row, too, and a step adds
// `y = fma(sum of x * code, scale of the row * scale, y)`.
//
// Lane 4 g + t. The fragment of a half step h, 16 columns, has columns 16 h + 8 i + 2 t + e: pair i, element e of lane t.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"

// Codes: a byte; half a byte; half a byte that is the index of a value from 0 to 255; a byte that is an e4m3; pairs of bytes
// of x's type; none: numbers of x's type, in rows [n, 32 steps], to which neither scales nor offsets are applied.
struct byte_codes {};
struct half_codes {};
struct table_codes {};
struct float_codes {};
struct pair_codes {};
struct dense_codes {};

struct Product {
    const void* x;        // [m, 32 steps], rows aligned to 16 bytes
    const void* codes;    // [blocks of 32 outputs, steps, (8 bits: 2 halves,) lanes, 4]: words, as `Codes` reads them
    const void* scales;   // [blocks, groups, 4, 4, 2]: of output 8 j + 2 t + e at (t, j, e). Without groups float32 [n]
    const void* offsets;  // like scales; null: 0
    const void* bias;     // [n]; null: 0
    const void* x_scales;  // of rows in 8 bits, float32: of integers [m], of floats [ceil(steps / ROW_GROUP_STEPS), m]
    void* out;            // [m, n], contiguous
    u64 low_values, high_values;  // of table_codes: the values of codes 0 to 7 and 8 to 15, a byte each
    i64 x_stride;         // in elements, a multiple of 8
    int m, n, steps;
    int groups, group_shift;      // a group has 2^group_shift steps, or is half a step
    int zero;
};

constexpr int SLICES = 8;       // of the steps
constexpr int OUTPUTS = 32;     // of a warp
constexpr int HALF_BYTES = 512;  // of a warp's codes, 16 bytes by each lane: of a step, or with 8 bits of half a step
constexpr int ROW_GROUP_STEPS = 2;  // of a row of 8-bit floats, that have one scale
constexpr int TOTAL_STRIDE = 40;  // between rows of sums in shared memory: eight rows begin in different banks

// SPAN: columns of a step that have one scale, 16 or 32; 0: a row has one. Output: the type of results and of the bias.
template <class Element, class Stored, class ScaleType, int SPAN, class Output = Element>
struct Kind {
    using T = Element;
    using Code = Stored;
    using Scale = ScaleType;
    using Out = Output;
    using Sum = SumOf<T>;
    static constexpr bool EXACT = is_same<T, s8x2>;        // sums are
    static constexpr bool ROW_SCALED = is_same<T, e4m3x2>;  // in each step
    static constexpr int ROW_BYTES_AFTER = ROW_SCALED ? int(sizeof(float)) : 0;  // a row's, after all rows of a tile
    static constexpr bool GROUPED = SPAN > 0;
    static constexpr int SPANS = SPAN == 16 ? 2 : 1;  // of a step
    static constexpr bool DENSE = is_same<Code, dense_codes>;
    static constexpr bool PAIRS = is_same<Code, pair_codes>;
    static constexpr int WORDS = DENSE || PAIRS ? 4 : is_same<Code, byte_codes> || is_same<Code, float_codes> ? 2 : 1;
    static constexpr int CODE_BYTES = WORDS * HALF_BYTES;  // of a step, as are these
    static constexpr int SCALE_BYTES = GROUPED ? SPANS * OUTPUTS * int(sizeof(Scale)) : 0;
    static constexpr int GROUP_BYTES = SCALE_BYTES / SPANS;
    static constexpr int STAGE_BYTES = CODE_BYTES + 2 * SCALE_BYTES;
};

constexpr int ROW_BYTES = 64;  // of a row of x, or of a dense weight, in a step

// The place of a chunk of 16 bytes of such a row in shared memory.
DEVICE int chunk_place(int row, int chunk) {
    return row * ROW_BYTES + CHUNK_BYTES * swizzle(ROW_BYTES / CHUNK_BYTES, row, chunk);
}

DEVICE int slice_begin(const Product& p, int slice) { return slice * p.steps / SLICES; }

// The stage after another one, of a ring.
template <int STAGES>
DEVICE int after(int stage) {
    return stage == STAGES - 1 ? 0 : stage + 1;
}

// ---------------------------------------------------------------- codes to fragments

// Four bytes less `zero` as two pairs. Exact, for the differences are integers up to 256.
template <class T>
DEVICE void widen_bytes(u32 bytes, u32 zero, u32 (&to)[2]) {
    if constexpr (is_same<T, fp16>) {  // 0x6400 + byte is the number 1024 + byte
        const u32 less = 0xe400e400u + zero * 0x10001u;
        to[0] = add_pairs<T>(permute_bytes(bytes, 0x64646464u, 0x4140), less);
        to[1] = add_pairs<T>(permute_bytes(bytes, 0x64646464u, 0x4342), less);
    } else {  // 0x4b000000 + byte is 2^23 + byte. The half of a float32 that bf16 lacks is 0 in the difference
        const float less = 8388608.0f + float(zero);
        u32 bits[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            bits[i] = __float_as_uint(__uint_as_float(permute_bytes(bytes, 0x4b000000u, 0x7440 + i)) - less);
        to[0] = permute_bytes(bits[0], bits[1], 0x7632);
        to[1] = permute_bytes(bits[2], bits[3], 0x7632);
    }
}

// Pair `pair` of a word of eight half bytes less `zero`: half bytes `pair` and `pair + 4`. zero: less than 128.
template <class T>
DEVICE u32 widen_nibbles(u32 word, int pair, u32 zero) {
    constexpr u32 BASE = is_same<T, bf16> ? 0x43004300u : 0x64006400u;  // 128, 1024: numbers whose last bit counts 1
    return add_pairs<T>(and_or(word >> 4 * pair, 0x000f000fu, BASE), (BASE | 0x80008000u) + zero * 0x10001u);
}

// The four e4m3 of a word as two pairs: bytes 0 and 2, bytes 1 and 3. Sign and magnitude are shifted to their places in T;
// a product with a power of two corrects for T's larger exponent bias. Exact, also for subnormal numbers. The magnitude
// 0x7f is NaN: adding 1 to it carries, and the carry sets those bits of T's exponent that the shifted one has not.
template <class T>
DEVICE void widen_floats(u32 word, u32 (&to)[2]) {
    constexpr int UP = is_same<T, bf16> ? 4 : 7;
    constexpr u32 SIGNS = 0x80008000u, MAGNITUDES = (0x7fu << UP) * 0x00010001u, CARRIES = 0x00800080u;
    constexpr u32 REST = is_same<T, bf16> ? 0xf0 : 0x80;         // times a carry: bits 11 to 14; bit 14
    constexpr u32 FACTOR = is_same<T, bf16> ? 0x7b80 : 0x5c00;  // 2^120, 2^8
    const u32 carried = (word & 0x7f7f7f7fu) + 0x01010101u;
    const u32 even = (word << 8 & SIGNS) | (word << UP & MAGNITUDES) | (carried & CARRIES) * REST;
    const u32 odd = (word & SIGNS) | (word >> (8 - UP) & MAGNITUDES) | (carried >> 8 & CARRIES) * REST;
    to[0] = multiply_pairs<T>(even, FACTOR * 0x00010001u);
    to[1] = multiply_pairs<T>(odd, FACTOR * 0x00010001u);
}

// The bytes of a table for four half bytes, the lower ones of `codes`.
DEVICE u32 look_up(const Product& p, u32 codes) {
    const u32 which = codes & 0x7777u;
    const u32 low = permute_bytes(u32(p.low_values), u32(p.low_values >> 32), which);
    const u32 high = permute_bytes(u32(p.high_values), u32(p.high_values >> 32), which);
    return permute_bytes(low, high, 0x3210u + ((codes & 0x8888u) >> 1));
}

// A lane's codes of a step: for each half step and each eight outputs, of EIGHTS, two pairs.
template <class K, int EIGHTS = 4>
struct Codes {
    static constexpr int LANE_BYTES = 4 * EIGHTS;
    u32 words[K::WORDS][EIGHTS];  // of eight outputs each; of dense weights pairs, by eight outputs and eight columns

    Codes() = default;
    DEVICE explicit Codes(const unsigned char* stage) {
        if constexpr (K::DENSE) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int j = 0; j < 4; j++) ldmatrix_x4(words[j], stage + chunk_place(8 * j + lane % 8, lane / 8));
            return;
        }
#pragma unroll
        for (int i = 0; i < K::WORDS; i++) {
            const unsigned char* const own = stage + LANE_BYTES * (32 * i + threadIdx.x % 32);
            if constexpr (EIGHTS == 2) {
                const uint2 word = *reinterpret_cast<const uint2*>(own);
                words[i][0] = word.x, words[i][1] = word.y;
            } else {
                const uint4 word = *reinterpret_cast<const uint4*>(own);
                words[i][0] = word.x, words[i][1] = word.y, words[i][2] = word.z, words[i][3] = word.w;
            }
        }
    }
    // The fragment of half step `half` and outputs 8 j to 8 j + 7.
    DEVICE void fragment(const Product& p, int half, int j, u32 (&b)[2]) const {
        if constexpr (K::DENSE) {
            b[0] = words[j][2 * half], b[1] = words[j][2 * half + 1];
        } else if constexpr (K::PAIRS) {
            b[0] = words[2 * half][j], b[1] = words[2 * half + 1][j];
        } else if constexpr (is_same<typename K::Code, byte_codes>) {
            widen_bytes<typename K::T>(words[half][j], p.zero, b);
        } else if constexpr (is_same<typename K::Code, float_codes>) {
            widen_floats<typename K::T>(words[half][j], b);
        } else if constexpr (is_same<typename K::Code, table_codes>) {
            widen_bytes<typename K::T>(look_up(p, words[0][j] >> 16 * half), p.zero, b);
        } else {
            b[0] = widen_nibbles<typename K::T>(words[0][j], 2 * half, p.zero);
            b[1] = widen_nibbles<typename K::T>(words[0][j], 2 * half + 1, p.zero);
        }
    }
};

// ---------------------------------------------------------------- a step of a warp

// What a lane copies of the weights of OUTPUTS outputs: its codes, and some of the scales or offsets, which all lanes read.
template <class K>
struct LaneWeights {
    const unsigned char* codes;
    const unsigned char* factors;  // null: the lane copies none
    int first_output;              // of a dense weight, of which it copies every eighth

    DEVICE LaneWeights(const Product& p, int block) {
        const int lane = threadIdx.x % 32;
        codes = static_cast<const unsigned char*>(p.codes);
        codes += K::DENSE ? 16 * (lane % 4) : i64(block) * p.steps * K::CODE_BYTES + 16 * lane;
        first_output = OUTPUTS * block + lane / 4;
        factors = nullptr;
        if constexpr (K::GROUPED) {
            constexpr int CHUNKS = K::SCALE_BYTES / 16;
            const void* from = lane < CHUNKS ? p.scales : p.offsets;
            const i64 begin = i64(block) * p.groups * K::GROUP_BYTES + 16 * (lane % CHUNKS);
            if (lane < 2 * CHUNKS && from) factors = static_cast<const unsigned char*>(from) + begin;
        }
    }
    // Starts to copy a step. stage: its codes, scales and offsets.
    DEVICE void copy(const Product& p, int step, unsigned char* stage) const {
        if constexpr (K::DENSE) {
#pragma unroll
            for (int i = 0; i < OUTPUTS; i += 8) {  // the last output stands for those after it, which nobody stores
                const i64 row = min(first_output + i, p.n - 1);
                unsigned char* const to = stage + chunk_place(i + threadIdx.x % 32 / 4, threadIdx.x % 4);
                copy_async_16(to, codes + (row * p.steps + step) * ROW_BYTES, true);
            }
            return;
        }
        unsigned char* const own = stage + 16 * (threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < K::CODE_BYTES; i += HALF_BYTES)
            copy_async_16(own + i, codes + i64(step) * K::CODE_BYTES + i, true);
        if constexpr (K::GROUPED)
            if (factors)
                copy_async_16(own + K::CODE_BYTES, factors + i64(step >> p.group_shift) * K::SCALE_BYTES, true);
    }
};

// The scales, or offsets, of a lane's outputs, as they are stored until they are used.
template <class S>
struct Factors {
    static constexpr int CHUNKS = int(sizeof(S)) / 2;
    uint4 chunks[CHUNKS];  // pairs of outputs 8 j + 2 t and the next

    DEVICE explicit Factors(const unsigned char* scales) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            chunks[i] = reinterpret_cast<const uint4*>(scales)[CHUNKS * (threadIdx.x % 4) + i];
    }
    DEVICE float2 pair(int j) const {
        if constexpr (CHUNKS == 2) {
            const uint4& two = chunks[j / 2];
            const u32 first = j % 2 ? two.z : two.x, second = j % 2 ? two.w : two.y;
            return make_float2(__uint_as_float(first), __uint_as_float(second));
        } else {
            const uint4& four = chunks[0];
            return unpack<S>(j == 0 ? four.x : j == 1 ? four.y : j == 2 ? four.z : four.w);
        }
    }
    // Adds products [m][i] of outputs 8 j to 8 j + 7, times the factors, to sums.
    template <int TILES>
    DEVICE void add(const float (&products)[TILES][4], int j, float (&sums)[TILES][4][4]) const {
        const float2 factors = pair(j);
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[m][j][i] = __fmaf_rn(products[m][i], i & 1 ? factors.y : factors.x, sums[m][j][i]);
    }
};

// The fragments of x of a step: TILES times 16 rows, two half steps.
template <int TILES>
using Rows = u32[TILES][2][4];
// Sums of TILES times 16 rows and OUTPUTS outputs.
template <int TILES, class Sum = float>
using Sums = Sum[TILES][4][4];

// The products of the rows with half steps FIRST to before LAST of eight outputs.
template <class K, int FIRST, int LAST, int TILES>
DEVICE void multiply_eight(const Product& p, const Codes<K>& codes, int j, const Rows<TILES>& x, float (&to)[TILES][4]) {
    using T = typename K::T;
#pragma unroll
    for (int half = FIRST; half < LAST; half++) {
        u32 b[2];
        codes.fragment(p, half, j, b);
#pragma unroll
        for (int m = 0; m < TILES; m++) half == FIRST ? multiply<T>(to[m], x[m][half], b) : mma<T>(to[m], x[m][half], b);
    }
}

// Adds half steps FIRST to before LAST, which have the scales and offsets of a span.
template <class K, int FIRST, int LAST, int TILES>
DEVICE void add_span(const Product& p, const unsigned char* scales, const Codes<K>& codes, const Rows<TILES>& x,
                     Sums<TILES>& sums) {
    const Factors<typename K::Scale> factors(scales);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float products[TILES][4];
        multiply_eight<K, FIRST, LAST, TILES>(p, codes, j, x, products);
        factors.template add<TILES>(products, j, sums);
    }
    if (!p.offsets) return;
    constexpr u32 ONES = is_same<typename K::T, bf16> ? 0x3f803f80u : 0x3c003c00u;
    const u32 ones[2] = {ONES, ONES};
    float of_rows[TILES][4] = {};  // the sums of the rows, the same for every output
#pragma unroll
    for (int half = FIRST; half < LAST; half++)
#pragma unroll
        for (int m = 0; m < TILES; m++) mma<typename K::T>(of_rows[m], x[m][half], ones);
    const Factors<typename K::Scale> offsets(scales + K::SCALE_BYTES);
#pragma unroll
    for (int j = 0; j < 4; j++) offsets.template add<TILES>(of_rows, j, sums);
}

// Adds the products of a step of rows that have scales: `of_rows` [TILES times 16].
template <class K, int TILES>
DEVICE void add_scaled_step(const Product& p, const unsigned char* scales, const Codes<K>& codes, const float* of_rows,
                            const Rows<TILES>& x, Sums<TILES>& sums) {
    float rows[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) rows[m][i] = of_rows[16 * m + 8 * i + threadIdx.x % 32 / 4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float products[TILES][4];
        multiply_eight<K, 0, 2, TILES>(p, codes, j, x, products);
        float2 both = make_float2(1.0f, 1.0f);
        if constexpr (K::GROUPED) both = Factors<float>(scales).pair(j);
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float scale = __fmul_rn(rows[m][i >> 1], i & 1 ? both.y : both.x);
                sums[m][j][i] = __fmaf_rn(products[m][i], scale, sums[m][j][i]);
            }
    }
}

// Adds the products of a step. tile: its rows, after which come their scales if they have some.
template <class K, int TILES>
DEVICE void add_step(const Product& p, const unsigned char* stage, const unsigned char* tile, const Rows<TILES>& x,
                     Sums<TILES, typename K::Sum>& sums) {
    const Codes<K> codes(stage);
    const unsigned char* scales = stage + K::CODE_BYTES;
    if constexpr (K::ROW_SCALED) {
        const float* const of_rows = reinterpret_cast<const float*>(tile + 16 * TILES * ROW_BYTES);
        add_scaled_step<K, TILES>(p, scales, codes, of_rows, x, sums);
    } else if constexpr (!K::GROUPED) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 b[2];
                codes.fragment(p, half, j, b);
#pragma unroll
                for (int m = 0; m < TILES; m++) mma<typename K::T>(sums[m][j], x[m][half], b);
            }
    } else if constexpr (K::SPANS == 1) {
        add_span<K, 0, 2, TILES>(p, scales, codes, x, sums);
    } else {
        add_span<K, 0, 1, TILES>(p, scales, codes, x, sums);
        add_span<K, 1, 2, TILES>(p, scales + K::SCALE_BYTES / 2, codes, x, sums);
    }
}

// The result of the sum of all slices.
template <class K>
DEVICE float finished(const Product& p, int row, int output, typename K::Sum total) {
    const float bias = p.bias ? to_float(static_cast<const typename K::Out*>(p.bias)[output]) : 0.0f;
    if constexpr (K::GROUPED || K::DENSE) {
        return total + bias;
    } else {
        const float scale = static_cast<const float*>(p.scales)[output];
        if constexpr (!K::EXACT) return __fmaf_rn(total, scale, bias);
        const float both = __fmul_rn(static_cast<const float*>(p.x_scales)[row], scale);
        return __fadd_rn(__fmul_rn(float(total), both), bias);
    }
}

template <class K>
DEVICE void store(const Product& p, int row, int output, typename K::Sum total) {
    if (row >= p.m || output >= p.n) return;
    const float value = finished<K>(p, row, output, total);
    static_cast<typename K::Out*>(p.out)[i64(row) * p.n + output] = from_float<typename K::Out>(value);
}

// Stores two outputs, the first of which has an even number.
template <class K>
DEVICE void store_two(const Product& p, int row, int output, typename K::Sum first, typename K::Sum second) {
    if (p.n % 2) {  // rows that are not aligned
        store<K>(p, row, output, first);
        store<K>(p, row, output + 1, second);
    } else if (row < p.m && output < p.n) {
        const float value = finished<K>(p, row, output, first);
        const u32 pair = pack<typename K::Out>(value, finished<K>(p, row, output + 1, second));
        reinterpret_cast<u32*>(p.out)[(i64(row) * p.n + output) / 2] = pair;
    }
}

// ---------------------------------------------------------------- few rows

template <class K>
struct Few {
    static constexpr int ROWS = 16;
    static constexpr int STAGES = K::PAIRS ? 3 : K::WORDS == 1 ? 5 : 4;  // steps of a warp in shared memory
    static constexpr int STAGE_BYTES = K::STAGE_BYTES + ROWS * (ROW_BYTES + K::ROW_BYTES_AFTER);  // weights, then rows
};

// The row of x of a row of a product: its own number, or another one.
struct SameRow {
    DEVICE int operator()(int row) const { return row; }
};
struct GatheredRow {
    const int* sources;  // null: its own number
    DEVICE int operator()(int row) const { return sources ? sources[row] : row; }
};

// What a lane copies of the 16 rows of a tile: 8 columns of a step, of every eighth row. Nothing is copied in the place of
// rows after the last: nobody stores what comes of them.
template <class K>
struct LaneRows {
    using T = typename K::T;
    const T* from[2];  // in step 0; null: there is no such row
    int place;         // of the first one in a stage; the other is eight rows on
    const float* scales = nullptr;  // of a row, in step 0; null: the lane copies none

    template <class Source>
    DEVICE LaneRows(const Product& p, Source source, int first) {
        const int lane = threadIdx.x % 32;
        place = chunk_place(lane / 4, lane % 4);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first + lane / 4 + 8 * i;
            from[i] = row < p.m ? static_cast<const T*>(p.x) + source(row) * p.x_stride + 8 * (lane % 4) : nullptr;
        }
        if constexpr (K::ROW_SCALED)
            if (lane < Few<K>::ROWS && first + lane < p.m) scales = static_cast<const float*>(p.x_scales) + first + lane;
    }
    // Starts to copy a step.
    DEVICE void copy(const Product& p, int step, unsigned char* tile) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (from[i]) copy_async_16(tile + place + 8 * i * ROW_BYTES, from[i] + 32 * step, true);
        if constexpr (K::ROW_SCALED) {
            unsigned char* const own = tile + Few<K>::ROWS * ROW_BYTES + sizeof(float) * (threadIdx.x % 32);
            if (scales) copy_async_4(own, scales + i64(step / ROW_GROUP_STEPS) * p.m, true);
        }
    }
};

// The fragments of a step's rows, TILES times 16.
template <int TILES>
DEVICE void read_rows(const unsigned char* tile, Rows<TILES>& x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            ldmatrix_x4(x[m][half], tile + chunk_place(16 * m + lane % 16, 2 * half + lane / 16));
}

// The sums of a slice, by a warp. ring: STAGES stages of its own.
template <class K, class Source>
DEVICE void sum_slice(const Product& p, Source source, int first_row, int block, int slice, unsigned char* ring,
                      Sums<1, typename K::Sum>& sums) {
    constexpr int STAGES = Few<K>::STAGES;
    const int begin = slice_begin(p, slice), end = slice_begin(p, slice + 1);
    const LaneWeights<K> weights(p, block);
    const LaneRows<K> rows(p, source, first_row);
    int filled = 0, read = 0;  // stages
    auto stage = [&](int number) { return ring + number * Few<K>::STAGE_BYTES; };
    auto copy = [&](int step) {
        if (step < end) {
            weights.copy(p, step, stage(filled));
            rows.copy(p, step, stage(filled) + K::STAGE_BYTES);
        }
        commit_copies();
        filled = after<STAGES>(filled);
    };
    for (int step = begin; step < begin + STAGES - 1; step++) copy(step);
#pragma unroll 1  // more steps at a time would need more registers than three blocks have
    for (int step = begin; step < end; step++) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // the step is there for all lanes, and the stage before it is read
        copy(step + STAGES - 1);
        Rows<1> x;
        const unsigned char* const tile = stage(read) + K::STAGE_BYTES;
        read_rows<1>(tile, x);
        add_step<K, 1>(p, stage(read), tile, x, sums);
        read = after<STAGES>(read);
    }
}

// A block computes 16 rows from `first_row` on and OUTPUTS outputs, a warp one slice of them.
template <class K, class Source>
DEVICE void multiply_few(const Product& p, Source source, int first_row, int block) {
    using Sum = typename K::Sum;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Sums<1, Sum> sums = {};
    unsigned char* const ring = shared_memory() + warp * Few<K>::STAGES * Few<K>::STAGE_BYTES;
    sum_slice<K>(p, source, first_row, block, warp, ring, sums);
    __syncthreads();  // the stages are read: sums take their place
    Sum* const totals = reinterpret_cast<Sum*>(shared_memory());  // [SLICES, ROWS, OUTPUTS]
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = warp * Few<K>::ROWS + lane / 4 + 8 * (i >> 1);
            totals[row * TOTAL_STRIDE + 8 * j + 2 * (lane % 4) + (i & 1)] = sums[0][j][i];
        }
    __syncthreads();
    for (int row = warp; row < min(Few<K>::ROWS, p.m - first_row); row += SLICES) {
        Sum total = 0;  // of output `lane`
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++)
            total += totals[(slice * Few<K>::ROWS + row) * TOTAL_STRIDE + lane];
        store<K>(p, first_row + row, OUTPUTS * block + lane, total);
    }
}

// ---------------------------------------------------------------- many rows

struct Many {
    static constexpr int TILES = 4, ROWS = 16 * TILES, WARPS = 4, THREADS = 32 * WARPS;
    template <class K>
    static constexpr int STAGES = K::DENSE || K::PAIRS ? 4 : 6;
    template <class K>
    static constexpr int TILE_BYTES = ROWS * (ROW_BYTES + K::ROW_BYTES_AFTER);  // of x, in a step
};

// What a thread copies of the block's rows: 8 columns of a step, of every 32nd row. Instead of those after the last one, which
// nobody stores, it is copied.
template <class K>
struct ThreadRows {
    using T = typename K::T;
    static constexpr int CHUNKS = ROW_BYTES / CHUNK_BYTES, APART = Many::THREADS / CHUNKS;
    const T* rows[Many::ROWS / APART];  // in step 0
    int place;                          // of the first one in a stage; the others are APART rows on

    template <class Source>
    DEVICE ThreadRows(const Product& p, Source source, int first) {
        const int chunk = threadIdx.x % CHUNKS;
        place = chunk_place(threadIdx.x / CHUNKS, chunk);
#pragma unroll
        for (int i = 0; i < Many::ROWS / APART; i++) {
            const int row = threadIdx.x / CHUNKS + i * APART;
            rows[i] = static_cast<const T*>(p.x) + source(min(first + row, p.m - 1)) * p.x_stride + 8 * chunk;
        }
    }
    // Starts to copy a step. first: the block's first row.
    DEVICE void copy(const Product& p, int first, int step, unsigned char* to) const {
#pragma unroll
        for (int i = 0; i < Many::ROWS / APART; i++)
            copy_async_16(to + place + i * APART * ROW_BYTES, rows[i] + 32 * step, true);
        if constexpr (K::ROW_SCALED)
            if (threadIdx.x < Many::ROWS) {
                const i64 at = i64(step / ROW_GROUP_STEPS) * p.m + min(first + int(threadIdx.x), p.m - 1);
                unsigned char* const own = to + Many::ROWS * ROW_BYTES + sizeof(float) * threadIdx.x;
                copy_async_4(own, static_cast<const float*>(p.x_scales) + at, true);
            }
    }
};

// The sums of all slices so far, 4 N of a thread's own, which have no room in registers.
template <int THREADS, int N>
struct Totals {
    float4* own;  // [N], THREADS apart

    DEVICE explicit Totals(unsigned char* memory) : own(reinterpret_cast<float4*>(memory) + threadIdx.x) {
#pragma unroll
        for (int i = 0; i < N; i++) own[i * THREADS] = make_float4(0, 0, 0, 0);
    }
    DEVICE float4 operator[](int i) const { return own[i * THREADS]; }
    // Adds the sums of a slice, which become 0.
    DEVICE void take(float (&sums)[N][4]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float4& total = own[i * THREADS];
            float(&sum)[4] = sums[i];
            total = make_float4(total.x + sum[0], total.y + sum[1], total.z + sum[2], total.w + sum[3]);
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
        }
    }
};

// None: exact sums go on through all slices.
template <int THREADS>
struct Totals<THREADS, 0> {
    DEVICE explicit Totals(unsigned char*) {}
};
template <class Sum>
struct Four { Sum x, y, z, w; };

// A block computes ROWS rows from `first_row` on and, by each warp, OUTPUTS outputs. outputs: the number of their tile.
template <class K, class Source>
DEVICE void multiply_many(const Product& p, Source source, int first_row, int outputs) {
    constexpr int STAGES = Many::STAGES<K>, TILES = Many::TILES, TILE_BYTES = Many::TILE_BYTES<K>;
    using Sum = typename K::Sum;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int block = Many::WARPS * outputs + warp;
    const int present = min(block, (p.n - 1) / OUTPUTS);  // a warp without outputs computes some that it does not store
    unsigned char* const tiles = shared_memory();
    unsigned char* const ring = tiles + STAGES * TILE_BYTES + warp * STAGES * K::STAGE_BYTES;
    Totals<Many::THREADS, K::EXACT ? 0 : 4 * TILES> totals(tiles + STAGES * (TILE_BYTES + Many::WARPS * K::STAGE_BYTES));
    const LaneWeights<K> weights(p, present);
    const ThreadRows<K> rows(p, source, first_row);
    int filled = 0, read = 0;  // stages
    auto copy = [&](int step) {
        if (step < p.steps) {
            rows.copy(p, first_row, step, tiles + filled * TILE_BYTES);
            weights.copy(p, step, ring + filled * K::STAGE_BYTES);
        }
        commit_copies();
        filled = after<STAGES>(filled);
    };
    for (int step = 0; step < STAGES - 1; step++) copy(step);
    Sums<TILES, Sum> sums = {};
#pragma unroll 1  // more steps at a time would need more registers
    for (int step = 0, slice = 0; step < p.steps; step++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // the step is there for all threads, and the stage before it is read
        copy(step + STAGES - 1);
        Rows<TILES> x;
        const unsigned char* const tile = tiles + read * TILE_BYTES;
        read_rows<TILES>(tile, x);
        add_step<K, TILES>(p, ring + read * K::STAGE_BYTES, tile, x, sums);
        read = after<STAGES>(read);
        if constexpr (!K::EXACT) {
            while (slice_begin(p, slice + 1) <= step) slice++;
            if (slice_begin(p, slice + 1) == step + 1) totals.take(reinterpret_cast<float(&)[4 * TILES][4]>(sums));
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) {
        Four<Sum> total;
        if constexpr (K::EXACT)
            total = {sums[i / 4][i % 4][0], sums[i / 4][i % 4][1], sums[i / 4][i % 4][2], sums[i / 4][i % 4][3]};
        else
            total = {totals[i].x, totals[i].y, totals[i].z, totals[i].w};
        const int row = first_row + i / 4 * 16 + lane / 4, output = OUTPUTS * block + i % 4 * 8 + 2 * (lane % 4);
        store_two<K>(p, row, output, total.x, total.y);
        store_two<K>(p, row + 8, output, total.z, total.w);
    }
}
