// Attention to latents (DeepSeek-AI 2024, "DeepSeek-V2", 2.1): one KV head for all query heads, whose keys are a latent of
// RANK elements and ROTATED more, and whose values are the latent. So a row of the cache is read once for both.
//
// A block computes ROWS rows of a request over a part of the keys, KEYS at a time, while the next ones are copied to the
// other buffer. A row's weighted sum is too long for the registers of one warp. So a warp has two roles: it makes weights
// of 16 rows and some of the keys, which go to all warps through shared memory, and adds up a part of the values'
// elements, of all rows. Where keys are split, another kernel merges the parts.
//
// CHOSEN: a token sees the keys of a list alone. Then a block has rows of one token, for which the list's keys lie one
// behind the other; a copy finds each of them in the blocks of the request.
#include "latents.cuh"

// The shape of a part of the values, D elements of rows of S, of 16 keys at a time.
template <class S, int D, int M>
struct LatentValues : Shape<typename S::T, typename S::KV, D, M, 16> {
    static constexpr int CHUNKS = S::CHUNKS, ROW_BYTES = S::ROW_BYTES;
};

// The dot products of 16 rows of queries, from `first_row` on, with the first KEYS keys.
template <class S>
DEVICE void multiply_latents(float (&logits)[1][S::KEYS / 8][4], const u8* queries, int first_row, const u8* keys, int lane) {
    static_assert(S::D % 32 == 0);
#pragma unroll
    for (int n = 0; n < S::KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) logits[0][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < S::D / 16; k += 2) {
        u32 a[2][4];
        query_fragment<S>(a[0], queries, first_row, k, lane);
        query_fragment<S>(a[1], queries, first_row, k + 1, lane);
#pragma unroll
        for (int n = 0; n < S::KEYS / 8; n++) {
            const int row = 8 * n + (lane & 7);
            u32 b[4];
            ldmatrix_x4(b, keys + (row * S::CHUNKS + swizzle(S::CHUNKS, row, 2 * k + (lane >> 3))) * CHUNK_BYTES);
            mma<typename S::T>(logits[0][n], a[0], b);
            mma<typename S::T>(logits[0][n], a[1], b + 2);
        }
    }
}

template <class T, int RANK, int ROTATED, int ROWS, int KEYS, int WARPS, bool CHOSEN = false>
__global__ void __launch_bounds__(WARPS * 32, 1) latent_attention(const __grid_constant__ AttentionParameters a) {
    constexpr int M = ROWS / 16, GROUPS = WARPS / M;  // groups of keys, each with a warp for every 16 rows
    using S = Shape<T, T, RANK + ROTATED, 1, KEYS / GROUPS>;  // of a warp that makes weights; its `out` is not used
    using V = LatentValues<S, RANK / WARPS, M>;               // of a warp that adds up values
    constexpr int THREADS = WARPS * 32, BUFFER = KEYS * S::ROW_BYTES, COPIERS = THREADS / (KEYS / PAGE_ROWS);
    constexpr int OUT_CHUNKS = RANK * int(sizeof(T)) / CHUNK_BYTES, WEIGHT_CHUNKS = KEYS * int(sizeof(T)) / CHUNK_BYTES;
    static_assert(WARPS % M == 0 && LEAST_KEYS % KEYS == 0 && COPIERS % 32 == 0);
    static_assert(V::D % 64 == 0 || V::D / 8 % (S::CHUNKS & -S::CHUNKS) == 0, "the swizzle stays within a part");
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

    const Tile<S, ROWS, OUT_CHUNKS, CHOSEN> tile(a);
    if (tile.request == a.requests) return;
    int first_row = tile.first_row;
    const Queries queries = queries_of_tile<ROWS, CHOSEN>(a, tile.request, first_row);
    if (first_row >= queries.rows) return;
    const int part = blockIdx.y;
    const Parts<KEYS> parts(a, queries, first_row, ROWS);
    if (part >= parts.used) return;
    const int end = min(parts.first + (part + 1) * parts.share, parts.keys.end);
    int first_key = parts.first + part * parts.share;

    u8* const staged = shared_memory();  // queries, and at the end the outputs
    u8* const buffers = staged + ROWS * S::ROW_BYTES;
    u8* const weights = buffers + 2 * BUFFER;
    float* const tops = reinterpret_cast<float*>(weights + ROWS * WEIGHT_CHUNKS * CHUNK_BYTES);  // of each group
    float* const factors = tops + GROUPS * ROWS;  // of the sums so far
    auto weight_place = [&](int row, int chunk) {
        return weights + (row * WEIGHT_CHUNKS + swizzle(WEIGHT_CHUNKS, row, chunk)) * CHUNK_BYTES;
    };

    constexpr int COPIED = CHOSEN ? KEYS / WARPS : PAGE_ROWS;
    const int page = (CHOSEN ? warp : thread / COPIERS) * COPIED;  // the first row that this thread copies, in a step
    int source;  // of the next copy: a block, or a place for each lane
    auto find = [&](int key) {
        if constexpr (CHOSEN)
            source = find_chosen(a, queries, key + page + lane % COPIED, end);
        else
            source = find_block(a, queries.request, key + page, parts.keys.begin, end);
    };
    auto copy = [&](u8* buffer, int key) {
        if constexpr (CHOSEN)
            copy_chosen<S, COPIED>(buffer, page, a.k, source, opaque(lane));
        else
            copy_rows<S, COPIERS>(buffer + page * S::ROW_BYTES, chunk_in_order, a.k, a, 0, source, key + page,
                                  parts.keys.begin, end, opaque(thread) % COPIERS);
        commit_copies();
    };
    find(first_key);
    copy(buffers, first_key);
    find(first_key + KEYS);
    load_queries<S>(staged, query_place<S>, a, queries, first_row, ROWS, thread, THREADS);

    const int tile_row = warp % M * 16, group = warp / M;  // whose weights this warp makes
    Rows<S> softmax;
    Rows<V> rows;
    for (int buffer = 0; first_key < end; first_key += KEYS, buffer ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // these keys have arrived, and no warp still reads the previous ones, or their weights
        if (first_key + KEYS < end) {
            copy(buffers + (buffer ^ 1) * BUFFER, first_key + KEYS);
            find(first_key + 2 * KEYS);
        }
        const u8* const keys = buffers + buffer * BUFFER;
        float logits[1][S::KEYS / 8][4];
        multiply_latents<S>(logits, staged, tile_row, keys + group * S::KEYS * S::ROW_BYTES, opaque(lane));
        if (parts.keys.cuts(first_key, KEYS))
            mask_logits<S>(logits, a, queries, first_row + tile_row, first_key + group * S::KEYS, opaque(lane));
        float top[1][2];
        find_tops<S>(logits, softmax, top);
        const int row = tile_row + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (lane % 4 == 0) tops[group * ROWS + row + 8 * i] = top[0][i];
        __syncthreads();  // all groups have their largest logits

#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int other = 0; other < GROUPS; other++)
                top[0][i] = fmaxf(top[0][i], tops[other * ROWS + row + 8 * i]);
        Shrink<S> shrink;
        weigh_logits<S>(logits, softmax, exponent_scale<S>(a), top, shrink);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int n = 0; n < S::KEYS / 8; n++) {
                u8* const chunk = weight_place(row + 8 * i, group * (S::KEYS / 8) + n);
                reinterpret_cast<u32*>(chunk)[lane % 4] = pack<T>(logits[0][n][2 * i], logits[0][n][2 * i + 1]);
            }
            if (group == 0 && lane % 4 == 0) factors[row + 8 * i] = shrink[0][i];
        }
        __syncthreads();  // the weights are there

        Shrink<V> shrinks;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) shrinks[m][i] = factors[16 * m + 8 * i + lane / 4];
        shrink_values<V>(rows, shrinks);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            Weights<V> own;
#pragma unroll
            for (int m = 0; m < M; m++)
                ldmatrix_x4(own[m][0], weight_place(16 * m + (lane & 15), 2 * k + (lane >> 4)));
            const u8* const values = keys + k * 16 * S::ROW_BYTES + warp * V::D * int(sizeof(T));
            add_values<V>(rows, own, values, opaque(lane));
        }
    }
    __syncthreads();  // the last factors are read

#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = tile_row + 8 * i + lane / 4;
        const float sum = sum_lanes<4>(softmax.sum[0][i]);
        if (lane % 4 == 0) tops[group * ROWS + row] = sum;
        if (group == 0 && lane % 4 == 0) factors[row] = softmax.top[0][i] * exponent_scale<S>(a);
    }
    __syncthreads();
    const i64 place = (i64(blockIdx.x) * a.splits + part) * ROWS;
    u32* const outputs = reinterpret_cast<u32*>(staged);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * m + 8 * i + lane / 4;
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < GROUPS; other++) sum += tops[other * ROWS + row];
            if (parts.used > 1 && warp == 0 && lane % 4 == 0) a.partial_sums[place + row] = make_float2(factors[row], sum);
            float factor = 1.0f;
            if (parts.used == 1) {
                const float sink = sink_exponent<T>(a, queries.head_of(min(first_row + row, queries.rows - 1)));
                const float larger = fmaxf(factors[row], sink), weight = exp2_approx(factors[row] - larger);
                factor = weight / (sum * weight + exp2_approx(sink - larger));
            }
#pragma unroll
            for (int j = 0; j < V::D / 8; j++) {
                const float first = rows.out[m][j][2 * i] * factor, second = rows.out[m][j][2 * i + 1] * factor;
                const int chunk = warp * (V::D / 8) + j;
                if (parts.used > 1)
                    reinterpret_cast<float2*>(a.partial_out + (place + row) * RANK + chunk * 8)[lane % 4] =
                        make_float2(first, second);
                else
                    outputs[(row * OUT_CHUNKS + swizzle(OUT_CHUNKS, row, chunk)) * 4 + lane % 4] = pack<T>(first, second);
            }
        }
    if (parts.used > 1) return;
    __syncthreads();
    uint4* const out = static_cast<uint4*>(a.out) + (i64(queries.start) * a.heads + first_row) * OUT_CHUNKS;
    for (int i = thread; i < min(queries.rows - first_row, ROWS) * OUT_CHUNKS; i += THREADS) {
        const int row = i / OUT_CHUNKS, chunk = i % OUT_CHUNKS;
        out[i] = reinterpret_cast<const uint4*>(staged)[row * OUT_CHUNKS + swizzle(OUT_CHUNKS, row, chunk)];
    }
}
