// The common parts of the kernels of latents: which keys a block attends to.
#pragma once
#include "prefill.cuh"

constexpr int LEAST_KEYS = 256;  // of a part, so that merging stays cheap

struct Causal {
    static constexpr bool TWO_SIDED = false;
};

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
