// The common parts of the kernels of latents: which rows a block computes, and which keys it attends to.
#pragma once
#include "prefill.cuh"

constexpr int LEAST_KEYS = 256;  // of a part, so that merging stays cheap

struct Causal {
    static constexpr bool TWO_SIDED = false;
};

// The number of its chosen keys that the query at `position` of a token sees: those up to its own, which come first, for
// the list is ascending. As no key stands in it twice, they are at most `position` + 1: as a rule just as many.
DEVICE int chosen_keys(const AttentionParameters& a, int token, int position) {
    const int* const chosen = a.chosen + i64(token) * a.num_chosen;
    int low = 0, high = min(position + 1, a.num_chosen);
    if (high <= 0 || __ldg(chosen + high - 1) <= position) return high;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (__ldg(chosen + middle) <= position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The queries that a tile belongs to. first_row: of the tile, as the tiles of its request count it.
//
// CHOSEN: they are those of one token. The keys of its list are numbered from 0 on, and the token stands at the last one
// that it sees; `first_row` becomes that of the tile among the token's own.
template <int ROWS, bool CHOSEN>
DEVICE Queries queries_of_tile(const AttentionParameters& a, int request, int& first_row) {
    Queries queries(a, request, 0);
    if constexpr (CHOSEN) {
        const int tiles = (queries.group + ROWS - 1) / ROWS, number = first_row / ROWS;
        const int token = queries.start + number / tiles;
        queries.length = chosen_keys(a, token, queries.position_of(number / tiles * queries.group));
        queries.position = queries.length - 1;
        queries.start = token;
        queries.rows = queries.group;
        first_row = number % tiles * ROWS;
    }
    return queries;
}

// The place in the cache of chosen key `number` of a token, in rows of all blocks; -1 from `end` on.
DEVICE int find_chosen(const AttentionParameters& a, const Queries& queries, int number, int end) {
    if (number >= end) return -1;
    const int position = __ldg(a.chosen + i64(queries.start) * a.num_chosen + number);
    const int block = __ldg(a.block_table + i64(queries.request) * a.table_width + (position >> a.block_shift));
    return (block << a.block_shift) + (position & ((1 << a.block_shift) - 1));
}

// A warp copies rows of the cache to those of a tile from `first_row` on: to row i that of the place which lane i has, and
// zeros where it is -1.
template <class S, int ROWS>
DEVICE void copy_chosen(u8* target, int first_row, const u8* cache, int place, int lane) {
#pragma unroll
    for (int i = 0; i < ROWS * S::CHUNKS; i += 32) {
        const int row = (i + lane) / S::CHUNKS, chunk = (i + lane) % S::CHUNKS, to = first_row + row;
        const int from = __shfl_sync(ALL_LANES, place, row);
        if (i + 32 <= ROWS * S::CHUNKS || row < ROWS)
            copy_async_16(target + (to * S::CHUNKS + swizzle(S::CHUNKS, to, chunk)) * CHUNK_BYTES,
                          cache + (i64(max(from, 0)) * S::CHUNKS + swizzle(S::CHUNKS, from, chunk)) * CHUNK_BYTES,
                          from >= 0);
    }
}

// The parts of the keys of a tile.
template <int KEYS>
struct Parts {
    KeyRange keys;    // of the tile's rows
    int first;        // of the first step: a multiple of KEYS
    int share, used;  // keys of a part, and parts that have some

    DEVICE Parts(const AttentionParameters& a, const Queries& queries, int first_row, int rows)
        : keys(key_range<Causal>(a, queries, first_row, rows)), first(keys.begin / KEYS * KEYS) {
        const int even_share = (keys.end - first + a.splits - 1) / a.splits;
        share = max((even_share + KEYS - 1) / KEYS * KEYS, LEAST_KEYS);
        used = (keys.end - first + share - 1) / share;
    }
};
