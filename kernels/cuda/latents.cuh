// The common parts of the kernels of latents: which keys a block attends to.
#pragma once
#include "prefill.cuh"

constexpr int LEAST_KEYS = 256;  // of a part, so that merging stays cheap

// The parts of the keys of a tile.
template <int KEYS>
struct Parts {
    int begin, end;  // keys that some row attends to
    int first;       // of the first step: a multiple of KEYS
    int share, used; // keys of a part, and parts that have some

    DEVICE Parts(const AttentionParameters& a, const Queries& queries, int first_row, int rows) {
        end = queries.position_of(min(first_row + rows, queries.rows) - 1) + 1;
        begin = max(queries.position_of(first_row) - a.window + 1, 0);
        first = begin / KEYS * KEYS;
        const int even_share = (end - first + a.splits - 1) / a.splits;
        share = max((even_share + KEYS - 1) / KEYS * KEYS, LEAST_KEYS);
        used = (end - first + share - 1) / share;
    }
};
