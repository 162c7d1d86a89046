// The work after the QKV product: norm of each head, rotation, and the write of keys and values into their pages.
#include "chunk.cuh"
#include "layout.cuh"

struct WriteKv {
    void* q;                // [T, num_heads, size], normed and rotated in place
    const void* k;          // [T, num_kv_heads, size]
    const void* v;          // [T, num_kv_heads, v_size]
    const void* cos;        // [T, rotated], rotated a multiple of 16; not read if it is 0
    const void* sin;
    const void* q_weight;   // [size]; null: heads are not normed
    const void* k_weight;
    void* k_cache;          // [num_blocks, num_kv_heads, block_size, size]
    void* v_cache;          // [num_blocks, num_kv_heads, block_size, v_size]
    const i64* slots;       // [T]: block * block_size + row; a negative one writes nothing
    i64 q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;  // elements
    i64 cos_stride, sin_stride;
    int num_tokens, num_heads, num_kv_heads, size, v_size, rotated, block_size;
    int lanes;              // lanes per head, each with a chunk of 8 elements: 4, 8, 16 or 32
    float eps, q_offset, k_offset;
    float k_factor, v_factor;  // of keys and values that become 8-bit floats
};

constexpr int WARPS = 4;

DEVICE uint4 shuffle(uint4 chunk, int lane) {
    return make_uint4(__shfl_sync(ALL_LANES, chunk.x, lane), __shfl_sync(ALL_LANES, chunk.y, lane),
                      __shfl_sync(ALL_LANES, chunk.z, lane), __shfl_sync(ALL_LANES, chunk.w, lane));
}

// x cos + turned sin, both products and the sum rounded, as in PyTorch.
template <class T>
DEVICE u32 turn(u32 x, u32 turned, float sign, u32 cos, u32 sin) {
    const float2 a = unpack<T>(x), b = unpack<T>(turned), c = unpack<T>(cos), s = unpack<T>(sin);
    return pack<T>(rounded<T>(a.x * c.x) + rounded<T>(sign * b.x * s.x),
                   rounded<T>(a.y * c.y) + rounded<T>(sign * b.y * s.y));
}

template <class T>
DEVICE uint4 turn(uint4 x, uint4 turned, float sign, uint4 cos, uint4 sin) {
    return make_uint4(turn<T>(x.x, turned.x, sign, cos.x, sin.x), turn<T>(x.y, turned.y, sign, cos.y, sin.y),
                      turn<T>(x.z, turned.z, sign, cos.z, sin.z), turn<T>(x.w, turned.w, sign, cos.w, sin.w));
}

template <class T, class F8>
DEVICE u32 narrow(u32 first, u32 second, float factor) {
    const float2 a = unpack<T>(first), b = unpack<T>(second);
    return from_float<F8>(a.x * factor).bits | u32(from_float<F8>(a.y * factor).bits) << 8 |
           u32(from_float<F8>(b.x * factor).bits) << 16 | u32(from_float<F8>(b.y * factor).bits) << 24;
}

// Stores eight elements of a row of a page, at their place in the layout; times `factor` if they become 8-bit floats.
template <class T, class C>
DEVICE void store_chunk(void* cache, i64 page_row, int row, int size, int chunk, uint4 held, float factor) {
    const int row_bytes = size * int(sizeof(C)), chunks = row_bytes / CHUNK_BYTES;
    u8* target = static_cast<u8*>(cache) + page_row * row_bytes;
    if constexpr (is_fp8<C>) {
        target += swizzle(chunks, row, chunk / 2) * CHUNK_BYTES + chunk % 2 * 8;
        *reinterpret_cast<uint2*>(target) =
            make_uint2(narrow<T, C>(held.x, held.y, factor), narrow<T, C>(held.z, held.w, factor));
    } else {
        *reinterpret_cast<uint4*>(target + swizzle(chunks, row, chunk) * CHUNK_BYTES) = held;
    }
}

// `lanes` lanes per head of a token: its query heads, then its keys, then its values. All lanes of a warp take part in
// the shuffles, also those without a head.
template <class T, class C>
__global__ void __launch_bounds__(32 * WARPS) write_kv(const __grid_constant__ WriteKv p) {
    const int lane = threadIdx.x % 32, chunk = lane % p.lanes, heads = p.num_heads + 2 * p.num_kv_heads;
    const i64 item = (i64(blockIdx.x) * WARPS * 32 + threadIdx.x) / p.lanes;
    const bool in_range = item < i64(p.num_tokens) * heads;
    const int token = in_range ? int(item / heads) : 0, head = in_range ? int(item % heads) : 0;
    const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
    const int kv_head = is_query ? 0 : (head - p.num_heads) % p.num_kv_heads, size = is_value ? p.v_size : p.size;
    const i64 slot = p.slots[token];
    const bool active = in_range && chunk < size / 8 && (is_query || slot >= 0);

    T* q = static_cast<T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
    const T* k = static_cast<const T*>(p.k) + token * p.k_token_stride + kv_head * p.k_head_stride;
    const T* v = static_cast<const T*>(p.v) + token * p.v_token_stride + kv_head * p.v_head_stride;
    const uint4* source = reinterpret_cast<const uint4*>(is_query ? q : is_value ? v : k);
    uint4 held = make_uint4(0, 0, 0, 0);
    if (active) held = source[chunk];

    if (p.q_weight != nullptr) {
        float squares = sum_of_squares<T>(held);
        for (int bits = p.lanes / 2; bits; bits /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, bits);
        if (active && !is_value) {
            const uint4 weight = static_cast<const uint4*>(is_query ? p.q_weight : p.k_weight)[chunk];
            held = scaled<T>(held, rsqrtf(squares / float(size) + p.eps), weight, is_query ? p.q_offset : p.k_offset);
        }
    }
    if (p.rotated > 0) {
        const int half = p.rotated / 16;  // in chunks
        const uint4 turned = shuffle(held, chunk < half ? lane + half : lane - half);
        if (active && !is_value && chunk < 2 * half) {
            const T* cos = static_cast<const T*>(p.cos) + token * p.cos_stride;
            const T* sin = static_cast<const T*>(p.sin) + token * p.sin_stride;
            held = turn<T>(held, turned, chunk < half ? -1.0f : 1.0f, reinterpret_cast<const uint4*>(cos)[chunk],
                           reinterpret_cast<const uint4*>(sin)[chunk]);
        }
    }
    if (!active) return;
    if (is_query) {
        reinterpret_cast<uint4*>(q)[chunk] = held;
        return;
    }
    const int row = int(slot % p.block_size);
    const i64 page_row = (slot / p.block_size * p.num_kv_heads + kv_head) * p.block_size + row;
    store_chunk<T, C>(is_value ? p.v_cache : p.k_cache, page_row, row, size, chunk, held,
                      is_value ? p.v_factor : p.k_factor);
}

struct WriteLatents {
    const void* rows;   // [T, 1, size]
    void* cache;        // [num_blocks, 1, block_size, size]
    const i64* slots;   // [T]: block * block_size + row; a negative one writes nothing
    i64 token_stride;   // elements
    int num_tokens, size, block_size;
};

// A thread for each chunk of 8 elements. With one KV head, a slot is a row of the cache.
template <class T>
__global__ void __launch_bounds__(32 * WARPS) write_latents(const __grid_constant__ WriteLatents p) {
    const i64 item = i64(blockIdx.x) * WARPS * 32 + threadIdx.x;
    const int chunks = p.size / 8, token = int(item / chunks), chunk = int(item % chunks);
    if (token >= p.num_tokens || p.slots[token] < 0) return;
    const i64 slot = p.slots[token];
    const T* row = static_cast<const T*>(p.rows) + token * p.token_stride;
    const uint4 held = reinterpret_cast<const uint4*>(row)[chunk];
    store_chunk<T, T>(p.cache, slot, slot % p.block_size, p.size, chunk, held, 1.0f);
}
