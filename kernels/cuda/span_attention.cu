// Attention whose bits depend on a query and its keys alone: not on other requests, nor on how its prompt was cut.
//
// As prefill_attention.cu, for prompts and single tokens alike, but keys are divided into spans, which begin at multiples of
// SPAN. The sums of a span begin anew, and are added to those of the spans before it (`Totals`), in ascending order. Where a
// batch has few rows, each span has a block of its own (gridDim.z > 1), and the last one to arrive adds them up: the same
// additions of the same numbers. What a step masks for a row changes none of its sums, so it does not matter which rows a
// block has, and keys of steps that no row attends to may be skipped.
#include "prefill.cuh"

constexpr int SPAN = 512;

// The sums of a warp's rows over all spans so far: the values' in shared memory, of each lane its own.
template <class S>
struct Totals {
    static constexpr int BYTES = 16 * S::D * 4;  // of a warp
    float* const out;                            // [D / 2], 32 apart
    float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};

    DEVICE explicit Totals(u8* memory, int lane) : out(reinterpret_cast<float*>(memory) + lane) {
#pragma unroll
        for (int i = 0; i < S::D / 2; i++) out[32 * i] = 0.0f;
    }
    // Adds the sums of a span, which become those of none. scale: of exponents of 2.
    DEVICE void take(Rows<S>& rows, float scale) {
        float kept[2], added[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float larger = fmaxf(top[i], rows.top[0][i]);
            kept[i] = top[i] == larger ? 1.0f : exp2_approx((top[i] - larger) * scale);
            added[i] = rows.top[0][i] == larger ? 1.0f : exp2_approx((rows.top[0][i] - larger) * scale);
            sum[i] = __fmaf_rn(sum_lanes<4>(rows.sum[0][i]), added[i], __fmul_rn(sum[i], kept[i]));
            top[i] = larger;
        }
#pragma unroll
        for (int j = 0; j < S::D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& total = out[32 * (4 * j + i)];
                total = __fmaf_rn(rows.out[0][j][i], added[i >> 1], __fmul_rn(total, kept[i >> 1]));
            }
        rows = Rows<S>();
    }
    // As the sums of one span.
    DEVICE void give(Rows<S>& rows, int lane) const {
#pragma unroll
        for (int j = 0; j < S::D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) rows.out[0][j][i] = out[32 * (4 * j + i)];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            rows.top[0][i] = top[i];
            rows.sum[0][i] = lane % 4 == 0 ? sum[i] : 0.0f;
        }
    }
};

// Where blocks leave the sums of a span of 16 rows for each other.
template <class S>
struct Partial {
    float* out;    // [D / 2, 32]: each lane its own
    float2* sums;  // [16]: the largest logit and the sum of weights
    int lane;

    DEVICE Partial(const AttentionParameters& a, i64 place, int lane)
        : out(a.partial_out + place * 16 * S::D + lane), sums(a.partial_sums + place * 16 + lane / 4), lane(lane) {}

    DEVICE void store(const Rows<S>& rows) const {
#pragma unroll
        for (int j = 0; j < S::D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) out[32 * (4 * j + i)] = rows.out[0][j][i];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float sum = sum_lanes<4>(rows.sum[0][i]);
            if (lane % 4 == 0) sums[8 * i] = make_float2(rows.top[0][i], sum);
        }
    }
    DEVICE void load(Rows<S>& rows) const {
#pragma unroll
        for (int j = 0; j < S::D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) rows.out[0][j][i] = out[32 * (4 * j + i)];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 both = sums[8 * i];
            rows.top[0][i] = both.x;
            rows.sum[0][i] = lane % 4 == 0 ? both.y : 0.0f;
        }
    }
};

// Grid: tiles of rows, KV heads, spans or 1.
template <class T, class KV, int D, int WARPS, int KEYS>
__global__ void __launch_bounds__(WARPS * 32) span_attention(const __grid_constant__ AttentionParameters a) {
    using S = Shape<T, KV, D, 1, KEYS>;
    constexpr int ROWS = 16 * WARPS, HALF = KEYS * S::ROW_BYTES, PAGES = KEYS / PAGE_ROWS;
    static_assert(WARPS % PAGES == 0 && SPAN % KEYS == 0);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const Tile<S, ROWS> tile(a);
    if (tile.request == a.requests) return;
    const Queries queries(a, tile.request, blockIdx.y);
    if (tile.is_empty(a, queries)) return;
    const int first_row = tile.first_row, warp_row = first_row + 16 * warp;

    u8* const staged = shared_memory();
    u8* const buffers = staged + ROWS * S::Q_CHUNKS * CHUNK_BYTES;
    u8* const memory = buffers + 4 * HALF;  // of totals
    Task<WARPS>& task = *reinterpret_cast<Task<WARPS>*>(memory + WARPS * Totals<S>::BYTES);
    set_task<S, 16>(task, a, queries, first_row);
    __syncthreads();

    const bool divided = gridDim.z > 1;
    const int first_span = task.begin / SPAN, spans = (task.end + SPAN - 1) / SPAN - first_span;
    if (divided && int(blockIdx.z) >= spans) return;
    const int own_span = first_span + blockIdx.z;
    const int begin = divided ? max(task.begin, own_span * SPAN) : task.begin;
    const int end = divided ? min(task.end, (own_span + 1) * SPAN) : task.end;

    int first_key = begin / KEYS * KEYS, block;  // block: of the warp's page in the next copy
    auto find = [&](int key) {
        block = find_block(a, task.queries.request, key + warp % PAGES * PAGE_ROWS, begin, end);
    };
    auto copy = [&](u8* buffer, int key) {
        const int page = warp % PAGES * PAGE_ROWS;
        u8* const target = buffer + page * S::ROW_BYTES;
        for (int of = warp; of < 2 * PAGES; of += WARPS)  // pages of keys, then of values
            copy_rows<S>(target + of / PAGES * HALF, chunk_in_order, of < PAGES ? a.k : a.v, a, task.queries.kv_head,
                         block, key + page, begin, end, lane);
        commit_copies();
    };
    find(first_key);
    copy(buffers, first_key);
    find(first_key + KEYS);
    load_queries<S>(staged, query_place<S>, a, queries, first_row, ROWS, threadIdx.x, WARPS * 32);

    auto query = [&](u32* fragment, int, int k, int lane) {
        query_fragment<S>(fragment, staged, 16 * warp, k, lane);
    };
    Rows<S> rows;
    Totals<S> totals(memory + warp * Totals<S>::BYTES, lane);
    const float scale = exponent_scale<S>(a);
    for (int buffer = 0; first_key < end; first_key += KEYS, buffer ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // these keys have arrived, and no warp still reads the previous ones
        if (first_key + KEYS < end) {
            copy(buffers + (buffer ^ 1) * 2 * HALF, first_key + KEYS);
            find(first_key + 2 * KEYS);
        }
        const u8* const keys = buffers + buffer * 2 * HALF;
        const KeyRange& range = task.keys[warp];
        if (range.meets(first_key, KEYS))
            attend<S>(rows, query, keys, keys + HALF, a, task.queries, warp_row, first_key, range.cuts(first_key, KEYS),
                      lane);
        if (!divided && (first_key + KEYS) % SPAN == 0) totals.take(rows, scale);
    }
    if (divided && spans > 1) {
        const int place = blockIdx.x * a.kv_heads + blockIdx.y;
        if (warp == 0) Partial<S>(a, i64(place) * gridDim.z + blockIdx.z, lane).store(rows);
        __shared__ bool is_last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicInc(a.arrivals + place, spans - 1) == u32(spans - 1);
        __syncthreads();
        if (!is_last || warp > 0) return;
        __threadfence();
        for (int span = 0; span < spans; span++) {
            Partial<S>(a, i64(place) * gridDim.z + span, lane).load(rows);
            totals.take(rows, scale);
        }
    } else {
        totals.take(rows, scale);
    }
    if (warp_row >= task.queries.rows) return;
    totals.give(rows, lane);
    write_rows<S>(staged + warp * 16 * S::Q_CHUNKS * CHUNK_BYTES, rows, a, task.queries, warp_row, lane);
}
