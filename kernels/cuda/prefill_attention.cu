// Attention of many queries, limited by the tensor cores: prompts and chunks of prompts, also in batches with decode.
//
// A block computes 64 M rows of one request and KV head, 16 M in each of its four warps. The warps process the same KEYS
// keys, STEP at a time, while the next keys are copied to the other buffer. Keys that no row of the block attends to are
// never read, and a warp skips the keys that none of its own rows attends to.
//
// TWO_SIDED kernels are those of encoders: queries attend to `future` keys after their own as well. Their sums depend on
// the request alone, as no keys are split.
//
// There is no list of work. Request r begins at tile `starts[r] * group / ROWS + r`, which gives it at least the tiles
// that it needs; a block finds its request by bisection. Tiles after the last request are padding.
#include "attention.cuh"

constexpr int WARPS = 4;

// Values that all threads of a block use: in shared memory, to save registers.
struct Task {
    Queries queries;
    int begin, end;  // keys that some row attends to
    // Of each warp: the position of its first row, and the last key that its last row attends to; -1 without rows.
    int first_positions[WARPS], last_keys[WARPS];
};

DEVICE int first_tile(const AttentionParameters& a, int request, int tile_rows) {
    return __ldg(a.query_starts + request) * (a.heads / a.kv_heads) / tile_rows + request;
}

// The last request that begins at or before `tile`.
DEVICE int request_of(const AttentionParameters& a, int tile, int tile_rows) {
    int low = 0, high = a.requests;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_tile(a, middle, tile_rows) <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Writes a warp's rows through shared memory: `staged` has room for its 16 M rows.
template <class S>
DEVICE void write_rows(u8* staged, Rows<S>& rows, const AttentionParameters& a, const Queries& queries, int first_row,
                       int lane) {
    using T = typename S::T;
    __syncwarp();  // all lanes have read the queries, which lie there
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * m + 8 * i + lane / 4;
            const float sink = sink_exponent<T>(a, queries.head_of(lane_row(queries, first_row, m, i, lane)));
            const float sum = sum_lanes<4>(rows.sum[m][i]), top = rows.top[m][i] * exponent_scale<S>(a);
            const float larger = fmaxf(top, sink), weight = exp2_approx(top - larger);
            const float factor = a.v_scale * weight / (sum * weight + exp2_approx(sink - larger));
#pragma unroll
            for (int j = 0; j < S::D / 16; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {  // neighbouring elements: see out_element
                    const float first = rows.out[m][2 * j + (S::NARROW ? 0 : half)][2 * i + (S::NARROW ? half : 0)];
                    const float second = rows.out[m][2 * j + (S::NARROW ? 1 : half)][2 * i + (S::NARROW ? half : 1)];
                    const int element = out_element<S>(j, S::NARROW ? 0 : half, S::NARROW ? half : 0, lane);
                    const int place = row * S::Q_CHUNKS + swizzle(S::Q_CHUNKS, row, element / 8);
                    *reinterpret_cast<u32*>(staged + place * CHUNK_BYTES + element % 8 * 2) =
                        pack<T>(first * factor, second * factor);
                }
        }
    __syncwarp();
    uint4* const out = static_cast<uint4*>(a.out);
    for (int i = lane; i < 16 * S::M * S::Q_CHUNKS; i += 32) {
        const int tile_row = i / S::Q_CHUNKS, chunk = i % S::Q_CHUNKS, row = first_row + tile_row;
        if (row >= queries.rows) break;
        out[(i64(queries.token_of(row)) * a.heads + queries.head_of(row)) * S::Q_CHUNKS + chunk] =
            reinterpret_cast<const uint4*>(staged)[tile_row * S::Q_CHUNKS + swizzle(S::Q_CHUNKS, tile_row, chunk)];
    }
}

template <class T, class KV, int D, int M, int KEYS, int STEP, bool TWO_SIDED = false>
__global__ void __launch_bounds__(WARPS * 32) prefill_attention(const __grid_constant__ AttentionParameters a) {
    using S = Shape<T, KV, D, M, STEP, TWO_SIDED>;
    constexpr int WARP_ROWS = 16 * M, ROWS = WARPS * WARP_ROWS, PAGES = KEYS / PAGE_ROWS, HALF = KEYS * S::ROW_BYTES;
    constexpr bool COPIES_BOTH = PAGES == WARPS;  // a warp copies a page of keys and one of values, not only one
    static_assert(COPIES_BOTH || 2 * PAGES == WARPS);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

    const int tile = gridDim.x - 1 - blockIdx.x;  // the last tiles attend to the most keys: they start first
    const int request = request_of(a, tile, ROWS);
    const int request_tile = tile - first_tile(a, request, ROWS);
    if (request == a.requests) {
        const int parts = (gridDim.x - tile + request_tile) * gridDim.y;
        clear_padding<S>(a, request_tile * gridDim.y + blockIdx.y, parts, thread, WARPS * 32);
        return;
    }
    const Queries queries(a, request, blockIdx.y);
    const int first_row = request_tile * ROWS, warp_row = first_row + warp * WARP_ROWS;
    if (first_row >= queries.rows || queries.rows <= a.short_queries * queries.group) return;

    u8* const staged = shared_memory();
    u8* const buffers = staged + ROWS * S::Q_CHUNKS * CHUNK_BYTES;
    Task& task = *reinterpret_cast<Task*>(buffers + 4 * HALF);
    if (lane == 0) {
        task.first_positions[warp] = queries.position_of(min(warp_row, queries.rows - 1));
        const int last_row = min(warp_row + WARP_ROWS, queries.rows) - 1;
        task.last_keys[warp] = warp_row > last_row ? -1 : last_key<S>(a, queries, queries.position_of(last_row));
    }
    if (thread == 0) {
        task.queries = queries;
        task.begin = max(queries.position_of(first_row) - a.window + 1, 0);
        task.end = last_key<S>(a, queries, queries.position_of(min(first_row + ROWS, queries.rows) - 1)) + 1;
    }
    __syncthreads();

    int first_key = task.begin / KEYS * KEYS, block;  // block: of the warp's page in the next copy
    auto find = [&](int key) {
        const int page = threadIdx.x / 32 % PAGES * PAGE_ROWS;
        block = find_block(a, task.queries.request, key + page, task.begin, task.end);
    };
    auto copy = [&](u8* buffer, int key) {
        const int warp = opaque(threadIdx.x) / 32, lane = opaque(threadIdx.x) % 32, page = warp % PAGES * PAGE_ROWS;
        u8* target = buffer + page * S::ROW_BYTES;
        const int kv_head = task.queries.kv_head, begin = task.begin, end = task.end;
        if (COPIES_BOTH || warp < PAGES) copy_rows<S>(target, a.k, a, kv_head, block, key + page, begin, end, lane);
        if (COPIES_BOTH || warp >= PAGES)
            copy_rows<S>(target + HALF, a.v, a, kv_head, block, key + page, begin, end, lane);
        commit_copies();
    };
    find(first_key);
    copy(buffers, first_key);
    find(first_key + KEYS);
    load_queries<S>(staged, a, queries, first_row, ROWS, thread, WARPS * 32);

    auto query = [&](u32* fragment, int m, int k, int lane) {
        query_fragment<S>(fragment, staged, warp * WARP_ROWS + 16 * m, k, lane);
    };
    Rows<S> rows;
    for (int buffer = 0; first_key < task.end; first_key += KEYS, buffer ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // these keys have arrived, and no warp still reads the previous ones
        if (first_key + KEYS < task.end) {
            copy(buffers + (buffer ^ 1) * 2 * HALF, first_key + KEYS);
            find(first_key + 2 * KEYS);
        }
        const u8* keys = buffers + buffer * 2 * HALF;
#pragma unroll 1
        for (int key = first_key; key < first_key + KEYS; key += STEP, keys += STEP * S::ROW_BYTES) {
            const int first = task.first_positions[warp], last = task.last_keys[warp];
            const bool attends = key <= last && key + STEP > first - a.window + 1;
            const bool partly = key + STEP > last_key<S>(a, task.queries, first) + 1 || key <= last - a.window;
            if (attends) attend<S>(rows, query, keys, keys + HALF, a, task.queries, warp_row, key, partly, lane);
        }
    }
    if (warp_row < task.queries.rows)
        write_rows<S>(staged + warp * WARP_ROWS * S::Q_CHUNKS * CHUNK_BYTES, rows, a, task.queries, warp_row, lane);
}
