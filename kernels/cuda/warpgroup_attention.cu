// Attention of many queries with the products of warpgroups, which only sm_90a has: as prefill_attention.cu, but the tensor
// cores read keys and values from shared memory by themselves, and work while the other units turn logits into weights.
//
// A block computes 128 rows of one request and KV head, 64 in each of its two warpgroups. In each step the logits of the next
// KEYS keys are started, then the weighted values of these. Meanwhile threads copy later keys (two steps ahead) and values
// (one step), each to the other one of two buffers, and make weights of the next logits while values are still added.
#include "prefill.cuh"
#include "warpgroup.cuh"

constexpr int GROUPS = 2, WARPS = GROUPS * GROUP_WARPS, ROWS = GROUPS * GROUP_ROWS;

// The logits of a warpgroup's rows. queries, keys: described by `describe_panels`, with KEYS rows of keys.
template <class S>
DEVICE void start_logits(float (&logits)[1][S::KEYS / 8][4], const u8* queries, const u8* keys) {
    begin_products();
#pragma unroll
    for (int k = 0; k < S::D / 16; k++) {
        const int panel = k / 4, chunk = k % 4 * 2 * CHUNK_BYTES;
        multiply_group<typename S::T>(logits[0], describe_panels(queries + panel * ROWS * PANEL_ROW_BYTES + chunk),
                                      describe_panels(keys + panel * S::KEYS * PANEL_ROW_BYTES + chunk), k > 0);
    }
    commit_products();
}

// Adds the weighted values of KEYS keys, by as many panels at a time as divide the head.
template <class S>
DEVICE void start_values(Rows<S>& rows, const Weights<S>& weights, const u8* values) {
    constexpr int PANELS = S::D % (2 * PANEL) ? 1 : 2, SUMS = PANELS * PANEL / 8, PANEL_BYTES = S::KEYS * PANEL_ROW_BYTES;
    begin_products();
#pragma unroll
    for (int k = 0; k < S::KEYS / 16; k++)
#pragma unroll
        for (int j = 0; j < S::D / 8; j += SUMS) {
            const u8* const first = values + j / 8 * PANEL_BYTES + k * 16 * PANEL_ROW_BYTES;
            float(&sums)[SUMS][4] = *reinterpret_cast<float(*)[SUMS][4]>(&rows.out[0][j]);
            multiply_group<typename S::T, true>(sums, weights[0][k], describe_panels(first, PANEL_BYTES), true);
        }
    commit_products();
}

template <class T, int D, int KEYS, bool TWO_SIDED = false>
__global__ void __launch_bounds__(GROUPS * GROUP_THREADS, 1)
    warpgroup_attention(const __grid_constant__ AttentionParameters a) {
    using S = Shape<T, T, D, 1, KEYS, TWO_SIDED>;
    constexpr int PAGES = KEYS / PAGE_ROWS, BUFFER = KEYS * S::ROW_BYTES;
    static_assert(D % PANEL == 0 && (PAGES == WARPS || 2 * PAGES == WARPS));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const Tile<S, ROWS> tile(a);
    if (tile.request == a.requests) return;
    const Queries queries(a, tile.request, blockIdx.y);
    if (tile.is_empty(a, queries)) return;
    const int first_row = tile.first_row, warp_row = first_row + 16 * warp;

    u8* const staged = shared_memory();
    u8* const keys = staged + ROWS * S::ROW_BYTES;
    u8* const values = keys + 2 * BUFFER;
    Task<WARPS>& task = *reinterpret_cast<Task<WARPS>*>(values + 2 * BUFFER);
    set_task<S, 16>(task, a, queries, first_row);
    __syncthreads();

    const int first_page = warp % PAGES * PAGE_ROWS;  // of a warp's page among the keys of a step
    int key_block, value_block;                       // of the warp's page in the next copies
    auto find = [&](int key) {
        return find_block(a, task.queries.request, key + first_page, task.begin, task.end);
    };
    auto copy = [&](u8* target, const u8* cache, int block, int key) {
        auto place = [](u8* page, int first, int lane) {  // pages have the panels' order of chunks
            const int row = (first + lane) / S::CHUNKS, chunk = (first + lane) % S::CHUNKS;
            return page + (chunk / 8 * KEYS + row) * PANEL_ROW_BYTES + chunk % 8 * CHUNK_BYTES;
        };
        copy_rows<S>(target + first_page * PANEL_ROW_BYTES, place, cache, a, task.queries.kv_head, block,
                     key + first_page, task.begin, task.end, lane);
    };
    auto copy_keys = [&](u8* target, int key) {
        if (PAGES == WARPS || warp < PAGES) copy(target, a.k, key_block, key);
        value_block = key_block;
    };
    auto copy_values = [&](u8* target, int key) {
        if (PAGES == WARPS || warp >= PAGES) copy(target, a.v, value_block, key);
    };
    auto arrive = [&] {  // what was copied is there for all, and no product reads the buffers of before
        wait_for_copies<0>();
        fence_copies();
        __syncthreads();
    };

    int first_key = task.begin / KEYS * KEYS;
    key_block = find(first_key);
    copy_keys(keys, first_key);
    commit_copies();
    key_block = find(first_key + KEYS);
    load_queries<S>(staged, [](int row, int chunk) { return panel_place(ROWS, row, chunk); }, a, queries, first_row,
                    ROWS, threadIdx.x, WARPS * 32);
    arrive();
    copy_values(values, first_key);
    copy_keys(keys + BUFFER, first_key + KEYS);
    commit_copies();
    key_block = find(first_key + 2 * KEYS);

    const u8* const own_queries = staged + warp / GROUP_WARPS * GROUP_ROWS * PANEL_ROW_BYTES;
    const KeyRange range = task.keys[warp];
    Rows<S> rows;
    float logits[1][KEYS / 8][4];
    Weights<S> weights;
    Shrink<S> shrink;
    auto weigh_step = [&](int key) {
        weigh<S>(logits, rows, a, task.queries, warp_row, key, range.cuts(key, KEYS), lane, shrink);
    };
    start_logits<S>(logits, own_queries, keys);
    wait_for_products<0>(logits[0]);
    weigh_step(first_key);
    pack_weights<S>(logits, weights);
    int buffer = 0;  // of the values
#pragma unroll 1
    for (; first_key + KEYS < task.end; first_key += KEYS, buffer ^= 1) {
        arrive();
        start_logits<S>(logits, own_queries, keys + (buffer ^ 1) * BUFFER);
        start_values<S>(rows, weights, values + buffer * BUFFER);
        copy_values(values + (buffer ^ 1) * BUFFER, first_key + KEYS);
        copy_keys(keys + buffer * BUFFER, first_key + 2 * KEYS);
        commit_copies();
        key_block = find(first_key + 3 * KEYS);
        wait_for_products<1>(logits[0]);
        weigh_step(first_key + KEYS);
        wait_for_products<0>(rows.out[0]);
        shrink_values<S>(rows, shrink);
        pack_weights<S>(logits, weights);
    }
    arrive();
    start_values<S>(rows, weights, values + buffer * BUFFER);
    wait_for_products<0>(rows.out[0]);
    if (warp_row < task.queries.rows)
        write_rows<S>(staged + warp * 16 * S::ROW_BYTES, rows, a, task.queries, warp_row, lane);
}
