// What LoRA adapters add to a product: out += scale * b (a x), for the rows of a batch that have adapters.
//
// Rows are taken in order of the adapter, in tiles of up to ROWS rows of one adapter. First `lora_shrink` makes
// low = scale * a x in float32, then `lora_expand` adds up the rows of b, each times its number of low. Every element of
// both is one chain of sums, whose order follows from the sizes of the matrices alone: a row's bits depend neither on
// the rows beside it nor on its tile. Which rows there are, and where their adapters lie, is read from memory, so a
// recorded launch can be replayed for any adapters.
#include "ptx.cuh"

// A change of some outputs of a product. See `pagewire.kernels.data.deltas.Delta`.
struct Delta {
    const void* a;       // [rank, k], aligned to 16 bytes
    const void* b;       // [panels of 64 outputs, rank, 64]
    const float* gain;   // [num_out]; null: 1
    const float* shift;  // [num_out]; null: 0
    int rank, first, num_out;
    int is_float;        // the type of a and b: float32, else that of x
    float scale;
};

// tables: for each tile the address of its adapter's table: i64 [num_products + 1], where each product's deltas begin
// in the array behind it.
struct Shrink {
    const void* x;       // [T, k], k a multiple of 8, rows aligned to 16 bytes
    float* low;          // [rows that have adapters, width]
    const u64* tables;   // [tiles]
    const i64* starts;   // [tiles + 1]: where the rows of each tile begin; a tile without rows is skipped
    const i64* rows;     // [rows that have adapters]: their indices in x and out
    i64 x_stride;        // in elements
    int k, width, product, num_products;
};

struct Expand {
    void* out;           // [T, n], contiguous
    const float* low;
    const u64* tables;
    const i64* starts;
    const i64* rows;
    int n, width, product, num_products;
};

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int ROWS = 8;              // of a tile, at most
constexpr int RANKS = 4;             // rows of a whose sums are made together
constexpr int PANEL = 64;            // columns of b that lie together
constexpr int COLUMNS = 2 * THREADS;  // outputs that a block adds to at a time
constexpr int DEPTH = 32;            // rows of b whose numbers of low lie in shared memory

// Rows [begin, begin + count) of the order.
struct Tile {
    int begin, count;
};

template <class P>
DEVICE Tile tile_of_block(const P& p) {
    const int begin = int(p.starts[blockIdx.x]);
    return {begin, int(p.starts[blockIdx.x + 1]) - begin};
}

// Calls body(delta, column, item) for the block's share of the items of a product's deltas, of which each has
// `count(delta)`. column: where in a row of low the delta's numbers begin.
template <class P, class Count, class Body>
DEVICE void for_items(const P& p, Count count, Body body) {
    const i64* starts = reinterpret_cast<const i64*>(p.tables[blockIdx.x]);
    const Delta* deltas = reinterpret_cast<const Delta*>(starts + p.num_products + 1);
    int item = blockIdx.y, column = 0;
    for (i64 i = starts[p.product]; i < starts[p.product + 1]; i++) {
        const Delta delta = deltas[i];
        const int items = count(delta);
        for (; item < items; item += gridDim.y) body(delta, column, item);
        item -= items;
        column += delta.rank;
    }
}

// Eight elements, aligned to 16 bytes.
template <class T>
DEVICE void load_eight(const T* from, float (&to)[8]) {
    if constexpr (is_same<T, float>) {
        const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    } else {
        const uint4 chunk = *reinterpret_cast<const uint4*>(from);
        const float2 a = unpack<T>(chunk.x), b = unpack<T>(chunk.y), c = unpack<T>(chunk.z), d = unpack<T>(chunk.w);
        to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
        to[4] = c.x, to[5] = c.y, to[6] = d.x, to[7] = d.y;
    }
}

template <class T>
DEVICE float2 load_two(const T* from) {
    if constexpr (is_same<T, float>)
        return *reinterpret_cast<const float2*>(from);
    else
        return unpack<T>(*reinterpret_cast<const u32*>(from));
}

// low = scale * a x for the rows of a tile and RANKS rows of a. A thread sums runs of 8 products, THREADS runs apart.
template <class T, class A>
DEVICE void shrink(const Shrink& p, Tile tile, const Delta& delta, int column, int item,
                   float (&parts)[WARPS][ROWS * RANKS]) {
    const int first = item * RANKS, ranks = min(RANKS, delta.rank - first);
    const A* a = static_cast<const A*>(delta.a) + i64(first) * p.k;
    const T* x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        x[r] = static_cast<const T*>(p.x) + p.rows[tile.begin + min(r, tile.count - 1)] * p.x_stride;
    float sums[ROWS][RANKS] = {};
    for (int i = 8 * threadIdx.x; i < p.k; i += 8 * THREADS) {
        float weights[RANKS][8];
#pragma unroll
        for (int j = 0; j < RANKS; j++) load_eight(a + i64(min(j, ranks - 1)) * p.k + i, weights[j]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= tile.count) continue;
            float values[8];
            load_eight(x[r] + i, values);
#pragma unroll
            for (int j = 0; j < RANKS; j++)
#pragma unroll
                for (int e = 0; e < 8; e++) sums[r][j] = __fmaf_rn(values[e], weights[j][e], sums[r][j]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= tile.count) continue;
#pragma unroll
        for (int j = 0; j < RANKS; j++) {
            const float sum = sum_lanes(sums[r][j]);
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][r * RANKS + j] = sum;
        }
    }
    __syncthreads();
    const int r = threadIdx.x / RANKS, j = threadIdx.x % RANKS;
    if (r < tile.count && j < ranks) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += parts[warp][threadIdx.x];
        p.low[i64(tile.begin + r) * p.width + column + first + j] = delta.scale * sum;
    }
    __syncthreads();  // the next item's sums go to the same place
}

template <class T>
__global__ void __launch_bounds__(THREADS) lora_shrink(const __grid_constant__ Shrink p) {
    __shared__ float parts[WARPS][ROWS * RANKS];
    const Tile tile = tile_of_block(p);
    if (tile.count == 0) return;
    auto items = [](const Delta& delta) { return (delta.rank + RANKS - 1) / RANKS; };
    for_items(p, items, [&](const Delta& delta, int column, int item) {
        if (delta.is_float)
            shrink<T, float>(p, tile, delta, column, item, parts);
        else
            shrink<T, T>(p, tile, delta, column, item, parts);
    });
}

// Adds two sums to a row of the result, and applies what else changes it.
template <class T>
DEVICE void add_two(const Expand& p, const Delta& delta, i64 row, int output, const float (&sums)[2]) {
    T* out = static_cast<T*>(p.out) + row * p.n + delta.first;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (output + i >= delta.num_out) continue;
        float value = to_float(out[output + i]) + sums[i];
        if (delta.gain) value *= delta.gain[output + i];
        if (delta.shift) value += delta.shift[output + i];
        out[output + i] = from_float<T>(value);
    }
}

// out += b low for the rows of a tile and COLUMNS outputs, two by each thread.
template <class T, class B>
DEVICE void expand(const Expand& p, Tile tile, const Delta& delta, int column, int item, float (&low)[DEPTH][ROWS]) {
    const int output = item * COLUMNS + 2 * threadIdx.x;
    const bool is_there = output < delta.num_out;
    const B* b = static_cast<const B*>(delta.b) + i64(output / PANEL) * PANEL * delta.rank + output % PANEL;
    float sums[ROWS][2] = {};
    for (int first = 0; first < delta.rank; first += DEPTH) {
        const int depth = min(DEPTH, delta.rank - first);
        __syncthreads();  // all threads are done with the numbers before these
        for (int i = threadIdx.x; i < DEPTH * ROWS; i += THREADS) {
            const int rank = i % DEPTH, r = i / DEPTH;
            const float* from = p.low + i64(tile.begin + r) * p.width + column + first + rank;
            low[rank][r] = rank < depth && r < tile.count ? *from : 0.0f;
        }
        __syncthreads();
        if (!is_there) continue;
#pragma unroll 3  // with 2 or 4 registers spill, for sm_100 or sm_80
        for (int rank = 0; rank < depth; rank++) {
            const float2 weights = load_two(b + i64(first + rank) * PANEL);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                sums[r][0] = __fmaf_rn(low[rank][r], weights.x, sums[r][0]);
                sums[r][1] = __fmaf_rn(low[rank][r], weights.y, sums[r][1]);
            }
        }
    }
    if (!is_there) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (r < tile.count) add_two<T>(p, delta, p.rows[tile.begin + r], output, sums[r]);
}

template <class T>
__global__ void __launch_bounds__(THREADS) lora_expand(const __grid_constant__ Expand p) {
    __shared__ __align__(16) float low[DEPTH][ROWS];
    const Tile tile = tile_of_block(p);
    if (tile.count == 0) return;
    auto items = [](const Delta& delta) { return (delta.num_out + COLUMNS - 1) / COLUMNS; };
    for_items(p, items, [&](const Delta& delta, int column, int item) {
        if (delta.is_float)
            expand<T, float>(p, tile, delta, column, item, low);
        else
            expand<T, T>(p, tile, delta, column, item, low);
    });
}
