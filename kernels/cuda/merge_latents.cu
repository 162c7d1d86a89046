// The second step of attention to latents whose keys are split: merges the parts of each row.
#include "latents.cuh"

constexpr int THREADS = 128;

// Row `blockIdx.y` of a tile.
template <class T, int RANK, int ROWS, int KEYS, bool CHOSEN = false>
__global__ void __launch_bounds__(THREADS) merge_latents(const __grid_constant__ AttentionParameters a) {
    const int tile = gridDim.x - 1 - blockIdx.x, request = request_of<CHOSEN>(a, tile, ROWS);
    if (request == a.requests) return;
    int first_row = (tile - first_tile<CHOSEN>(a, request, ROWS)) * ROWS;
    const Queries queries = queries_of_tile<ROWS, CHOSEN>(a, request, first_row);
    const int row = first_row + blockIdx.y;
    if (row >= queries.rows) return;
    const Parts<KEYS> parts(a, queries, first_row, ROWS);
    if (parts.used == 1) return;
    const i64 place = i64(blockIdx.x) * a.splits * ROWS + blockIdx.y;
    T* const out = static_cast<T*>(a.out) + (i64(queries.start) * a.heads + row) * RANK;
    const float sink = sink_exponent<T>(a, queries.head_of(row));
    for (int i = threadIdx.x; i < RANK; i += THREADS) {
        const Merged merged(a.partial_sums + place, ROWS, a.partial_out + place * RANK + i, ROWS * RANK, parts.used);
        out[i] = from_float<T>(merged.result(sink));
    }
}
