// Products of many rows with the products of warpgroups, which only sm_90a has: `linear_many` of linear.cu for it.
//
// A block computes ROWS rows and OUTPUTS outputs, a warpgroup 64 of them. The weights are the first factor: a warp has 16
// outputs, whose codes become fragments in its registers. Rows of x are the second, in panels of 64 columns, two steps.
// Spans, slices and the order of sums are those of linear.cuh, so a row's bits are those of `linear_few`, as far as tensor
// cores sum 16 columns in the same way there: a trial shows whether they do.
#include "linear.cuh"
#include "warpgroup.cuh"

struct Group {
    static constexpr int GROUPS = 3, WARPS = GROUPS * GROUP_WARPS, THREADS = GROUPS * GROUP_THREADS;
    static constexpr int ROWS = 128, OUTPUTS = GROUPS * GROUP_ROWS, STAGES = 3, STEPS = 2;  // STEPS: of a stage
    static constexpr int PANEL_BYTES = ROWS * PANEL_ROW_BYTES;
    static constexpr int OUT_STRIDE = OUTPUTS + 8;  // between rows of results in shared memory
    template <class K>
    static constexpr int STEP_BYTES = K::CODE_BYTES / 2 + 2 * K::SCALE_BYTES;  // of a warp's weights
};

// The sums of a warp: 16 outputs in rows, and ROWS rows of x in columns, 64 at a time.
using GroupSums = float[2][8][4];

// Starts to copy the block's rows in the steps of a stage. Instead of those after the last one it is copied.
template <class T>
DEVICE void copy_panel(const Product& p, int first, int step, unsigned char* to) {
    constexpr int STEP_CHUNKS = ROW_BYTES / CHUNK_BYTES, CHUNKS = Group::STEPS * STEP_CHUNKS;
    for (u32 i = opaque(threadIdx.x); i < Group::ROWS * CHUNKS; i += Group::THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (step + chunk / STEP_CHUNKS >= p.steps) continue;
        const T* from = static_cast<const T*>(p.x) + min(first + row, p.m - 1) * p.x_stride + 32 * step + 8 * chunk;
        copy_async_16(to + panel_place(Group::ROWS, row, chunk), from, true);
    }
}

// Starts to copy a step of a warp's weights: of each lane's 16 bytes those of the warp's half of the 32 outputs.
template <class K>
DEVICE void copy_half(const Product& p, const LaneWeights<K>& weights, int step, unsigned char* to) {
    const u32 thread = opaque(threadIdx.x), lane = thread % 32, half = thread / 32 % 2;
    const unsigned char* const from = weights.codes + i64(step) * K::CODE_BYTES + 8 * half;
#pragma unroll
    for (int i = 0; i < K::CODE_BYTES / HALF_BYTES; i++) copy_async_8(to + 8 * (32 * i + lane), from + i * HALF_BYTES, true);
    if constexpr (K::GROUPED)
        if (weights.factors)
            copy_async_16(to + K::CODE_BYTES / 2 + 16 * lane,
                          weights.factors + i64(step >> p.group_shift) * K::SCALE_BYTES, true);
}

// The sums of each row of x over the spans of a stage: `to` [STEPS, SPANS, ROWS]. Eight warps have 16 rows each.
template <class K>
DEVICE void sum_rows(const unsigned char* panel, float* to) {
    using T = typename K::T;
    constexpr u32 ONES = is_same<T, bf16> ? 0x3f803f80u : 0x3c003c00u;
    const u32 ones[2] = {ONES, ONES};
    const int first = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    if (first >= Group::ROWS) return;
#pragma unroll
    for (int span = 0; span < Group::STEPS * K::SPANS; span++) {
        float sums[4] = {};
#pragma unroll
        for (int k = 0; k < 2 / K::SPANS; k++) {
            u32 x[4];
            const int chunk = 2 * (span * 2 / K::SPANS + k) + lane / 16;
            ldmatrix_x4(x, panel + panel_place(Group::ROWS, first + lane % 16, chunk));
            mma<T>(sums, x, ones);
        }
        if (lane % 4 == 0) {
            to[span * Group::ROWS + first + lane / 4] = sums[0];
            to[span * Group::ROWS + first + lane / 4 + 8] = sums[2];
        }
    }
}

// A lane's two scales, or offsets: of outputs lane / 4 and lane / 4 + 8 of the warp's 16 (see `Product::scales`).
template <class K>
DEVICE float2 factors_of(const unsigned char* scales) {
    const u32 thread = opaque(threadIdx.x), half = thread / 32 % 2, odd = thread / 4 % 2;
    const auto* own = reinterpret_cast<const typename K::Scale*>(scales) + 8 * (thread % 32 / 8) + 4 * half;
    return make_float2(to_float(own[odd]), to_float(own[odd + 2]));
}

// The fragments of the half steps FIRST to before LAST of a warp's 16 outputs. stage: their codes.
template <class K, int FIRST, int LAST>
DEVICE void output_fragments(const Product& p, const unsigned char* stage, u32 (&to)[2][4]) {
    const Codes<K, 2> codes(stage);
#pragma unroll
    for (int half = FIRST; half < LAST; half++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 pairs[2];
            codes.fragment(p, half, j, pairs);
            to[half][j] = pairs[0], to[half][j + 2] = pairs[1];
        }
}

// Starts the products of half steps FIRST to before LAST of 64 rows. x: the rows' panel at the step.
template <class K, int FIRST, int LAST>
DEVICE void start_span(float (&sums)[8][4], const u32 (&weights)[2][4], const unsigned char* x, bool adds) {
#pragma unroll
    for (int half = FIRST; half < LAST; half++)
        multiply_group<typename K::T, false>(sums, weights[half], describe_panels(x + half * 32), adds || half > FIRST);
    commit_products();
}

// Adds half steps FIRST to before LAST, which have the scales and offsets of a span. stage: the codes; x: the panel at the
// step; row_sums: of the span; unless there are offsets they are not read.
template <class K, int FIRST, int LAST>
DEVICE void add_group_span(const Product& p, const unsigned char* stage, const unsigned char* scales,
                           const unsigned char* x, const float* row_sums, GroupSums& sums) {
    constexpr int HALF_ROWS = Group::ROWS / 2;
    u32 weights[2][4];
    output_fragments<K, FIRST, LAST>(p, stage, weights);
    GroupSums products;
    auto start = [&](int part) {
        begin_products();
        start_span<K, FIRST, LAST>(products[part], weights, x + part * HALF_ROWS * PANEL_ROW_BYTES, false);
    };
    start(0);
    start(1);
    const float2 scale = factors_of<K>(scales);
    auto add = [&](int part) {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[part][j][i] = __fmaf_rn(products[part][j][i], i < 2 ? scale.x : scale.y, sums[part][j][i]);
        if (!p.offsets) return;
        const float2 offset = factors_of<K>(scales + K::SCALE_BYTES);
        const float* const own = row_sums + HALF_ROWS * part + 2 * (u32(opaque(threadIdx.x)) % 4);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 of_rows = *reinterpret_cast<const float2*>(own + 8 * j);
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[part][j][i] = __fmaf_rn(i % 2 ? of_rows.y : of_rows.x, i < 2 ? offset.x : offset.y, sums[part][j][i]);
        }
    };
    wait_for_products<1>(products[0]);
    add(0);
    wait_for_products<0>(products[1]);
    add(1);
}

// Adds a step. stage: the warp's weights. row_sums: of the step's first span.
template <class K>
DEVICE void add_group_step(const Product& p, const unsigned char* stage, const unsigned char* x,
                           const float* row_sums, GroupSums& sums) {
    const unsigned char* scales = stage + K::CODE_BYTES / 2;
    if constexpr (!K::GROUPED) {
        u32 weights[2][4];
        output_fragments<K, 0, 2>(p, stage, weights);
        begin_products();
        start_span<K, 0, 2>(sums[0], weights, x, true);
        start_span<K, 0, 2>(sums[1], weights, x + Group::ROWS / 2 * PANEL_ROW_BYTES, true);
        wait_for_products<0>(sums[0]);
        wait_for_products<0>(sums[1]);
    } else if constexpr (K::SPANS == 1) {
        add_group_span<K, 0, 2>(p, stage, scales, x, row_sums, sums);
    } else {
        add_group_span<K, 0, 1>(p, stage, scales, x, row_sums, sums);
        add_group_span<K, 1, 2>(p, stage, scales + K::SCALE_BYTES / 2, x, row_sums + Group::ROWS, sums);
    }
}

// Stores a block's totals, through shared memory: [ROWS, OUT_STRIDE].
template <class K>
DEVICE void store_group(const Product& p, int first_row, int first_output, const Totals<Group::THREADS, 16>& totals,
                        typename K::T* staged) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float4 total = totals[i];
        const float of_outputs[2][2] = {{total.x, total.y}, {total.z, total.w}};
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            const int output = 16 * warp + 8 * eight + lane / 4;
            if (first_output + output >= p.n) continue;
#pragma unroll
            for (int k = 0; k < 2; k++)
                staged[(8 * i + 2 * (lane % 4) + k) * Group::OUT_STRIDE + output] =
                    from_float<typename K::T>(finished<K>(p, 0, first_output + output, of_outputs[eight][k]));
        }
    }
    __syncthreads();
    const int rows = min(Group::ROWS, p.m - first_row), outputs = min(Group::OUTPUTS, p.n - first_output);
    typename K::T* const out = static_cast<typename K::T*>(p.out) + i64(first_row) * p.n + first_output;
    for (int row = warp; row < rows; row += Group::WARPS)
        for (int output = lane; output < outputs; output += 32)
            out[i64(row) * p.n + output] = staged[row * Group::OUT_STRIDE + output];
}

// Grid: tiles of rows, tiles of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(Group::THREADS, 1) linear_group(const __grid_constant__ Product p) {
    using K = Kind<T, Code, Scale, SPAN>;
    constexpr int STAGES = Group::STAGES, STEP_BYTES = Group::STEP_BYTES<K>;
    // Computed anew where they are needed, to save registers.
    auto first_row = [] { return Group::ROWS * opaque(blockIdx.x); };
    auto first_output = [] { return Group::OUTPUTS * opaque(blockIdx.y); };
    auto weights_of_warp = [&] {  // those that come after the last are copied from the last, and not stored
        const int first = first_output() + u32(opaque(threadIdx.x)) / 32 * 16;
        return LaneWeights<K>(p, min(first, p.n - 1) / OUTPUTS);
    };
    unsigned char* const panels = shared_memory();
    unsigned char* const rings = panels + STAGES * Group::PANEL_BYTES;
    unsigned char* const ring = rings + threadIdx.x / 32 * STAGES * Group::STEPS * STEP_BYTES;
    unsigned char* const behind = rings + Group::WARPS * STAGES * Group::STEPS * STEP_BYTES;
    Totals<Group::THREADS, 16> totals(behind);
    float* const row_sums = reinterpret_cast<float*>(behind + Group::THREADS * 16 * sizeof(float4));
    auto copy = [&](int step, int stage) {
        const LaneWeights<K> weights = weights_of_warp();
        if (step < p.steps) copy_panel<T>(p, first_row(), step, panels + stage * Group::PANEL_BYTES);
        for (int i = 0; i < Group::STEPS && step + i < p.steps; i++)
            copy_half<K>(p, weights, step + i, ring + (stage * Group::STEPS + i) * STEP_BYTES);
        commit_copies();
    };
    for (int stage = 0; stage < STAGES - 1; stage++) copy(Group::STEPS * stage, stage);
    GroupSums sums = {};
#pragma unroll 1
    for (int first = 0, slice = 0, read = 0; first < p.steps; first += Group::STEPS) {
        wait_for_copies<STAGES - 2>();
        fence_copies();
        __syncthreads();  // the stage is there for all threads, and the one before it is read
        const unsigned char* const panel = panels + read * Group::PANEL_BYTES;
        if (K::GROUPED && p.offsets) {
            sum_rows<K>(panel, row_sums);
            __syncthreads();
        }
#pragma unroll 1
        for (int i = 0; i < Group::STEPS && first + i < p.steps; i++) {
            const unsigned char* const stage = ring + (read * Group::STEPS + i) * STEP_BYTES;
            add_group_step<K>(p, stage, panel + i * ROW_BYTES, row_sums + i * K::SPANS * Group::ROWS, sums);
            if (i == 0)  // while other warpgroups multiply
                copy(first + (STAGES - 1) * Group::STEPS, read == 0 ? STAGES - 1 : read - 1);
            while (slice_begin(p, slice + 1) <= first + i) slice++;
            if (slice_begin(p, slice + 1) == first + i + 1) totals.take(reinterpret_cast<float(&)[16][4]>(sums));
        }
        read = after<STAGES>(read);
    }
    __syncthreads();  // the stages are read: results take their place
    store_group<K>(p, first_row(), first_output(), totals, reinterpret_cast<T*>(panels));
}
