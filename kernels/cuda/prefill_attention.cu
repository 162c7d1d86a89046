// Attention of many queries, limited by the tensor cores: prompts and chunks of prompts, also in batches with decode.
//
// A block computes 64 M rows of one request and KV head, 16 M in each of its four warps. The warps process the same KEYS
// keys, STEP at a time, while the next keys are copied to the other buffer. Keys that no row of the block attends to are
// never read, and a warp skips the keys that none of its own rows attends to.
//
// TWO_SIDED kernels are those of encoders: queries attend to `future` keys after their own as well. Their sums depend on
// the request alone, as no keys are split.
#include "prefill.cuh"

constexpr int WARPS = 4;

template <class T, class KV, int D, int M, int KEYS, int STEP, bool TWO_SIDED = false>
__global__ void __launch_bounds__(WARPS * 32) prefill_attention(const __grid_constant__ AttentionParameters a) {
    using S = Shape<T, KV, D, M, STEP, TWO_SIDED>;
    constexpr int WARP_ROWS = 16 * M, ROWS = WARPS * WARP_ROWS, PAGES = KEYS / PAGE_ROWS, HALF = KEYS * S::ROW_BYTES;
    constexpr bool COPIES_BOTH = PAGES == WARPS;  // a warp copies a page of keys and one of values, not only one
    static_assert(COPIES_BOTH || 2 * PAGES == WARPS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const Tile<S, ROWS> tile(a);
    if (tile.request == a.requests) return;
    const Queries queries(a, tile.request, blockIdx.y);
    if (tile.is_empty(a, queries)) return;
    const int first_row = tile.first_row, warp_row = first_row + warp * WARP_ROWS;

    u8* const staged = shared_memory();
    u8* const buffers = staged + ROWS * S::Q_CHUNKS * CHUNK_BYTES;
    Task<WARPS>& task = *reinterpret_cast<Task<WARPS>*>(buffers + 4 * HALF);
    set_task<S, WARP_ROWS>(task, a, queries, first_row);
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
        auto copy_page = [&](u8* target, const u8* cache) {
            copy_rows<S>(target, chunk_in_order, cache, a, kv_head, block, key + page, begin, end, lane);
        };
        if (COPIES_BOTH || warp < PAGES) copy_page(target, a.k);
        if (COPIES_BOTH || warp >= PAGES) copy_page(target + HALF, a.v);
        commit_copies();
    };
    find(first_key);
    copy(buffers, first_key);
    find(first_key + KEYS);
    load_queries<S>(staged, query_place<S>, a, queries, first_row, ROWS, threadIdx.x, WARPS * 32);

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
            const KeyRange range = task.keys[warp];
            if (range.meets(key, STEP))
                attend<S>(rows, query, keys, keys + HALF, a, task.queries, warp_row, key, range.cuts(key, STEP), lane);
        }
    }
    if (warp_row < task.queries.rows)
        write_rows<S>(staged + warp * WARP_ROWS * S::Q_CHUNKS * CHUNK_BYTES, rows, a, task.queries, warp_row, lane);
}
