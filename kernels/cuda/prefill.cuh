// The common parts of the prefill kernels: which rows a block computes, the keys that they attend to, and their way out.
//
// There is no list of work. Request r begins at tile `starts[r] * group / ROWS + r`, which gives it at least the tiles
// that it needs; a block finds its request by bisection. Tiles after the last request are padding.
#pragma once
#include "attention.cuh"

// Values that all threads of a block use: in shared memory, to save registers.
template <int WARPS>
struct Task {
    Queries queries;
    int begin, end;        // keys that some row attends to
    KeyRange keys[WARPS];  // of each warp; it meets none without rows
};

// BY_TOKEN: each token begins a tile, so that a request has just the tiles that it needs.
template <bool BY_TOKEN = false>
DEVICE int first_tile(const AttentionParameters& a, int request, int tile_rows) {
    const int start = __ldg(a.query_starts + request), group = a.heads / a.kv_heads;
    return BY_TOKEN ? start * ((group + tile_rows - 1) / tile_rows) : start * group / tile_rows + request;
}

// The last request that begins at or before `tile`.
template <bool BY_TOKEN = false>
DEVICE int request_of(const AttentionParameters& a, int tile, int tile_rows) {
    int low = 0, high = a.requests;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_tile<BY_TOKEN>(a, middle, tile_rows) <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// The tile of a block, of ROWS rows; the last tiles attend to the most keys, and start first. A block without rows of a
// request clears padding or has nothing to do. OUT_CHUNKS: of a row of outputs.
template <class S, int ROWS, int OUT_CHUNKS = S::Q_CHUNKS, bool BY_TOKEN = false>
struct Tile {
    int request, first_row;

    DEVICE Tile(const AttentionParameters& a) {
        const int tile = gridDim.x - 1 - blockIdx.x;
        request = request_of<BY_TOKEN>(a, tile, ROWS);
        const int number = tile - first_tile<BY_TOKEN>(a, request, ROWS);
        first_row = number * ROWS;
        if (request == a.requests) {
            const int parts = (gridDim.x - tile + number) * gridDim.y;
            clear_padding<OUT_CHUNKS>(a, number * gridDim.y + blockIdx.y, parts, threadIdx.x, blockDim.x);
        }
    }
    DEVICE bool is_empty(const AttentionParameters& a, const Queries& queries) const {
        return first_row >= queries.rows || queries.rows <= a.short_queries * queries.group;
    }
};

// Fills in the task of a block whose warps have WARP_ROWS rows each; a barrier must follow.
template <class S, int WARP_ROWS, int WARPS>
DEVICE void set_task(Task<WARPS>& task, const AttentionParameters& a, const Queries& queries, int first_row) {
    constexpr int ROWS = WARPS * WARP_ROWS;
    const int warp = threadIdx.x / 32, warp_row = first_row + warp * WARP_ROWS;
    if (threadIdx.x % 32 == 0) {
        task.keys[warp] = key_range<S>(a, queries, warp_row, WARP_ROWS);
        if (warp_row >= queries.rows) task.keys[warp].end = 0;
    }
    if (threadIdx.x == 0) {
        const KeyRange keys = key_range<S>(a, queries, first_row, ROWS);
        task.queries = queries;
        task.begin = keys.begin;
        task.end = keys.end;
    }
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
                    *reinterpret_cast<u32*>(staged + query_place<S>(row, element / 8) + element % 8 * 2) =
                        pack<T>(first * factor, second * factor);
                }
        }
    __syncwarp();
    uint4* const out = static_cast<uint4*>(a.out);
    for (int i = lane; i < 16 * S::M * S::Q_CHUNKS; i += 32) {
        const int tile_row = i / S::Q_CHUNKS, chunk = i % S::Q_CHUNKS, row = first_row + tile_row;
        if (row >= queries.rows) break;
        out[(i64(queries.token_of(row)) * a.heads + queries.head_of(row)) * S::Q_CHUNKS + chunk] =
            *reinterpret_cast<const uint4*>(staged + query_place<S>(tile_row, chunk));
    }
}
