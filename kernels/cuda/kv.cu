// What follows the QKV product: norm of each head, rotation, and the write of keys and values into their pages.
#include "chunk.cuh"
#include "layout.cuh"

struct WriteKv {
    void* q;                // [T, num_heads, size], normed and rotated in place
    const void* k;          // [T, num_kv_heads, size]
    const void* v;          // [T, num_kv_heads, v_size]
    const void* cos;        // [T, rotated]; not read if rotated is 0
    const void* sin;
    const void* q_weight;   // [size]; null: heads are not normed
    const void* k_weight;
    void* k_cache;          // [num_blocks, num_kv_heads, block_size, size]
    void* v_cache;          // [num_blocks, num_kv_heads, block_size, v_size]
    const i64* slots;       // [T]: block * block_size + row; a negative one writes nothing
    i64 q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;  // elements
    i64 cos_stride, sin_stride;
    int num_tokens, num_heads, num_kv_heads, size, v_size, rotated, block_size;
    float eps, q_offset, k_offset;
};

constexpr int WARPS = 4;
constexpr int PAIRS = 4;     // of elements that a lane holds: lane l has the pairs l, l + 32 and so on
constexpr int LARGEST = 64 * PAIRS;

template <class T>
DEVICE void load_head(float2 pairs[PAIRS], const T* source, int size, int lane) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int pair = lane + 32 * i;
        pairs[i] = 2 * pair < size ? unpack<T>(reinterpret_cast<const u32*>(source)[pair]) : make_float2(0, 0);
    }
}

// As norms.cu does it.
template <class T>
DEVICE void norm_head(float2 pairs[PAIRS], const T* weights, int size, float eps, float offset, int lane) {
    float squares = 0.0f;
    float2 weight[PAIRS];
    load_head(weight, weights, size, lane);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) squares += pairs[i].x * pairs[i].x + pairs[i].y * pairs[i].y;
    const float scale = rsqrtf(sum_lanes(squares) / float(size) + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        pairs[i].x = rounded<T>(normed<T>(pairs[i].x, scale, weight[i].x, offset));
        pairs[i].y = rounded<T>(normed<T>(pairs[i].y, scale, weight[i].y, offset));
    }
}

// x cos + turned sin, both products and the sum rounded, as PyTorch does.
template <class T>
DEVICE float turn(float x, float turned, T cos, T sin) {
    return rounded<T>(rounded<T>(x * to_float(cos)) + rounded<T>(turned * to_float(sin)));
}

// Element e of the first `rotated` turns with its partner, half of them away.
template <class T>
DEVICE void rotate_head(float2 pairs[PAIRS], const T* cos, const T* sin, int rotated, int lane, float* shared) {
    const int half = rotated / 2;
    auto partner = [&](int e) { return e < half ? -shared[e + half] : shared[e - half]; };
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int e = 2 * (lane + 32 * i);
        shared[e] = pairs[i].x;
        shared[e + 1] = pairs[i].y;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int e = 2 * (lane + 32 * i);
        if (e >= rotated) continue;
        pairs[i].x = turn(pairs[i].x, partner(e), cos[e], sin[e]);
        pairs[i].y = turn(pairs[i].y, partner(e + 1), cos[e + 1], sin[e + 1]);
    }
}

template <class C>
DEVICE void store_pair(u8* target, float2 pair) {
    if constexpr (is_fp8<C>)
        *reinterpret_cast<u16*>(target) = u16(from_float<C>(pair.x).bits | from_float<C>(pair.y).bits << 8);
    else
        *reinterpret_cast<u32*>(target) = pack<C>(pair.x, pair.y);
}

// A row of a page, its chunks in the places that the layout gives them.
template <class C>
DEVICE void store_row(void* cache, i64 page, int row, int block_size, int size, const float2 pairs[PAIRS], int lane) {
    const int row_bytes = size * int(sizeof(C)), chunks = row_bytes / CHUNK_BYTES;
    u8* target = static_cast<u8*>(cache) + (page * block_size + row) * row_bytes;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int e = 2 * (lane + 32 * i), byte = e * int(sizeof(C));
        if (e >= size) continue;
        const int place = swizzle(chunks, row, byte / CHUNK_BYTES);
        store_pair<C>(target + place * CHUNK_BYTES + byte % CHUNK_BYTES, pairs[i]);
    }
}

// One warp per head of a token: its query heads, then its keys, then its values.
template <class T, class C>
__global__ void __launch_bounds__(32 * WARPS) write_kv(const __grid_constant__ WriteKv p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.num_heads + 2 * p.num_kv_heads;
    const i64 item = i64(blockIdx.x) * WARPS + warp;
    if (item >= i64(p.num_tokens) * heads) return;
    const int token = int(item / heads), head = int(item % heads), kv_head = (head - p.num_heads) % p.num_kv_heads;
    const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
    const i64 slot = p.slots[token];
    if (!is_query && slot < 0) return;
    const i64 page = slot / p.block_size * p.num_kv_heads + kv_head;
    const int row = int(slot % p.block_size);
    float2 pairs[PAIRS];
    if (is_value) {
        load_head(pairs, static_cast<const T*>(p.v) + token * p.v_token_stride + kv_head * p.v_head_stride, p.v_size, lane);
        store_row<C>(p.v_cache, page, row, p.block_size, p.v_size, pairs, lane);
        return;
    }
    T* q = static_cast<T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
    const T* k = static_cast<const T*>(p.k) + token * p.k_token_stride + kv_head * p.k_head_stride;
    load_head(pairs, is_query ? q : k, p.size, lane);
    if (p.q_weight != nullptr) {
        const T* weight = static_cast<const T*>(is_query ? p.q_weight : p.k_weight);
        norm_head(pairs, weight, p.size, p.eps, is_query ? p.q_offset : p.k_offset, lane);
    }
    if (p.rotated > 0) {
        float* shared = reinterpret_cast<float*>(shared_memory()) + warp * LARGEST;
        const T* cos = static_cast<const T*>(p.cos) + token * p.cos_stride;
        const T* sin = static_cast<const T*>(p.sin) + token * p.sin_stride;
        rotate_head(pairs, cos, sin, p.rotated, lane, shared);
    }
    if (!is_query) {
        store_row<C>(p.k_cache, page, row, p.block_size, p.size, pairs, lane);
        return;
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if (2 * (lane + 32 * i) < p.size) reinterpret_cast<u32*>(q)[lane + 32 * i] = pack<T>(pairs[i].x, pairs[i].y);
}
