// The common parts of decode and prefill attention: from pages to fragments, a step of the softmax, the sums.
//
// The query heads of a KV head are packed: row r of a request is query token r / group, and head r % group of the KV
// head's query heads. A warp holds one or more tiles of 16 rows and processes 16 or more keys at each step: it
// multiplies rows by keys, folds the logits into a running softmax, and adds the weighted values, all in registers.
#pragma once

#include "ptx.cuh"
#include "layout.cuh"

// The parameters of a launch. Strides count elements.
struct AttentionParameters {
    void* out;                 // [tokens, heads, D], contiguous
    const void* q;             // [tokens, heads, D]
    const u8* k;               // [blocks, kv_heads, block_size, D], in the layout of layout.cuh
    const u8* v;               // as k
    const int* query_starts;   // [requests + 1]
    const int* lengths;        // [requests]
    const int* block_table;    // [requests, table_width]
    const void* sinks;         // [heads] or null
    const void* alibi;         // [heads] or null
    const float* relative_bias;  // [heads, 2 bias_radius], of distances from -bias_radius on, or null; if TWO_SIDED
    float* partial_out;        // decode: [requests, row tiles, splits, 16, D]; latents: [tiles, splits, ROWS, RANK]
    float2* partial_sums;      // decode: [requests, row tiles, splits, 16], maximum and sum; latents: likewise
    u32* arrivals;             // decode: [requests, row tiles], all 0 before and after
    i64 q_token_stride;
    i64 q_head_stride;
    int tokens;                // rows of q and out; rows after the last request's are padding
    int requests;
    int heads;
    int kv_heads;
    int block_shift;           // log2 of block_size
    int table_width;
    int window;                // keys up to its own that a query attends to, including its own
    int chunk;                 // a query sees no key before the last multiple of this up to its position; 0: all
    int future;                // keys after its own that a query attends to; if TWO_SIDED
    int bias_radius;
    int short_queries;         // requests with more query tokens than this go to prefill, the others to decode
    int splits;                // latents: the most parts of the keys of a tile
    int sinks_are_float;       // otherwise they have q's type
    int alibi_is_float;
    float scale;               // of logits, with that of the keys
    float v_scale;             // of the values
    float softcap;             // 0: none
    int num_chosen;
    const int* chosen;         // latents: [tokens, num_chosen], ascending: the only keys that a token sees, or null
};

#define MINUS_INFINITY __uint_as_float(0xff800000u)
constexpr int PAGE_ROWS = 16;  // rows per copy: every block size is a multiple

// The compile-time sizes of a kernel: M tiles of 16 rows per warp, KEYS keys at each step. TWO_SIDED: queries attend to
// later keys, too.
template <class Type, class Cache, int HEAD_DIM, int TILES, int STEP, bool BOTH_SIDES = false>
struct Shape {
    using T = Type;
    using KV = Cache;
    static constexpr int D = HEAD_DIM, M = TILES, KEYS = STEP;
    static constexpr bool NARROW = is_fp8<KV>, TWO_SIDED = BOTH_SIDES;
    static constexpr int GROUP = NARROW ? 32 : 16;  // keys whose fragments one ldmatrix loads
    static constexpr int Q_CHUNKS = D * 2 / CHUNK_BYTES, CHUNKS = D * int(sizeof(KV)) / CHUNK_BYTES;
    static constexpr int ROW_BYTES = CHUNKS * CHUNK_BYTES;
    static_assert(D % 16 == 0 && KEYS % 8 == 0);
};

// ---------------------------------------------------------------- fp8 to 16 bits

// The four fp8 of a word as two pairs: elements 0 and 2, elements 1 and 3. Sign and magnitude are shifted to their
// place in T; the product corrects for T's larger exponent bias. Exact, also for subnormal numbers.
template <class T, class F8> DEVICE void widen_word(u32 word, u32& even, u32& odd) {
    constexpr int MANTISSA = is_same<T, bf16> ? 7 : 10, F8_MANTISSA = is_same<F8, e4m3> ? 3 : 2;
    constexpr int BIAS = is_same<T, bf16> ? 127 : 15, F8_BIAS = is_same<F8, e4m3> ? 7 : 15;
    constexpr int UP = MANTISSA - F8_MANTISSA;
    constexpr u32 SIGNS = 0x80008000u, MAGNITUDES = (0x7fu << UP) * 0x00010001u;
    even = (word << 8 & SIGNS) | (word << UP & MAGNITUDES);
    odd = (word & SIGNS) | (word >> (8 - UP) & MAGNITUDES);
    if constexpr (BIAS != F8_BIAS) {
        constexpr u32 FACTOR = u32(2 * BIAS - F8_BIAS) << MANTISSA;
        even = multiply_pairs<T>(even, FACTOR * 0x00010001u);
        odd = multiply_pairs<T>(odd, FACTOR * 0x00010001u);
    }
}

// ---------------------------------------------------------------- from pages to shared memory

// The block of a request's PAGE_ROWS tokens that begin at `token`; 0 if none of them is in [begin, end).
DEVICE int find_block(const AttentionParameters& a, int request, int token, int begin, int end) {
    if (token + PAGE_ROWS <= begin || token >= end) return 0;
    return __ldg(a.block_table + i64(request) * a.table_width + (token >> a.block_shift));
}

// Where most kernels have chunk number `first + lane` of a page: one behind the other. The lane's part comes first, so that
// the compiler adds it to the pointer once for all chunks.
DEVICE u8* chunk_in_order(u8* page, int first, int lane) { return page + lane * CHUNK_BYTES + first * CHUNK_BYTES; }

// THREADS threads, of which this is number `lane`, copy the PAGE_ROWS rows that begin at `token` from `block`. Rows of tokens
// outside [begin, end) become zeros: the page's contents there are undefined, and a weight of 0 does not make NaN 0.
// place: as `chunk_in_order`.
template <class S, int THREADS = 32, class Place>
DEVICE void copy_rows(u8* target, Place place, const u8* cache, const AttentionParameters& a, int kv_head, int block,
                      int token, int begin, int end, int lane) {
    const i64 row = ((i64(block) * a.kv_heads + kv_head) << a.block_shift) + (token & ((1 << a.block_shift) - 1));
    const u8* source = cache + row * S::ROW_BYTES + lane * CHUNK_BYTES;
    const int skipped = max(begin - token, 0), last = min(end - token, PAGE_ROWS);
    const u32 first = skipped * S::CHUNKS - lane, num_chunks = max(last - skipped, 0) * S::CHUNKS;
#pragma unroll
    for (int i = 0; i < PAGE_ROWS * S::CHUNKS; i += THREADS)
        if (i + THREADS <= PAGE_ROWS * S::CHUNKS || i + lane < PAGE_ROWS * S::CHUNKS)
            copy_async_16(place(target, i, lane), source + i * CHUNK_BYTES, u32(i) - first < num_chunks);
}

// ---------------------------------------------------------------- queries

// The queries of one request and KV head, as rows.
struct Queries {
    int request, kv_head, group, start, length, rows, position;  // position: of the first query

    DEVICE Queries(const AttentionParameters& a, int request, int kv_head)
        : request(request), kv_head(kv_head), group(a.heads / a.kv_heads), start(__ldg(a.query_starts + request)) {
        const int queries = __ldg(a.query_starts + request + 1) - start;
        length = __ldg(a.lengths + request);
        rows = queries * group;
        position = length - queries;
    }
    DEVICE int position_of(int row) const { return position + row / group; }
    DEVICE int head_of(int row) const { return kv_head * group + row % group; }
    DEVICE int token_of(int row) const { return start + row / group; }
};

// The first and the last key that the query at `position` attends to. Neither is before that of an earlier query.
DEVICE int first_key_of(const AttentionParameters& a, int position) {
    const int first = max(position - a.window + 1, 0);
    return a.chunk ? max(first, position - int(u32(position) % u32(a.chunk))) : first;
}
template <class S> DEVICE int last_key_of(const AttentionParameters& a, const Queries& queries, int position) {
    if constexpr (S::TWO_SIDED) return min(position + a.future, queries.length - 1);
    return position;
}

// The keys from `begin` to `end` that some row of several attends to, and those that all of them do.
struct alignas(16) KeyRange {
    int begin, end, all_begin, all_end;

    // Whether some of `count` keys from `key` on is among those of some row; is not among those of all rows.
    DEVICE bool meets(int key, int count) const { return key < end && key + count > begin; }
    DEVICE bool cuts(int key, int count) const { return key < all_begin || key + count > all_end; }
};

// The keys of `count` rows from `first_row` on; of the last row if all are after it.
template <class S>
DEVICE KeyRange key_range(const AttentionParameters& a, const Queries& queries, int first_row, int count) {
    const int first = queries.position_of(min(first_row, queries.rows - 1));
    const int last = queries.position_of(min(first_row + count, queries.rows) - 1);
    return {first_key_of(a, first), last_key_of<S>(a, queries, last) + 1, first_key_of(a, last),
            last_key_of<S>(a, queries, first) + 1};
}

// The place of a chunk of a query in shared memory: rows one after another, swizzled.
template <class S>
DEVICE int query_place(int row, int chunk) {
    return (row * S::Q_CHUNKS + swizzle(S::Q_CHUNKS, row, chunk)) * CHUNK_BYTES;
}

// Copies rows `first` to `first + count` into shared memory; rows after the last become zeros. For fp8 keys, each 16
// elements are permuted as widen_word permutes the keys' elements, so the dot product is the same.
// place: that of a chunk of a row, as `query_place`.
template <class S, class Place>
DEVICE void load_queries(u8* target, Place place, const AttentionParameters& a, const Queries& queries, int first,
                         int count, int thread, int threads) {
    const u16* q = static_cast<const u16*>(a.q);
    for (int i = thread; i < count * (S::D / 16); i += threads) {
        const int tile_row = i / (S::D / 16), part = i % (S::D / 16), row = first + tile_row;
        uint4 x = make_uint4(0, 0, 0, 0), y = x;
        if (row < queries.rows) {
            const uint4* source = reinterpret_cast<const uint4*>(
                q + queries.token_of(row) * a.q_token_stride + queries.head_of(row) * a.q_head_stride + part * 16);
            x = source[0];
            y = source[1];
        }
        if constexpr (S::NARROW) {
            const uint4 even = make_uint4((x.x & 0xffff) | x.y << 16, (x.z & 0xffff) | x.w << 16,
                                          (y.x & 0xffff) | y.y << 16, (y.z & 0xffff) | y.w << 16);
            y = make_uint4(x.x >> 16 | (x.y & 0xffff0000u), x.z >> 16 | (x.w & 0xffff0000u),
                           y.x >> 16 | (y.y & 0xffff0000u), y.z >> 16 | (y.w & 0xffff0000u));
            x = even;
        }
        *reinterpret_cast<uint4*>(target + place(tile_row, 2 * part)) = x;
        *reinterpret_cast<uint4*>(target + place(tile_row, 2 * part + 1)) = y;
    }
}

// The fragment of elements 16 k to 16 k + 15 of 16 rows.
template <class S> DEVICE void query_fragment(u32 a[4], const u8* queries, int first_row, int k, int lane) {
    ldmatrix_x4(a, queries + query_place<S>(first_row + (lane & 15), 2 * k + (lane >> 4)));
}

// ---------------------------------------------------------------- keys and values

// The fragments of elements 16 k to 16 k + 15 of GROUP keys, one for each 8 keys.
template <class S>
DEVICE void key_fragments(u32 (&b)[S::GROUP / 8][2], const u8* keys, int first_row, int k, int lane) {
    u32 loaded[4];
    if constexpr (S::NARROW) {
        const int row = first_row + lane;
        ldmatrix_x4(loaded, keys + (row * S::CHUNKS + swizzle(S::CHUNKS, row, k)) * CHUNK_BYTES);
#pragma unroll
        for (int n = 0; n < 4; n++) widen_word<typename S::T, typename S::KV>(loaded[n], b[n][0], b[n][1]);
    } else {
        const int row = first_row + (lane >> 4) * 8 + (lane & 7), chunk = 2 * k + (lane >> 3 & 1);
        ldmatrix_x4(loaded, keys + (row * S::CHUNKS + swizzle(S::CHUNKS, row, chunk)) * CHUNK_BYTES);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            b[n][0] = loaded[2 * n];
            b[n][1] = loaded[2 * n + 1];
        }
    }
}

// The fragments of elements 16 j to 16 j + 15 of the values of GROUP keys: for each 16 keys two sets of 8 elements. The
// sets are the lower and the upper half, or for fp8 the even and the odd elements.
template <class S>
DEVICE void value_fragments(u32 (&b)[S::GROUP / 16][2][2], const u8* values, int first_row, int j, int lane) {
    u32 loaded[4];
    if constexpr (S::NARROW) {
        const int row = first_row + lane;
        ldmatrix_x4_transposed(loaded, values + (row * S::CHUNKS + swizzle(S::CHUNKS, row, j)) * CHUNK_BYTES);
#pragma unroll
        for (int n = 0; n < 4; n++)
            widen_word<typename S::T, typename S::KV>(loaded[n], b[n / 2][0][n % 2], b[n / 2][1][n % 2]);
    } else {
        const int row = first_row + (lane & 15), chunk = 2 * j + (lane >> 4);
        ldmatrix_x4_transposed(loaded, values + (row * S::CHUNKS + swizzle(S::CHUNKS, row, chunk)) * CHUNK_BYTES);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            b[0][half][0] = loaded[2 * half];
            b[0][half][1] = loaded[2 * half + 1];
        }
    }
}

// The element of a row that a lane holds in out[2 j + half][.. i].
template <class S> DEVICE constexpr int out_element(int j, int half, int i, int lane) {
    return 16 * j + (S::NARROW ? 4 * (lane & 3) + 2 * i + half : 8 * half + 2 * (lane & 3) + i);
}

// ---------------------------------------------------------------- softmax

// A lane's row i of tile m, or the last row if there are fewer.
DEVICE int lane_row(const Queries& queries, int first_row, int m, int i, int lane) {
    return min(first_row + 16 * m + 8 * i + (lane >> 2), queries.rows - 1);
}

// A lane's share of its warp's rows: rows g and g + 8 of tile m, where g is lane / 4 (i = 0 and 1 below).
template <class S> struct Rows {
    float out[S::M][S::D / 8][4];  // weighted sums of values
    float top[S::M][2];            // the largest logit so far
    float sum[S::M][2];            // this lane's share of the sum of weights

    DEVICE Rows() {
#pragma unroll
        for (int m = 0; m < S::M; m++) {
#pragma unroll
            for (int j = 0; j < S::D / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][j][i] = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                top[m][i] = MINUS_INFINITY;
                sum[m][i] = 0.0f;
            }
        }
    }
};

// Element `head` of an array of float or of T.
template <class T> DEVICE float head_number(const void* array, int is_float, int head) {
    return is_float ? static_cast<const float*>(array)[head] : to_float(static_cast<const T*>(array)[head]);
}

// Logits with a softcap or a bias are scaled immediately; others when they become exponents of 2.
template <class S> DEVICE bool is_biased(const AttentionParameters& a) {
    return a.softcap > 0.0f || a.alibi || (S::TWO_SIDED && a.relative_bias);
}
template <class S> DEVICE float exponent_scale(const AttentionParameters& a) {
    return is_biased<S>(a) ? LOG2_E : a.scale * LOG2_E;
}

// softcap * tanh(x / softcap), to about 1e-6 of softcap.
DEVICE float soft_cap(float x, float softcap) {
    return softcap - __fdividef(2.0f * softcap, exp2_approx(2.0f * LOG2_E * __fdividef(x, softcap)) + 1.0f);
}

// The dot products of the warp's rows with KEYS keys. `query(a, m, k, lane)` loads a fragment of tile m.
template <class S, class Query>
DEVICE void multiply_keys(float (&logits)[S::M][S::KEYS / 8][4], Query query, const u8* keys, int lane) {
    static_assert(S::KEYS % S::GROUP == 0);
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int n = 0; n < S::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) logits[m][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < S::D / 16; k++) {
        u32 a[S::M][4];
#pragma unroll
        for (int m = 0; m < S::M; m++) query(a[m], m, k, lane);
#pragma unroll
        for (int first = 0; first < S::KEYS; first += S::GROUP) {
            u32 b[S::GROUP / 8][2];
            key_fragments<S>(b, keys, first, k, lane);
#pragma unroll
            for (int n = 0; n < S::GROUP / 8; n++)
#pragma unroll
                for (int m = 0; m < S::M; m++) mma<typename S::T>(logits[m][first / 8 + n], a[m], b[n]);
        }
    }
}

// The bias of a distance and of those after it; null without. The keys of a step may lie beyond the request's end, where
// the table still has numbers: see `bias_radius` in attention.py.
template <class S>
DEVICE const float* biases_from(const AttentionParameters& a, int head, int distance) {
    if constexpr (S::TWO_SIDED)
        if (a.relative_bias) return a.relative_bias + (2 * head + 1) * a.bias_radius + distance;
    return nullptr;
}

// Applies softcap, ALiBi, and the biases of distances.
template <class S>
DEVICE void bias_logits(float (&logits)[S::M][S::KEYS / 8][4], const AttentionParameters& a, const Queries& queries,
                        int first_row, int first_key, int lane) {
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float slope = 0.0f;
            int distance = 0;
            const float* biases = nullptr;
            if (a.alibi || S::TWO_SIDED) {
                const int row = lane_row(queries, first_row, m, i, lane);
                distance = first_key + 2 * (lane & 3) - queries.position_of(row);
                if (a.alibi) slope = head_number<typename S::T>(a.alibi, a.alibi_is_float, queries.head_of(row));
                biases = biases_from<S>(a, queries.head_of(row), distance);
            }
#pragma unroll
            for (int n = 0; n < S::KEYS / 8; n++)
#pragma unroll
                for (int column = 0; column < 2; column++) {
                    float& logit = logits[m][n][2 * i + column];
                    logit *= a.scale;
                    if (a.softcap > 0.0f) logit = soft_cap(logit, a.softcap);
                    logit += slope * float(distance + 8 * n + column);
                    if (S::TWO_SIDED && biases) logit += __ldg(biases + 8 * n + column);
                }
        }
}

// Masks the keys after the last that the query attends to, and those before the first.
template <class S>
DEVICE void mask_logits(float (&logits)[S::M][S::KEYS / 8][4], const AttentionParameters& a, const Queries& queries,
                        int first_row, int first_key, int lane) {
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = lane_row(queries, first_row, m, i, lane);
            const int position = queries.position_of(row), here = first_key + 2 * (lane & 3);
            const int last = last_key_of<S>(a, queries, position) - here, first = first_key_of(a, position) - here;
#pragma unroll
            for (int n = 0; n < S::KEYS / 8; n++)
#pragma unroll
                for (int column = 0; column < 2; column++)
                    if (8 * n + column < first || 8 * n + column > last)
                        logits[m][n][2 * i + column] = MINUS_INFINITY;
        }
}

// The factors of the sums so far, as new logits are taken in: rows i of tile m.
template <class S> using Shrink = float[S::M][2];

// The largest logits so far.
template <class S>
DEVICE void find_tops(const float (&logits)[S::M][S::KEYS / 8][4], const Rows<S>& rows, float (&tops)[S::M][2]) {
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = rows.top[m][i];
#pragma unroll
            for (int n = 0; n < S::KEYS / 8; n++)
                top = fmaxf(top, fmaxf(logits[m][n][2 * i], logits[m][n][2 * i + 1]));
            tops[m][i] = max_lanes<4>(top);
        }
}

// Turns logits into weights relative to `tops`, the largest logits so far. `shrink`: what the earlier weighted values must
// be multiplied by.
template <class S>
DEVICE void weigh_logits(float (&logits)[S::M][S::KEYS / 8][4], Rows<S>& rows, float scale, const float (&tops)[S::M][2],
                         Shrink<S>& shrink) {
#pragma unroll
    for (int m = 0; m < S::M; m++) {
        float offset[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float top = tops[m][i];
            offset[i] = top == MINUS_INFINITY ? 0.0f : -top * scale;  // no key seen yet: every weight is 2^-inf
            // Exactly 1 where no logit is larger: a product and a sum, fused or not, would give nearly 1.
            shrink[m][i] = rows.top[m][i] == top ? 1.0f : exp2_approx((rows.top[m][i] - top) * scale);
            rows.top[m][i] = top;
            rows.sum[m][i] *= shrink[m][i];
        }
#pragma unroll
        for (int n = 0; n < S::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                logits[m][n][i] = exp2_approx(logits[m][n][i] * scale + offset[i >> 1]);
                rows.sum[m][i >> 1] += logits[m][n][i];
            }
    }
}

// Multiplies the weighted values so far.
template <class S>
DEVICE void shrink_values(Rows<S>& rows, const Shrink<S>& shrink) {
#pragma unroll
    for (int m = 0; m < S::M; m++)
        if (__any_sync(ALL_LANES, shrink[m][0] != 1.0f || shrink[m][1] != 1.0f))
#pragma unroll
            for (int j = 0; j < S::D / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) rows.out[m][j][i] *= shrink[m][i >> 1];
}

// The fragments of weights, by 16 keys.
template <class S> using Weights = u32[S::M][S::KEYS / 16][4];

template <class S>
DEVICE void pack_weights(const float (&weights)[S::M][S::KEYS / 8][4], Weights<S>& to) {
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int n = 0; n < S::KEYS / 8; n++) {
            to[m][n / 2][n % 2 * 2] = pack<typename S::T>(weights[m][n][0], weights[m][n][1]);
            to[m][n / 2][n % 2 * 2 + 1] = pack<typename S::T>(weights[m][n][2], weights[m][n][3]);
        }
}

// Adds the weighted values of KEYS keys.
template <class S>
DEVICE void add_values(Rows<S>& rows, const Weights<S>& weights, const u8* values, int lane) {
    static_assert(S::KEYS % S::GROUP == 0);
#pragma unroll
    for (int first = 0; first < S::KEYS; first += S::GROUP)
#pragma unroll
        for (int j = 0; j < S::D / 16; j++) {
            u32 b[S::GROUP / 16][2][2];
            value_fragments<S>(b, values, first, j, lane);
#pragma unroll
            for (int step = 0; step < S::GROUP / 16; step++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int m = 0; m < S::M; m++)
                        mma<typename S::T>(rows.out[m][2 * j + half], weights[m][first / 16 + step], b[step][half]);
        }
}

// Applies what changes logits, and turns them into weights. `partly`: some key is masked for some row.
template <class S>
DEVICE void weigh(float (&logits)[S::M][S::KEYS / 8][4], Rows<S>& rows, const AttentionParameters& a,
                  const Queries& queries, int first_row, int first_key, bool partly, int lane, Shrink<S>& shrink) {
    if (is_biased<S>(a)) bias_logits<S>(logits, a, queries, first_row, first_key, opaque(lane));
    if (partly) mask_logits<S>(logits, a, queries, first_row, first_key, opaque(lane));
    float tops[S::M][2];
    find_tops<S>(logits, rows, tops);
    weigh_logits<S>(logits, rows, exponent_scale<S>(a), tops, shrink);
}

// One step: attention to KEYS keys, the first of which is `first_key`. `query`: as for multiply_keys. `partly`: as for
// weigh.
template <class S, class Query>
DEVICE void attend(Rows<S>& rows, Query query, const u8* keys, const u8* values, const AttentionParameters& a,
                   const Queries& queries, int first_row, int first_key, bool partly, int lane) {
    float logits[S::M][S::KEYS / 8][4];
    multiply_keys<S>(logits, query, keys, opaque(lane));
    Shrink<S> shrink;
    weigh<S>(logits, rows, a, queries, first_row, first_key, partly, lane, shrink);
    shrink_values<S>(rows, shrink);
    Weights<S> weights;
    pack_weights<S>(logits, weights);
    add_values<S>(rows, weights, values, opaque(lane));
}

// Merges parts of a softmax, for one element of a row: the maximum, the sum of weights and the weighted sum. The
// strides are those between parts.
struct Merged {
    float top = MINUS_INFINITY, sum = 0.0f, out = 0.0f;

    DEVICE Merged(const float2* sums, int sums_stride, const float* outs, i64 outs_stride, int parts) {
        for (int part = 0; part < parts; part++) top = fmaxf(top, sums[i64(part) * sums_stride].x);
        const float offset = top == MINUS_INFINITY ? 0.0f : top;
#pragma unroll 4
        for (int part = 0; part < parts; part++) {
            const float2 part_sum = sums[i64(part) * sums_stride];
            const float weight = exp2_approx(part_sum.x - offset);
            sum += weight * part_sum.y;
            out += weight * outs[part * outs_stride];
        }
    }
    // The row's output, with a sink's weight in the denominator.
    DEVICE float result(float sink) const {
        const float larger = fmaxf(top, sink);
        if (larger == MINUS_INFINITY) return 0.0f;
        const float weight = exp2_approx(top - larger);
        return out * weight / (sum * weight + exp2_approx(sink - larger));
    }
};

// A head's sink, as an exponent of 2; -inf without sinks.
template <class T> DEVICE float sink_exponent(const AttentionParameters& a, int head) {
    return a.sinks ? head_number<T>(a.sinks, a.sinks_are_float, head) * LOG2_E : MINUS_INFINITY;
}

// Tokens after the last request's are padding: sets their rows of `out`, of so many chunks, to 0. Does part `part` of `parts`.
template <int CHUNKS>
DEVICE void clear_padding(const AttentionParameters& a, int part, int parts, int thread, int threads) {
    const i64 row_chunks = i64(a.heads) * CHUNKS, end = a.tokens * row_chunks;
    uint4* out = static_cast<uint4*>(a.out);
    for (i64 i = __ldg(a.query_starts + a.requests) * row_chunks + i64(part) * threads + thread; i < end;
         i += i64(parts) * threads)
        out[i] = make_uint4(0, 0, 0, 0);
}
