// How a page keeps K and V. A page is what one (block, KV head) holds: block_size rows, one per token, each of
// head_dim elements, all contiguous. A row is cut into chunks of 16 bytes, and the chunks of a row trade places:
// chunk c of row r lies where chunk `swizzle(chunks, r, c)` would lie.
//
// So a page is copied to shared memory as it is, with 16-byte or bulk copies, and there the same chunk of eight
// consecutive rows (what ldmatrix reads at once) falls into eight different sets of banks, whatever the head size.
// `layout.py` is the same in PyTorch.
#pragma once

constexpr int CHUNK_BYTES = 16;

// The place of `chunk` in `row`, where rows have `chunks` of them. Its own inverse: an exchange.
//
// Rows lie `chunks` apart, so eight rows start in 8 / p different sets of banks, p being the largest power of two,
// up to 8, in `chunks`; p rows that start in the same set are told apart by an exclusive or with their number.
__device__ __forceinline__ constexpr int swizzle(int chunks, int row, int chunk) {
    const int power = chunks & -chunks;
    const int p = power > 8 ? 8 : power;
    return (chunk & -p) + (chunk & (p - 1) ^ row / (8 / p) & (p - 1));  // few different numbers for all of a row
}
