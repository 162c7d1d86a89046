// The layout of K and V in a page. A page is the memory of one (block, KV head): block_size rows, one per token, each of
// head_dim elements, all contiguous. A row is divided into chunks of 16 bytes, which are permuted: chunk c of row r is
// stored in the place of chunk `swizzle(chunks, r, c)`.
//
// A page is copied to shared memory unchanged, with 16-byte or bulk copies. There the same chunk of eight consecutive
// rows, which one ldmatrix reads, is in eight different sets of banks, for every head size. `layout.py` is the same in
// PyTorch.
#pragma once

constexpr int CHUNK_BYTES = 16;

// The place of `chunk` in `row`, in rows of `chunks` chunks. Its own inverse: an exchange.
//
// Rows lie `chunks` apart, so eight rows start in 8 / p different sets of banks, p being the largest power of two,
// up to 8, that divides `chunks`; an exclusive or with the row's number separates the p rows of each set.
__device__ __forceinline__ constexpr int swizzle(int chunks, int row, int chunk) {
    const int power = chunks & -chunks;
    const int p = power > 8 ? 8 : power;
    return (chunk & -p) + (chunk & (p - 1) ^ row / (8 / p) & (p - 1));  // few distinct offsets per row
}
