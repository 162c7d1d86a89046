// Attention of few queries to many keys, limited by memory bandwidth.
//
// A block computes 16 rows of one request and KV head over one split of the keys. Its warps do not wait for each other:
// each processes every WARPS-th group of keys, through its own ring of STAGES buffers and with its own softmax. At the
// end the block merges its warps, and the last block of the rows to finish merges the splits.
#include "attention.cuh"

constexpr int LEAST_GROUPS = 4;  // minimum groups per warp of a split, so that merging stays cheap

// A warp's copies of its keys and values to shared memory.
template <class S, int STAGES>
struct Ring {
    static constexpr int PAGES = S::GROUP / PAGE_ROWS, HALF = S::GROUP * S::ROW_BYTES, STAGE = 2 * HALF;

    const AttentionParameters& a;
    const Queries& queries;
    u8* buffers;
    int begin, end;    // keys that some row attends to
    int next, finish;  // range of groups still to be copied
    int step, lane;    // step: from a group to the warp's next
    int filling = 0;
    int blocks[PAGES];  // blocks of group `next`, looked up one copy ahead

    DEVICE Ring(const AttentionParameters& a, const Queries& queries, u8* buffers, int begin, int end, int next,
                int finish, int step, int lane)
        : a(a), queries(queries), buffers(buffers), begin(begin), end(end), next(next), finish(finish), step(step),
          lane(lane) {
        look_up();
    }
    DEVICE void look_up() {
#pragma unroll
        for (int p = 0; p < PAGES; p++)
            if (next < finish)
                blocks[p] = find_block(a, queries.request, next * S::GROUP + p * PAGE_ROWS, begin, end);
    }
    DEVICE void copy_next() {
        if (next < finish) {
            u8* keys = buffers + filling * STAGE;
#pragma unroll
            for (int p = 0; p < PAGES; p++) {
                const int token = next * S::GROUP + p * PAGE_ROWS;
                u8* target = keys + p * PAGE_ROWS * S::ROW_BYTES;
                copy_rows<S>(target, chunk_in_order, a.k, a, queries.kv_head, blocks[p], token, begin, end, lane);
                copy_rows<S>(target + HALF, chunk_in_order, a.v, a, queries.kv_head, blocks[p], token, begin, end, lane);
            }
            next += step;
            look_up();
        }
        commit_copies();
        filling = filling + 1 == STAGES ? 0 : filling + 1;
    }
};

template <class T, class KV, int D, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, WARPS == 4 ? 3 : 1)
    decode_attention(const __grid_constant__ AttentionParameters a) {
    using S = Shape<T, KV, D, 1, is_fp8<KV> ? 32 : 16>;
    constexpr int QUERY_BYTES = 16 * S::Q_CHUNKS * CHUNK_BYTES, THREADS = WARPS * 32;
    constexpr bool KEEP_QUERIES = D <= 64;  // in registers
    const int split = blockIdx.x, splits = gridDim.x, row_tile = blockIdx.y, request = blockIdx.z;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (split == 0 && row_tile == 0) clear_padding<S::Q_CHUNKS>(a, request, a.requests, thread, THREADS);

    const int tiles = gridDim.y / a.kv_heads, first_row = row_tile % tiles * 16;
    const Queries queries(a, request, row_tile / tiles);
    const int num_rows = min(queries.rows - first_row, 16);
    if (num_rows <= 0 || queries.rows > a.short_queries * queries.group) return;

    const KeyRange range = key_range<S>(a, queries, first_row, 16);
    const int first_group = range.begin / S::GROUP, groups = (range.end + S::GROUP - 1) / S::GROUP - first_group;
    const int even_share = (groups + splits - 1) / splits, least = WARPS * LEAST_GROUPS;
    const int share = max((even_share + WARPS - 1) / WARPS * WARPS, least);  // of a split
    const int used_splits = (groups + share - 1) / share;
    if (split >= used_splits) return;

    u8* const shared = shared_memory();
    u8* const buffers = shared + QUERY_BYTES;
    const int start = first_group + split * share + warp;
    const int finish = min(first_group + (split + 1) * share, first_group + groups);
    u8* const own = buffers + warp * STAGES * Ring<S, STAGES>::STAGE;
    Ring<S, STAGES> ring(a, queries, own, range.begin, range.end, start, finish, WARPS, lane);
    for (int i = 0; i < STAGES - 1; i++) ring.copy_next();

    load_queries<S>(shared, query_place<S>, a, queries, first_row, 16, thread, THREADS);
    Rows<S> rows;
    __syncthreads();
    u32 kept[KEEP_QUERIES ? D / 16 : 1][4];
    if (KEEP_QUERIES)
#pragma unroll
        for (int k = 0; k < D / 16; k++) query_fragment<S>(kept[KEEP_QUERIES ? k : 0], shared, 0, k, lane);
    auto query = [&](u32* fragment, int, int k, int lane) {
        if constexpr (KEEP_QUERIES) {
#pragma unroll
            for (int i = 0; i < 4; i++) fragment[i] = kept[k][i];
        } else {
            query_fragment<S>(fragment, shared, 0, k, lane);
        }
    };

    const u8* keys = ring.buffers;
    for (int group = start; group < finish; group += WARPS) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        ring.copy_next();
        const int first_key = group * S::GROUP;
        const bool partly = range.cuts(first_key, S::GROUP);
        attend<S>(rows, query, keys, keys + ring.HALF, a, queries, first_row, first_key, partly, lane);
        keys = keys + ring.STAGE == ring.buffers + STAGES * ring.STAGE ? ring.buffers : keys + ring.STAGE;
    }
    wait_for_copies<0>();
    __syncthreads();

    // Each warp's outputs and sums, for each row.
    float* const outs = reinterpret_cast<float*>(buffers);
    float2* const sums = reinterpret_cast<float2*>(outs + WARPS * 16 * D);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = warp * 16 + 8 * i + lane / 4;
        const float sum = sum_lanes<4>(rows.sum[0][i]);
        if (lane % 4 == 0) sums[row] = make_float2(rows.top[0][i] * exponent_scale<S>(a), sum);
#pragma unroll
        for (int j = 0; j < D / 16; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int column = 0; column < 2; column++)
                    outs[row * D + out_element<S>(j, half, column, lane)] = rows.out[0][2 * j + half][2 * i + column];
    }
    __syncthreads();

    T* const out = static_cast<T*>(a.out);
    auto write = [&](int row, int element, const Merged& merged) {
        const int head = queries.head_of(first_row + row);
        out[(i64(queries.token_of(first_row + row)) * a.heads + head) * D + element] =
            from_float<T>(a.v_scale * merged.result(sink_exponent<T>(a, head)));
    };
    const i64 place = i64(request) * gridDim.y + row_tile;
    float* const partial_out = a.partial_out + place * splits * 16 * D;
    float2* const partial_sums = a.partial_sums + place * splits * 16;
    for (int i = thread; i < num_rows * D; i += THREADS) {
        const int row = i / D, element = i % D;
        const Merged merged(sums + row, 16, outs + i, 16 * D, WARPS);
        if (used_splits == 1) {
            write(row, element, merged);
        } else {
            partial_out[i64(split) * 16 * D + i] = merged.out;
            if (element == 0) partial_sums[split * 16 + row] = make_float2(merged.top, merged.sum);
        }
    }
    if (used_splits == 1) return;

    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (thread == 0) is_last = atomicInc(a.arrivals + place, used_splits - 1) == u32(used_splits - 1);
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = thread; i < num_rows * D; i += THREADS)
        write(i / D, i % D, Merged(partial_sums + i / D, 16, partial_out + i, 16 * D, used_splits));
}
