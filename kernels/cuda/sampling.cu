// From logits to tokens, with the same bits as workers/sample/sampler.py on a CPU.
//
//     find_peaks        edits -> the largest logit; greedy tokens
//     add_masses        masses above min_p -> tokens of rows without top_k and top_p; for other rows histograms of
//                       depths, which give the bins where the k most likely tokens and the nucleus end
//     choose_tokens     single logits of those bins only -> tokens of rows with top_k or top_p
//
// A draw inverts the cumulative distribution of the remaining masses at one Philox number, a function of seed and
// position. Each kernel repeats the edits in shared memory: no copy of the logits is ever written. A draft that is likely
// enough among the remaining masses takes the place of the draw (workers/sample/typical.py).
#include "vocabulary.cuh"

// The parameters of one row, filled in by kernels/cuda/sampling.py. Lists of ids are parts of arrays that all rows share;
// ids outside the vocabulary have no effect.
struct SamplingRow {
    u64 seed, position;
    double top_p;     // 1: no limit
    u64 least_mass;   // the mass of min_p, at least 1
    i64 counts_start, biases_start, allowed_start, forbidden_start;
    int num_counts, num_biases;  // ids without repetition
    int num_allowed;             // -1: all are allowed
    int num_forbidden;
    int mask;           // row of the masks; -1: all are allowed
    int top_k;          // 0: no limit
    float temperature;  // 0: greedy
    float repetition, frequency, presence;
    int draft;          // counts without being drawn if it is typical; outside the vocabulary: there is none
    double posterior_threshold, posterior_alpha;  // of typical acceptance
};

struct SamplingCall {
    const void* logits;      // [rows, vocab_size], rows row_stride apart
    const SamplingRow* rows;
    const u32* masks;        // [any, mask_stride]: bit i % 32 of word i // 32 is set if token i is allowed
    const int* count_ids;
    const float* counts;     // number of times that each was generated; 0: it is only in the prompt
    const int* bias_ids;
    const float* biases;
    const int* allowed_ids;
    const int* forbidden_ids;
    i64* token_ids;          // [rows]
    int* statuses;           // [rows]
    float* peaks;            // [rows], the largest raw logit; without a token, the largest that the mask allows
    RowState* states;
    u64* slices;
    u32* bin_counts;
    u64* bin_masses;
    u64* candidates;
    i64 row_stride;
    i64 mask_stride;
    int vocab_size, num_slices;
};

enum Status { SAMPLED = 0, UNUSABLE_LOGITS = 1, NOTHING_LEFT = 2 };

// ---------------------------------------------------------------- edits

DEVICE bool has_edits(const SamplingRow& row) {
    return row.mask >= 0 || row.num_allowed >= 0 || row.num_counts || row.num_biases || row.num_forbidden;
}

// The row's mask from column `first` on, a multiple of 32; null for a row without a mask.
DEVICE const u32* mask_from(const SamplingCall& call, const SamplingRow& row, int first) {
    return row.mask >= 0 ? call.masks + row.mask * call.mask_stride + first / 32 : nullptr;
}

// Calls visit(i, column) for the ids of a list that are in this slice: i counts from the list's start.
template <class Visit>
DEVICE void visit_ids(const int* ids, int num_ids, int first, int size, const Visit& visit) {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_ids; i += THREADS)
        if (const u32 column = u32(ids[i]) - u32(first); column < u32(size)) visit(i, int(column));
}

// Sets the logits of tokens that are not allowed to -inf.
DEVICE void keep_allowed(const SamplingCall& call, const SamplingRow& row, int first, int size, Slice& slice) {
    const u32* mask = mask_from(call, row, first);
#pragma unroll 1
    for (int word = threadIdx.x; word < (size + 31) / 32; word += THREADS)
        slice.allowed[word] = row.num_allowed >= 0 ? 0 : mask[word];
    __syncthreads();
    if (row.num_allowed >= 0) {
        visit_ids(call.allowed_ids + row.allowed_start, row.num_allowed, first, size, [&](int, int column) {
            const u32 bit = 1u << column % 32;
            if (!mask || mask[column / 32] & bit) atomicOr(&slice.allowed[column / 32], bit);
        });
        __syncthreads();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS)
        if (!(slice.allowed[i / 32] >> i % 32 & 1)) slice.x[i] = __uint_as_float(MINUS_INFINITY);
    __syncthreads();
}

// Repetition penalty for prompt and output; frequency and presence penalty for output. An overflow stays finite.
DEVICE float penalised(float x, float times, const SamplingRow& row) {
    const bool negative = rising(x) < rising(0.0f);
    x = negative ? multiply_exact(x, row.repetition) : divide_exact(x, row.repetition);
    x = subtract_exact(x, multiply_exact(row.frequency, times));
    if (times > 0.0f) x = subtract_exact(x, row.presence);
    return x > __uint_as_float(LARGEST_FLOAT) ? __uint_as_float(LARGEST_FLOAT) : x;
}

// The edits in the order of workers/sample/logit_edits.py: allowed tokens, bias, penalties, forbidden tokens.
DEVICE void edit(const SamplingCall& call, const SamplingRow& row, int first, int size, Slice& slice) {
    if (row.mask >= 0 || row.num_allowed >= 0) keep_allowed(call, row, first, size, slice);
    if (row.num_biases) {
        const float* biases = call.biases + row.biases_start;
        visit_ids(call.bias_ids + row.biases_start, row.num_biases, first, size,
                  [&](int i, int column) { slice.x[column] = add_exact(slice.x[column], biases[i]); });
        __syncthreads();
    }
    if (row.num_counts) {
        const float* counts = call.counts + row.counts_start;
        visit_ids(call.count_ids + row.counts_start, row.num_counts, first, size,
                  [&](int i, int column) { slice.x[column] = penalised(slice.x[column], counts[i], row); });
        __syncthreads();
    }
    if (row.num_forbidden) {
        visit_ids(call.forbidden_ids + row.forbidden_start, row.num_forbidden, first, size,
                  [&](int, int column) { slice.x[column] = __uint_as_float(MINUS_INFINITY); });
        __syncthreads();
    }
}

// Loads a slice's raw logits. Complete on return; the slice must not be in use.
template <class T>
DEVICE int load_raw(const SamplingCall& call, int number, Slice& slice) {
    const int size = slice_size(number, call.vocab_size);
    load_slice(static_cast<const T*>(call.logits) + blockIdx.y * call.row_stride + number * SLICE, size, slice.x);
    __syncthreads();
    return size;
}

template <class T>
DEVICE int load_edited(const SamplingCall& call, const SamplingRow& row, int number, Slice& slice) {
    const int size = load_raw<T>(call, number, slice);
    edit(call, row, number * SLICE, size, slice);
    return size;
}

// ---------------------------------------------------------------- the largest logit

struct PeaksShared {
    Slice slice;
    Scratch scratch;
};

DEVICE u64 first_in_order(const Slice& slice, int first, int size) {
    u64 best = NO_LIMIT;
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) best = Least::of(best, order_of(slice.x[i], first + i));
    return best;
}

// Writes a row's status, peak and greedy token. best: first in the order of the edited logits. raw: the largest logit as
// a rising key, all ones if the row has a NaN. masked: the same over the tokens that the row's mask allows.
DEVICE void settle(const SamplingCall& call, const SamplingRow& row, u64 best, u32 raw, u32 masked) {
    const u32 none = rising(__uint_as_float(MINUS_INFINITY));
    const bool usable = masked < rising(__uint_as_float(INFINITE)) && (masked != none || row.mask >= 0);
    const bool possible = masked != none && logit_of(best) != __uint_as_float(MINUS_INFINITY);
    const int status = !usable ? UNUSABLE_LOGITS : !possible ? NOTHING_LEFT : SAMPLED;
    const u32 largest = status == SAMPLED ? raw : masked;
    RowState& state = call.states[blockIdx.y];
    state.peak = logit_of(best);
    state.narrowed = 0;
    call.statuses[blockIdx.y] = status;
    call.peaks[blockIdx.y] = largest == ~0u ? __uint_as_float(0x7fffffffu) : from_rising(largest);
    call.token_ids[blockIdx.y] = status == SAMPLED ? id_of(best) : 0;
}

template <class T>
__global__ void __launch_bounds__(THREADS, BLOCKS) find_peaks(const __grid_constant__ SamplingCall call) {
    PeaksShared& shared = *reinterpret_cast<PeaksShared*>(shared_memory());
    const SamplingRow& row = call.rows[blockIdx.y];
    const int first = blockIdx.x * SLICE, size = load_raw<T>(call, blockIdx.x, shared.slice);
    const u32* mask = mask_from(call, row, first);
    const u32 none = rising(__uint_as_float(MINUS_INFINITY));
    u32 raw = none, masked = none;
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const float x = shared.slice.x[i];
        const bool nan = (__float_as_uint(x) & 0x7fffffffu) > INFINITE;
        const u32 key = nan ? ~0u : rising(x);
        raw = max(raw, key);
        if (!mask || mask[i / 32] >> i % 32 & 1) masked = max(masked, key);
    }
    if (has_edits(row)) {
        __syncthreads();  // the raw logits have been read
        edit(call, row, first, size, shared.slice);
    }
    u64 best = reduce_block<Least>(first_in_order(shared.slice, first, size), shared.scratch);
    raw = u32(reduce_block<Most>(raw, shared.scratch));
    masked = u32(reduce_block<Most>(masked, shared.scratch));
    u64* slices = call.slices + u64(blockIdx.y) * MAX_SLICES * 2;
    if (threadIdx.x == 0) slices[2 * blockIdx.x] = best, slices[2 * blockIdx.x + 1] = u64(masked) << 32 | raw;
    if (!comes_last(&call.states[blockIdx.y].ticket, call.num_slices, shared.scratch)) return;
    const bool reads = threadIdx.x < call.num_slices;
    best = reduce_block<Least>(reads ? __ldcg(slices + 2 * threadIdx.x) : NO_LIMIT, shared.scratch);
    const u64 largest = reads ? __ldcg(slices + 2 * threadIdx.x + 1) : 0;
    raw = u32(reduce_block<Most>(u32(largest), shared.scratch));
    masked = u32(reduce_block<Most>(largest >> 32, shared.scratch));
    if (threadIdx.x == 0) settle(call, row, best, raw, masked);
}

// ---------------------------------------------------------------- the draw

// Philox4x32-10 of (position, stage 0) with the seed as key: an odd multiple of 2^-53, as an integer. See
// workers/sample/random.py.
DEVICE u64 random_fraction(u64 seed, u64 position) {
    u32 c0 = u32(position), c1 = u32(position >> 32), c2 = 0, c3 = 0;
    u32 k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 p0 = u64(0xD2511F53u) * c0, p1 = u64(0xCD9E8D57u) * c2;
        c0 = u32(p1 >> 32) ^ c1 ^ k0, c1 = u32(p1);
        c2 = u32(p0 >> 32) ^ c3 ^ k1, c3 = u32(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const u64 bits = u64(c0 >> 6) << 26 | c1 >> 6;
    return 2 * bits + 1;
}

// ---------------------------------------------------------------- typical acceptance

DEVICE bool has_draft(const SamplingCall& call, const SamplingRow& row) { return u32(row.draft) < u32(call.vocab_size); }

// What a token adds to the sum of which the mean depth is made.
DEVICE u64 weighted(float depth, u64 mass) { return u64(multiply_exact(depth, float(mass))); }

// True if the row's draft counts, among tokens up to `limit` in the order. total: of their masses. depths: of their
// weighted depths.
DEVICE bool is_typical(const SamplingCall& call, const SamplingRow& row, u64 limit, u64 total, u64 depths) {
    const RowState& state = call.states[blockIdx.y];
    const float x = __ldcg(&state.draft);
    const u64 mass = mass_of(depth_below(state.peak, x, row.temperature));
    if (mass < row.least_mass || order_of(x, row.draft) > limit) return false;
    const u64 at_mean = mass_of(divide_exact(float(depths), float(total)));
    return double(mass) >= multiply_exact(row.posterior_threshold, double(total)) ||
           double(mass) >= multiply_exact(row.posterior_alpha, double(at_mean));
}

// ---------------------------------------------------------------- the token

// The row's draft, if it is typical; else the first token by id whose cumulative mass exceeds the random fraction of the
// total, among those up to `limit` in the order. slices: the remaining mass of each slice, in shared memory. depths: a
// part of the sum of weighted depths, which the block's threads have together.
template <class T>
DEVICE void choose(const SamplingCall& call, const SamplingRow& row, u64 limit, const u64* slices, u64 depths,
                   Slice& slice, Scratch& scratch) {
    const u64 mass = threadIdx.x < call.num_slices ? slices[threadIdx.x] : 0;
    const u64 total = reduce_block<Sum>(mass, scratch);
    if (has_draft(call, row) && is_typical(call, row, limit, total, reduce_block<Sum>(depths, scratch))) {
        if (threadIdx.x == 0) call.token_ids[blockIdx.y] = row.draft;
        return;
    }
    const u64 before = sum_before(mass, scratch);
    const u64 fraction = random_fraction(row.seed, row.position);
    const u64 target = multiply_high(fraction << 11, total);  // of 53 bits
    if (before <= target && target < before + mass) scratch.place = threadIdx.x, scratch.before = before;
    __syncthreads();
    const int number = scratch.place;
    const u64 need = target - scratch.before + 1;
    const float peak = call.states[blockIdx.y].peak;
    const int first = number * SLICE, size = load_edited<T>(call, row, number, slice);
    const u64 token_id = select(need, scratch, [&](Range& range) {
#pragma unroll 1
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const u64 mass = mass_of(depth_below(peak, slice.x[i], row.temperature));
            if (mass >= row.least_mass && order_of(slice.x[i], first + i) <= limit) range.take(first + i, mass);
        }
    });
    if (threadIdx.x == 0) call.token_ids[blockIdx.y] = token_id;
}

// ---------------------------------------------------------------- masses

struct MassesShared {
    Slice slice;
    Scratch scratch;
    u64 slices[MAX_SLICES];
    u64 bin_masses[NUM_BINS];
    u32 bin_counts[NUM_BINS];
};

DEVICE bool limits_tokens(const SamplingRow& row, int vocab_size) { return row.top_k > 0 && row.top_k < vocab_size; }

// The part top_p of a total mass: at least 1, at most all.
DEVICE u64 nucleus(double top_p, u64 total) {
    const u64 mass = u64(round_up(multiply_exact(top_p, double(total))));
    return mass < 1 ? 1 : mass < total ? mass : total;
}

// Finds the bins where the k most likely tokens and the nucleus end. The mass of the k most likely tokens is not known
// yet, only the bin where they end: hence a first and a last bin for the nucleus, since a larger total never has a
// smaller nucleus.
DEVICE void find_ends(const SamplingCall& call, const SamplingRow& row, Scratch& scratch) {
    u32* counts = call.bin_counts + u64(blockIdx.y) * NUM_BINS;
    u64* masses = call.bin_masses + u64(blockIdx.y) * NUM_BINS;
    int k_bin = NUM_BINS;
    u64 k_need = 0, k_before = 0, least = 0, most = 0;
    if (limits_tokens(row, call.vocab_size)) {
        const u64 need = Least::of(row.top_k, sum_bins(counts, scratch));
        find_bin(counts, need, scratch);
        k_bin = scratch.place, k_need = need - scratch.before;
    }
    int first_bin = k_bin, last_bin = k_bin;
    if (row.top_p < 1.0) {
        u64 before = 0;
#pragma unroll 1
        for (int bin = threadIdx.x; bin < NUM_BINS; bin += THREADS)
            if (bin < k_bin) before += __ldcg(masses + bin);
        k_before = least = most = reduce_block<Sum>(before, scratch);
        if (k_bin < NUM_BINS) most += __ldcg(masses + k_bin);
        find_bin(masses, nucleus(row.top_p, Most::of(least, 1)), scratch);
        first_bin = min(scratch.place, k_bin);
        find_bin(masses, nucleus(row.top_p, most), scratch);
        last_bin = min(scratch.place, k_bin);
    }
    if (threadIdx.x == 0) {
        RowState& state = call.states[blockIdx.y];
        state.k_before = k_before, state.k_need = k_need, state.k_bin = k_bin;
        state.first_bin = first_bin, state.last_bin = last_bin;
        state.narrowed = 1;
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, BLOCKS) add_masses(const __grid_constant__ SamplingCall call) {
    MassesShared& shared = *reinterpret_cast<MassesShared*>(shared_memory());
    const SamplingRow& row = call.rows[blockIdx.y];
    if (row.temperature == 0.0f || call.statuses[blockIdx.y] != SAMPLED) return;
    const bool by_count = limits_tokens(row, call.vocab_size), by_mass = row.top_p < 1.0;
    const float peak = call.states[blockIdx.y].peak;
    if (by_count) clear_bins(shared.bin_counts);
    if (by_mass) clear_bins(shared.bin_masses);
    const int size = load_edited<T>(call, row, blockIdx.x, shared.slice);
    if (const u32 column = u32(row.draft) - blockIdx.x * SLICE; threadIdx.x == 0 && column < u32(size))
        call.states[blockIdx.y].draft = shared.slice.x[column];
    const bool weighs = has_draft(call, row);
    u64 sum = 0, depths = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const float depth = depth_below(peak, shared.slice.x[i], row.temperature);
        const u64 mass = mass_of(depth);
        if (mass < row.least_mass) continue;
        sum += mass;
        if (weighs) depths += weighted(depth, mass);
        if (by_count) atomicAdd(&shared.bin_counts[bin_of(depth)], 1u);
        if (by_mass) add_shared(&shared.bin_masses[bin_of(depth)], mass);
    }
    sum = reduce_block<Sum>(sum, shared.scratch);
    u64* slices = call.slices + u64(blockIdx.y) * MAX_SLICES * 2;
    u32* counts = call.bin_counts + u64(blockIdx.y) * NUM_BINS;
    u64* masses = call.bin_masses + u64(blockIdx.y) * NUM_BINS;
    if (weighs) depths = reduce_block<Sum>(depths, shared.scratch);
    if (threadIdx.x == 0) slices[2 * blockIdx.x] = sum, slices[2 * blockIdx.x + 1] = depths;
    if (by_count) add_bins(shared.bin_counts, counts);
    if (by_mass) add_bins(shared.bin_masses, masses);
    if (!comes_last(&call.states[blockIdx.y].ticket, call.num_slices, shared.scratch)) return;
    if (by_count || by_mass) {
        find_ends(call, row, shared.scratch);
        __syncthreads();  // the bins have been read
        if (by_count) clear_bins(counts);
    } else {
        const bool reads = threadIdx.x < call.num_slices;
        if (reads) shared.slices[threadIdx.x] = __ldcg(slices + 2 * threadIdx.x);
        __syncthreads();
        depths = reads ? __ldcg(slices + 2 * threadIdx.x + 1) : 0;
        choose<T>(call, row, NO_LIMIT, shared.slices, depths, shared.slice, shared.scratch);
    }
}

// ---------------------------------------------------------------- top_k and top_p

struct ChooseShared {
    Slice slice;
    Scratch scratch;
    RowState ends;
    u64 slices[MAX_SLICES];
};

// True if a token of this bin may be the last of the k most likely tokens or of the nucleus.
DEVICE bool is_candidate(const RowState& state, int bin) {
    return bin == state.k_bin || (state.first_bin <= bin && bin <= state.last_bin);
}

// Calls visit(order, bin, mass) for every candidate, spread over the block's threads: from the list, or if it was too
// short, from the row's logits.
template <class T, class Visit>
DEVICE void visit_candidates(const SamplingCall& call, const SamplingRow& row, const RowState& state, Slice& slice,
                             const Visit& visit) {
    const auto look = [&](u64 order) {
        const float depth = depth_below(state.peak, logit_of(order), row.temperature);
        const u64 mass = mass_of(depth);
        if (mass >= row.least_mass && is_candidate(state, bin_of(depth))) visit(order, bin_of(depth), mass);
    };
    const u64* list = call.candidates + u64(blockIdx.y) * CANDIDATES;
    const bool listed = state.num_candidates <= CANDIDATES;
#pragma unroll 1
    for (int number = 0; number < (listed ? 1 : call.num_slices); number++) {
        int size = state.num_candidates;
        if (!listed) {
            __syncthreads();  // the last slice has been read
            size = load_edited<T>(call, row, number, slice);
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < size; i += THREADS)
            look(listed ? __ldcg(list + i) : order_of(slice.x[i], number * SLICE + i));
    }
}

// The last token, in the order, within top_k and top_p.
template <class T>
DEVICE u64 find_limit(const SamplingCall& call, const SamplingRow& row, const RowState& state, Slice& slice,
                      Scratch& scratch) {
    const u64* masses = call.bin_masses + u64(blockIdx.y) * NUM_BINS;
    u64 limit = NO_LIMIT, need = state.k_need;
    int bin = state.k_bin;
#pragma unroll 1
    for (int by_mass = bin == NUM_BINS; by_mass < 2; by_mass++) {
        if (by_mass) {
            if (row.top_p == 1.0) break;
            u64 kept = 0;
            if (limit != NO_LIMIT)
                visit_candidates<T>(call, row, state, slice, [&](u64 order, int at, u64 mass) {
                    if (at == state.k_bin && order <= limit) kept += mass;
                });
            need = nucleus(row.top_p, state.k_before + reduce_block<Sum>(kept, scratch));
            find_bin(masses, need, scratch);
            bin = scratch.place;
            need -= scratch.before;
        }
        limit = select(need, scratch, [&](Range& range) {
            visit_candidates<T>(call, row, state, slice, [&](u64 order, int at, u64 mass) {
                if (at == bin) range.take(order, by_mass ? mass : 1);
            });
        });
    }
    return limit;
}

template <class T>
__global__ void __launch_bounds__(THREADS, BLOCKS) choose_tokens(const __grid_constant__ SamplingCall call) {
    ChooseShared& shared = *reinterpret_cast<ChooseShared*>(shared_memory());
    RowState& state = call.states[blockIdx.y];
    if (!state.narrowed) return;
    const SamplingRow& row = call.rows[blockIdx.y];
    RowState& ends = shared.ends;
    if (threadIdx.x == 0) ends = state;  // loading the slice has a barrier
    u64* list = call.candidates + u64(blockIdx.y) * CANDIDATES;
    const int size = load_edited<T>(call, row, blockIdx.x, shared.slice);
    const bool weighs = has_draft(call, row);
    u64 sum = 0, depths = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const float x = shared.slice.x[i], depth = depth_below(ends.peak, x, row.temperature);
        const u64 mass = mass_of(depth);
        const int bin = bin_of(depth);
        if (mass < row.least_mass) continue;
        if (bin < ends.first_bin) {
            sum += mass;
            if (weighs) depths += weighted(depth, mass);
        } else if (is_candidate(ends, bin)) {
            const u32 place = atomicAdd(&state.num_candidates, 1u);
            if (place < CANDIDATES) list[place] = order_of(x, blockIdx.x * SLICE + i);
        }
    }
    sum = reduce_block<Sum>(sum, shared.scratch);
    u64* slices = call.slices + u64(blockIdx.y) * MAX_SLICES * 2;
    if (weighs) depths = reduce_block<Sum>(depths, shared.scratch);
    if (threadIdx.x == 0) slices[2 * blockIdx.x] = sum, slices[2 * blockIdx.x + 1] = depths;
    if (!comes_last(&state.ticket, call.num_slices, shared.scratch)) return;

    if (threadIdx.x == 0) shared.ends.num_candidates = __ldcg(&state.num_candidates);
    __syncthreads();
    const u64 limit = find_limit<T>(call, row, ends, shared.slice, shared.scratch);
    const bool reads = threadIdx.x < call.num_slices;
    if (reads) shared.slices[threadIdx.x] = __ldcg(slices + 2 * threadIdx.x);
    __syncthreads();
    depths = reads ? __ldcg(slices + 2 * threadIdx.x + 1) : 0;
    visit_candidates<T>(call, row, ends, shared.slice, [&](u64 order, int, u64 mass) {
        if (order > limit) return;
        add_shared(&shared.slices[id_of(order) / SLICE], mass);
        if (weighs) depths += weighted(depth_below(ends.peak, logit_of(order), row.temperature), mass);
    });
    __syncthreads();
    choose<T>(call, row, limit, shared.slices, depths, shared.slice, shared.scratch);
    if (row.top_p < 1.0) clear_bins(call.bin_masses + u64(blockIdx.y) * NUM_BINS);
    if (threadIdx.x == 0) state.num_candidates = 0;
}
