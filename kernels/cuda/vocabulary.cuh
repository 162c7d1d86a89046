// The common parts of the kernels over [rows, vocabulary]: slices of a row, the order of tokens, their masses, and exact
// selection by sums of integers.
//
// A grid is (slices, rows): a block processes one slice of one row, and the last block of a row to finish continues with
// the work that needs the whole row. All sums are of integers, so no result depends on the order of blocks or threads.
// workers/sample/fixed_point.py defines masses (fixed-point probabilities), depths, bins, and every result.
#pragma once

#include "exact.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int BLOCKS = 4;        // minimum blocks at once on a multiprocessor: 64 registers
constexpr int SLICE = 4096;      // logits per block
constexpr int MAX_SLICES = 64;   // per row: the masses of 2^18 tokens cannot overflow
constexpr int CANDIDATES = 4096; // room of a row's list; a row with more candidates is read again
constexpr int FRACTION_BITS = 44;
constexpr int BIN_SHIFT = 17, FIRST_BIN = (127 - 12) << 6, NUM_BINS = 18 << 6;
constexpr int BINS_PER_THREAD = (NUM_BINS + THREADS - 1) / THREADS;
constexpr u32 MINUS_INFINITY = 0xff800000u, INFINITE = 0x7f800000u, LARGEST_FLOAT = 0x7f7fffffu;
constexpr u64 NO_LIMIT = ~0ull;

// The state of a row, which its blocks and kernels pass on.
struct RowState {
    u64 k_before;  // mass before k_bin
    u64 k_need;    // number of tokens of k_bin that belong to the k most likely
    float peak;    // the largest logit after edits
    int k_bin;     // the bin in which the k most likely end
    int first_bin, last_bin;  // top_p ends in one of these
    int narrowed;  // 1 if choose_tokens must still sample the row
    u32 num_candidates;
    u32 ticket;
    float draft;   // the logit of the row's draft after edits
};

// ---------------------------------------------------------------- the order of tokens

// A key that rises with x, equal for -0 and +0; undefined for NaN.
DEVICE u32 rising(float x) {
    u32 bits = __float_as_uint(x);
    if (bits == 0x80000000u) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float from_rising(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// A key for the order of tokens: most likely first, ties by lower id.
DEVICE u64 order_of(float x, u32 id) { return u64(~rising(x)) << 32 | id; }
DEVICE float logit_of(u64 order) { return from_rising(~u32(order >> 32)); }
DEVICE u32 id_of(u64 order) { return u32(order); }

// ---------------------------------------------------------------- masses

DEVICE float depth_below(float peak, float x, float temperature) {
    return divide_exact(subtract_exact(peak, x), temperature);
}

DEVICE int bin_of(float depth) {
    const int bin = int(__float_as_uint(depth) >> BIN_SHIFT) - FIRST_BIN;
    return bin < 0 ? 0 : bin < NUM_BINS ? bin : NUM_BINS - 1;
}

// exp(-depth) * 2^44, rounded down: as `Kernels.fixed_point_probabilities` defines it.
DEVICE u64 mass_of(float depth) {
    if (!(depth < 32.0f)) return 0;
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float n = subtract_exact(add_exact(multiply_exact(depth, 1.44269504f), MAGIC), MAGIC);
    const float r = add_exact(subtract_exact(multiply_exact(n, 0.693359375f), depth), multiply_exact(n, -2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = add_exact(multiply_exact(p, r), 1.3981999507e-3f);
    p = add_exact(multiply_exact(p, r), 8.3334519073e-3f);
    p = add_exact(multiply_exact(p, r), 4.1665795894e-2f);
    p = add_exact(multiply_exact(p, r), 1.6666665459e-1f);
    p = add_exact(multiply_exact(p, r), 5.0000001201e-1f);
    p = add_exact(add_exact(multiply_exact(p, multiply_exact(r, r)), r), 1.0f);
    return u64(multiply_exact(p, __uint_as_float(u32(127 + FRACTION_BITS - int(n)) << 23)));
}

// ---------------------------------------------------------------- the block

struct Scratch {
    u64 warps[WARPS];
    u64 digits[THREADS];
    u64 before;
    int place;
    bool last;
};

struct Sum { DEVICE static u64 of(u64 a, u64 b) { return a + b; } };
struct Least { DEVICE static u64 of(u64 a, u64 b) { return a < b ? a : b; } };
struct Most { DEVICE static u64 of(u64 a, u64 b) { return a < b ? b : a; } };

// Combines the values of all threads; every thread gets the result.
template <class Combine>
DEVICE u64 reduce_block(u64 value, Scratch& scratch) {
#pragma unroll
    for (int bits = 16; bits; bits /= 2) value = Combine::of(value, __shfl_xor_sync(ALL_LANES, value, bits));
    __syncthreads();  // the last reduction has been read
    if (threadIdx.x % 32 == 0) scratch.warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch.warps[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) value = Combine::of(value, scratch.warps[warp]);
    return value;
}

// The sum of the values of all threads before this one.
DEVICE u64 sum_before(u64 value, Scratch& scratch) {
    u64 reached = value;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, reached, by);
        if (threadIdx.x % 32 >= by) reached += other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) scratch.warps[threadIdx.x / 32] = reached;
    __syncthreads();
    u64 before = reached - value;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        if (warp < threadIdx.x / 32) before += scratch.warps[warp];
    return before;
}

// True in the last of `count` blocks to come here, which then sees what the others wrote to memory before.
DEVICE bool comes_last(u32* ticket, u32 count, Scratch& scratch) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) scratch.last = atomicInc(ticket, count - 1) == count - 1;
    __syncthreads();
    __threadfence();
    return scratch.last;
}

// Adds to a sum in shared memory, where atomic additions of 32 bits are native and those of 64 bits are retry loops. The
// thread whose addition overflows the lower half carries; most masses are small and need no second addition.
DEVICE void add_shared(u64* sum, u64 value) {
    u32* halves = reinterpret_cast<u32*>(sum);
    const u32 low = u32(value), old = atomicAdd(halves, low);
    const u32 high = u32(value >> 32) + (old + low < old);
    if (high) atomicAdd(halves + 1, high);
}

// ---------------------------------------------------------------- slices of a row

struct Slice {
    float x[SLICE];
    u32 allowed[SLICE / 32];
};

DEVICE int slice_size(int slice, int vocab_size) { return min(SLICE, vocab_size - slice * SLICE); }

// Loads `size` logits. Complete after a barrier.
template <class T>
DEVICE void load_slice(const T* from, int size, float* x) {
    constexpr int WIDTH = 16 / sizeof(T), TURNS = SLICE / THREADS / WIDTH;
    int whole = 0;
    if (reinterpret_cast<u64>(from) % 16 == 0) {
        whole = size / WIDTH * WIDTH;
#pragma unroll TURNS
        for (int i = threadIdx.x * WIDTH; i < whole; i += THREADS * WIDTH) {
            const uint4 words = *reinterpret_cast<const uint4*>(from + i);
            const u32 four[4] = {words.x, words.y, words.z, words.w};
            float values[WIDTH];
            if constexpr (sizeof(T) == 4) {
#pragma unroll
                for (int k = 0; k < 4; k++) values[k] = __uint_as_float(four[k]);
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    values[2 * k] = to_float(T{u16(four[k])});
                    values[2 * k + 1] = to_float(T{u16(four[k] >> 16)});
                }
            }
#pragma unroll
            for (int k = 0; k < WIDTH; k += 4)
                *reinterpret_cast<float4*>(x + i + k) = make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
        }
    }
#pragma unroll 1
    for (int i = whole + threadIdx.x; i < size; i += THREADS) x[i] = to_float(from[i]);
}

// ---------------------------------------------------------------- histograms

// The bin in which the sum over bins reaches `need`, at least 1 and at most the sum of all, into scratch.place; the
// sum before it into scratch.before.
template <class Count>
DEVICE void find_bin(const Count* bins, u64 need, Scratch& scratch) {
    const int first = threadIdx.x * BINS_PER_THREAD;
    u64 sum = 0;
#pragma unroll 1
    for (int bin = first; bin < min(first + BINS_PER_THREAD, NUM_BINS); bin++) sum += __ldcg(bins + bin);
    u64 reached = sum_before(sum, scratch);
    if (reached < need && need <= reached + sum) {
        int bin = first;
        for (u64 next; (next = reached + __ldcg(bins + bin)) < need; bin++) reached = next;
        scratch.place = bin;
        scratch.before = reached;
    }
    __syncthreads();
}

template <class Count>
DEVICE u64 sum_bins(const Count* bins, Scratch& scratch) {
    u64 sum = 0;
#pragma unroll 1
    for (int bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) sum += __ldcg(bins + bin);
    return reduce_block<Sum>(sum, scratch);
}

// Adds a block's histogram to the row's.
template <class Count>
DEVICE void add_bins(const Count* from, Count* to) {
#pragma unroll 1
    for (int bin = threadIdx.x; bin < NUM_BINS; bin += THREADS)
        if (from[bin]) atomicAdd(to + bin, from[bin]);
}

template <class Count>
DEVICE void clear_bins(Count* bins) {
#pragma unroll 1
    for (int bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) bins[bin] = 0;
}

// ---------------------------------------------------------------- selection

// The keys between low and high: first their least and largest key are found, then sums of weights by digit.
struct Range {
    u64 low = 0, high = NO_LIMIT;
    u64 least, most;
    u64* digits;  // null while least and most are searched
    int shift;

    DEVICE void take(u64 key, u64 weight) {
        if (!weight || key < low || key > high) return;
        if (digits) {
            add_shared(&digits[(key - low) >> shift], weight);
        } else {
            least = Least::of(least, key);
            most = Most::of(most, key);
        }
    }
};

// The least key up to which the weights of all keys sum to `need`, at least 1 and at most the sum of all.
//
// visit(range) calls range.take(key, weight) once for every key, all different, spread over the block's threads. Radix
// selection: each round finds the least and the largest key that are still possible, divides the keys between them into
// 256 digits, and keeps one digit.
template <class Visit>
DEVICE u64 select(u64 need, Scratch& scratch, const Visit& visit) {
    Range range;
    range.digits = nullptr;
    for (;;) {
        range.least = NO_LIMIT, range.most = 0;
        visit(range);
        if (range.digits) {
            __syncthreads();
            const u64 sum = scratch.digits[threadIdx.x], before = sum_before(sum, scratch);
            if (before < need && need <= before + sum) scratch.place = threadIdx.x, scratch.before = before;
            __syncthreads();
            need -= scratch.before;
            range.low += u64(scratch.place) << range.shift;
            range.high = Least::of(range.high, range.low + ((1ull << range.shift) - 1));
            range.digits = nullptr;
        } else {
            range.low = reduce_block<Least>(range.least, scratch);
            range.high = reduce_block<Most>(range.most, scratch);
            if (range.low >= range.high) return range.low;
            const int span = 64 - __clzll(range.high - range.low);
            range.shift = span > 8 ? span - 8 : 0;
            range.digits = scratch.digits;
            range.digits[threadIdx.x] = 0;
            if (threadIdx.x == 0) scratch.place = THREADS - 1, scratch.before = 0;
            __syncthreads();
        }
    }
}
