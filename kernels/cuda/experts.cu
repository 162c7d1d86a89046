// The experts of a layer: rows are placed by expert, multiplied with each expert's weight, and added up by token. Nothing
// waits for the host, and grids depend on numbers of rows alone, so a CUDA graph replays all of it.
#include "linear.cuh"

// ---------------------------------------------------------------- places of rows

struct Routing {
    const i64* ids;  // [count]: the expert of each choice; one that is none of the experts has no row
    int* sources;    // [count]: the token of each row
    int* places;     // [count]: the row of each choice; -1: none
    int* tiles;      // [num_tiles, 3]: expert, first row, row behind the last; the expert is -1 if there is no tile
    int count, num_chosen, num_experts, tile_rows, num_tiles;
};

DEVICE int expert_of(const Routing& p, int choice, int end) {
    const i64 id = choice < end ? p.ids[choice] : -1;
    return id >= 0 && id < p.num_experts ? int(id) : -1;
}

// A block places the choices of one expert: behind those of the experts before, in their own order. It counts those of all
// experts; each warp looks at a share of the choices, in order. Grid: experts.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) place_rows(const __grid_constant__ Routing p) {
    constexpr int WARPS = THREADS / 32;
    __shared__ int of_warps[WARPS], rows_before, tiles_before, all_tiles;
    int* const counts = reinterpret_cast<int*>(shared_memory());  // [num_experts]
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < p.num_experts; i += THREADS) counts[i] = 0;
    if (threadIdx.x == 0) rows_before = tiles_before = all_tiles = 0;
    __syncthreads();
    const int share = ((p.count + 31) / 32 + WARPS - 1) / WARPS * 32;
    const int begin = warp * share, end = min(begin + share, p.count);
    int found = 0;
    for (int first = begin; first < end; first += 32) {
        const int other = expert_of(p, first + lane, end);
        if (other >= 0) atomicAdd(&counts[other], 1);
        found += __popc(__ballot_sync(ALL_LANES, other == expert));
    }
    if (lane == 0) of_warps[warp] = found;
    __syncthreads();
    for (int i = threadIdx.x; i < p.num_experts; i += THREADS) {  // sums of integers: in any order the same
        const int tiles = (counts[i] + p.tile_rows - 1) / p.tile_rows;
        atomicAdd(&all_tiles, tiles);
        if (i >= expert) continue;
        atomicAdd(&rows_before, counts[i]);
        atomicAdd(&tiles_before, tiles);
    }
    __syncthreads();
    int row = rows_before;
    for (int i = 0; i < warp; i++) row += of_warps[i];
    for (int first = begin; first < end; first += 32) {
        const int choice = first + lane, other = expert_of(p, choice, end);
        const u32 same = __ballot_sync(ALL_LANES, other == expert);
        if (other == expert) {
            const int place = row + __popc(same & ((1u << lane) - 1));
            p.places[choice] = place;
            p.sources[place] = choice / p.num_chosen;
        } else if (expert == 0 && other < 0 && choice < end) {
            p.places[choice] = -1;
        }
        row += __popc(same);
    }
    const int last = rows_before + counts[expert];
    for (int first = rows_before + p.tile_rows * threadIdx.x; first < last; first += p.tile_rows * THREADS) {
        int* const tile = p.tiles + 3 * (tiles_before + (first - rows_before) / p.tile_rows);
        tile[0] = expert, tile[1] = first, tile[2] = min(first + p.tile_rows, last);
    }
    if (expert == 0)
        for (int i = all_tiles + threadIdx.x; i < p.num_tiles; i += THREADS) p.tiles[3 * i] = -1;
}

// ---------------------------------------------------------------- products

struct Grouped {
    const void* x;       // rows aligned to 16 bytes
    const i64* parts;    // [experts, 4]: addresses of codes, scales, offsets and bias, see `Product`
    const int* tiles;    // see `Routing`
    const int* sources;  // of the rows in x; null: x has them in order of the experts
    void* out;           // [rows, n], in order of the experts
    u64 low_values, high_values;
    i64 x_stride;
    int n, steps, groups, group_shift, zero;
};

// The product of a tile; of no rows if there is no tile.
DEVICE Product product_of(const Grouped& p, const int* tile) {
    const i64* const parts = p.parts + 4 * max(tile[0], 0);
    Product one;
    one.x = p.x, one.x_stride = p.x_stride, one.out = p.out;
    one.codes = reinterpret_cast<const void*>(parts[0]), one.scales = reinterpret_cast<const void*>(parts[1]);
    one.offsets = reinterpret_cast<const void*>(parts[2]), one.bias = reinterpret_cast<const void*>(parts[3]);
    one.x_scales = nullptr;
    one.low_values = p.low_values, one.high_values = p.high_values;
    one.m = tile[0] < 0 ? 0 : tile[2], one.n = p.n, one.steps = p.steps;
    one.groups = p.groups, one.group_shift = p.group_shift, one.zero = p.zero;
    return one;
}

// Grid: tiles of rows, blocks of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(32 * SLICES, 2) experts_few(const __grid_constant__ Grouped p) {
    const int* const tile = p.tiles + 3 * blockIdx.x;
    if (tile[0] >= 0)
        multiply_few<Kind<T, Code, Scale, SPAN>>(product_of(p, tile), GatheredRow{p.sources}, tile[1], blockIdx.y);
}

// Grid: tiles of rows, tiles of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(Many::THREADS, 2) experts_many(const __grid_constant__ Grouped p) {
    const int* const tile = p.tiles + 3 * blockIdx.x;
    if (tile[0] >= 0)
        multiply_many<Kind<T, Code, Scale, SPAN>>(product_of(p, tile), GatheredRow{p.sources}, tile[1], blockIdx.y);
}

// ---------------------------------------------------------------- sums

struct Sum {
    const void* rows;      // [rows, 8 chunks], in order of the experts
    const float* weights;  // [tokens, num_chosen]
    const int* places;     // [tokens, num_chosen], see `Routing`
    void* out;             // [tokens, 8 chunks]
    int num_chosen, chunks;
};

// The weighted sum of a token's rows, in ascending order of the experts, in float32; every product and sum is rounded.
// Grid: tokens.
template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS) add_experts(const __grid_constant__ Sum p) {
    int* const order = reinterpret_cast<int*>(shared_memory());  // [num_chosen]: choices by place
    const int* const places = p.places + i64(blockIdx.x) * p.num_chosen;
    const float* const weights = p.weights + i64(blockIdx.x) * p.num_chosen;
    for (int i = threadIdx.x; i < p.num_chosen; i += THREADS) {
        int before = 0;
        for (int j = 0; j < p.num_chosen; j++) before += places[j] < places[i] || (places[j] == places[i] && j < i);
        order[before] = i;
    }
    __syncthreads();
    for (int chunk = threadIdx.x; chunk < p.chunks; chunk += THREADS) {
        float sums[8] = {};
        for (int i = 0; i < p.num_chosen; i++) {
            const int place = places[order[i]];
            if (place < 0) continue;
            const float weight = weights[order[i]];
            const uint4 row = static_cast<const uint4*>(p.rows)[i64(place) * p.chunks + chunk];
            const u32 pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 pair = unpack<T>(pairs[j]);
                sums[2 * j] = __fadd_rn(sums[2 * j], __fmul_rn(weight, pair.x));
                sums[2 * j + 1] = __fadd_rn(sums[2 * j + 1], __fmul_rn(weight, pair.y));
            }
        }
        static_cast<uint4*>(p.out)[i64(blockIdx.x) * p.chunks + chunk] =
            make_uint4(pack<T>(sums[0], sums[1]), pack<T>(sums[2], sums[3]), pack<T>(sums[4], sums[5]),
                       pack<T>(sums[6], sums[7]));
    }
}
