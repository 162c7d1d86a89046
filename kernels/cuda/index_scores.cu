// The scores of an indexer (DeepSeek-AI 2025, "DeepSeek-V3.2"): that of a key for a token is the sum of
// weight * relu(scale * query . key) over the indexer's heads.
//
// A block scores KEYS keys of a request for TOKENS tokens, one after another: the keys stay in shared memory while tokens are
// of the same request. A warp has a part of the keys, and adds up 16 heads at a time, from the first to the last. So a score
// depends on its token and its key alone.
#include "ptx.cuh"
#include "layout.cuh"

struct IndexScores {
    float* scores;            // [last - first, width]; those of keys after a token are left as they are
    const void* q;            // [tokens, heads, SIZE]
    const float* weights;     // [tokens, heads]
    const void* keys;         // [blocks, block_size, SIZE], rows in order
    const int* query_starts;  // [requests + 1]
    const int* lengths;       // [requests]
    const int* block_table;   // [requests, table_width]
    i64 q_token_stride, q_head_stride;
    int first, last;          // the tokens that are scored
    int requests, heads, block_shift, table_width, width;
    float scale;
};

constexpr int TOKENS = 16, KEYS = 128, WARPS = 4, OWN = KEYS / WARPS;

// The request of a token: the last that begins at or before it, which is `requests` for padding.
DEVICE int request_of(const IndexScores& p, int token) {
    int low = 0, high = p.requests;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (__ldg(p.query_starts + middle) <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Copies rows into shared memory, swizzled. `source(row)` is where a row begins; null: it becomes zeros.
template <int CHUNKS, class Source>
DEVICE void load_rows(u8* target, int rows, Source source) {
    for (int i = threadIdx.x; i < rows * CHUNKS; i += WARPS * 32) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const uint4* const from = static_cast<const uint4*>(source(row));
        *reinterpret_cast<uint4*>(target + (row * CHUNKS + swizzle(CHUNKS, row, chunk)) * CHUNK_BYTES) =
            from ? from[chunk] : make_uint4(0, 0, 0, 0);
    }
}

template <class T, int SIZE>
__global__ void __launch_bounds__(WARPS * 32) index_scores(const __grid_constant__ IndexScores p) {
    constexpr int CHUNKS = SIZE * int(sizeof(T)) / CHUNK_BYTES;
    u8* const keys = shared_memory();
    u8* const queries = keys + KEYS * CHUNKS * CHUNK_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_key = blockIdx.x * KEYS;
    const int first = p.first + blockIdx.y * TOKENS, last = min(first + TOKENS, p.last);

    int loaded = -1;
    for (int token = first; token < last; token++) {
        const int request = request_of(p, token);
        if (request == p.requests) return;
        const int length = __ldg(p.lengths + request);
        const int position = length - __ldg(p.query_starts + request + 1) + token;
        if (first_key > position) continue;
        __syncthreads();  // the previous token is scored
        if (request != loaded)
            load_rows<CHUNKS>(keys, KEYS, [&](int row) -> const void* {
                const int key = first_key + row;
                if (key >= length) return nullptr;
                const int block = __ldg(p.block_table + i64(request) * p.table_width + (key >> p.block_shift));
                const i64 slot = (i64(block) << p.block_shift) + (key & ((1 << p.block_shift) - 1));
                return static_cast<const T*>(p.keys) + slot * SIZE;
            });
        loaded = request;
        load_rows<CHUNKS>(queries, (p.heads + 15) / 16 * 16, [&](int head) -> const void* {
            if (head >= p.heads) return nullptr;
            return static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
        });
        __syncthreads();  // keys and queries are there

        float sums[OWN / 8][2] = {};
        for (int heads = 0; heads < p.heads; heads += 16) {
            float products[OWN / 8][4] = {};
#pragma unroll
            for (int k = 0; k < SIZE / 16; k++) {
                u32 a[4];
                const int head = heads + (lane & 15);
                ldmatrix_x4(a, queries + (head * CHUNKS + swizzle(CHUNKS, head, 2 * k + (lane >> 4))) * CHUNK_BYTES);
#pragma unroll
                for (int n = 0; n < OWN / 8; n += 2) {
                    const int row = warp * OWN + 8 * n + (lane >> 4) * 8 + (lane & 7), chunk = 2 * k + (lane >> 3 & 1);
                    u32 b[4];
                    ldmatrix_x4(b, keys + (row * CHUNKS + swizzle(CHUNKS, row, chunk)) * CHUNK_BYTES);
                    mma<T>(products[n], a, b);
                    mma<T>(products[n + 1], a, b + 2);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int head = heads + 8 * i + lane / 4;
                const float weight = head < p.heads ? __ldg(p.weights + i64(token) * p.heads + head) : 0.0f;
#pragma unroll
                for (int n = 0; n < OWN / 8; n++)
#pragma unroll
                    for (int column = 0; column < 2; column++)
                        sums[n][column] += weight * fmaxf(products[n][2 * i + column] * p.scale, 0.0f);
            }
        }
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
#pragma unroll
            for (int column = 0; column < 2; column++) {
                float sum = sums[n][column];
#pragma unroll
                for (int bits = 4; bits < 32; bits *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, bits);
                const int key = first_key + warp * OWN + 8 * n + 2 * (lane % 4) + column;
                if (lane < 4 && key <= position) p.scores[i64(token - p.first) * p.width + key] = sum;
            }
    }
}
