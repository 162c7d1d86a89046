// Log probabilities of one token per row, its rank, and the most likely tokens, from raw logits, as
// workers/sample/logprobs.py computes them on a CPU. The kernels compute logits and the total of masses; the host takes
// the logarithm in float64, for the same bits.
//
//     weigh_tokens      total, rank; a histogram of depths gives the bin where the most likely tokens end
//     take_most_likely  reads single logits down to that bin only
#include "vocabulary.cuh"

struct LogprobCall {
    const void* logits;          // [rows, vocab_size], rows row_stride apart
    const float* peaks;          // [rows], the largest of the logits
    const int* statuses;         // [rows]: a row with another status than 0 is skipped
    const i64* token_ids;        // [rows]
    const int* nums_most_likely; // [rows]: number of most likely tokens; -1: the row is skipped
    u64* totals;                 // [rows]: the sum of masses
    int* ranks;                  // [rows]: 1 + the number of larger logits
    int* ids;                    // [rows, out_stride]: the token, then the most likely tokens in order
    float* values;               // [rows, out_stride]: the logits of ids
    RowState* states;
    u64* slices;
    u32* bin_counts;
    u64* candidates;
    i64 row_stride;
    int vocab_size, num_slices, out_stride;
};

constexpr int MOST_TOKENS = 1024;

struct LogprobShared {
    float x[SLICE];
    Scratch scratch;
    u32 bin_counts[NUM_BINS];
};

template <class T>
DEVICE int load_logits(const LogprobCall& call, int number, float* x) {
    const int size = slice_size(number, call.vocab_size);
    load_slice(static_cast<const T*>(call.logits) + blockIdx.y * call.row_stride + number * SLICE, size, x);
    __syncthreads();
    return size;
}

template <class T>
__global__ void __launch_bounds__(THREADS, BLOCKS) weigh_tokens(const __grid_constant__ LogprobCall call) {
    LogprobShared& shared = *reinterpret_cast<LogprobShared*>(shared_memory());
    const int most_likely = min(call.nums_most_likely[blockIdx.y], call.vocab_size);
    if (most_likely < 0 || call.statuses[blockIdx.y] != 0) return;
    const float peak = call.peaks[blockIdx.y];
    const i64 token_id = call.token_ids[blockIdx.y];
    const float chosen = to_float(static_cast<const T*>(call.logits)[blockIdx.y * call.row_stride + token_id]);
    if (most_likely) clear_bins(shared.bin_counts);
    const int size = load_logits<T>(call, blockIdx.x, shared.x);
    u64 sum = 0, larger = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const float depth = subtract_exact(peak, shared.x[i]);
        sum += mass_of(depth);
        larger += rising(shared.x[i]) > rising(chosen);
        if (most_likely) atomicAdd(&shared.bin_counts[bin_of(depth)], 1u);
    }
    sum = reduce_block<Sum>(sum, shared.scratch);
    larger = reduce_block<Sum>(larger, shared.scratch);
    u64* slices = call.slices + u64(blockIdx.y) * MAX_SLICES * 2;
    u32* counts = call.bin_counts + u64(blockIdx.y) * NUM_BINS;
    if (threadIdx.x == 0) slices[2 * blockIdx.x] = sum, slices[2 * blockIdx.x + 1] = larger;
    if (most_likely) add_bins(shared.bin_counts, counts);
    RowState& state = call.states[blockIdx.y];
    if (!comes_last(&state.ticket, call.num_slices, shared.scratch)) return;
    const bool reads = threadIdx.x < call.num_slices;
    sum = reduce_block<Sum>(reads ? __ldcg(slices + 2 * threadIdx.x) : 0, shared.scratch);
    larger = reduce_block<Sum>(reads ? __ldcg(slices + 2 * threadIdx.x + 1) : 0, shared.scratch);
    if (most_likely) find_bin(counts, most_likely, shared.scratch);
    if (threadIdx.x == 0) {
        call.totals[blockIdx.y] = sum;
        call.ranks[blockIdx.y] = int(larger) + 1;
        call.ids[i64(blockIdx.y) * call.out_stride] = int(token_id);
        call.values[i64(blockIdx.y) * call.out_stride] = chosen;
        state.k_bin = shared.scratch.place;
    }
    if (most_likely) {
        __syncthreads();  // the bins have been read
        clear_bins(counts);
    }
}

struct MostLikelyShared {
    float x[SLICE];
    Scratch scratch;
    u64 taken[MOST_TOKENS];
    int num_taken;
};

// Calls visit(order) for every token down to k_bin, spread over the block's threads.
template <class T, class Visit>
DEVICE void visit_most_likely(const LogprobCall& call, int k_bin, u32 num_candidates, float peak, float* x,
                              const Visit& visit) {
    const u64* list = call.candidates + u64(blockIdx.y) * CANDIDATES;
    const bool listed = num_candidates <= CANDIDATES;
#pragma unroll 1
    for (int number = 0; number < (listed ? 1 : call.num_slices); number++) {
        int size = num_candidates;
        if (!listed) {
            __syncthreads();  // the last slice has been read
            size = load_logits<T>(call, number, x);
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const u64 order = listed ? __ldcg(list + i) : order_of(x[i], number * SLICE + i);
            if (listed || bin_of(subtract_exact(peak, x[i])) <= k_bin) visit(order);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, BLOCKS) take_most_likely(const __grid_constant__ LogprobCall call) {
    MostLikelyShared& shared = *reinterpret_cast<MostLikelyShared*>(shared_memory());
    const int most_likely = min(call.nums_most_likely[blockIdx.y], call.vocab_size);
    if (most_likely <= 0 || call.statuses[blockIdx.y] != 0) return;
    RowState& state = call.states[blockIdx.y];
    const float peak = call.peaks[blockIdx.y];
    const int k_bin = state.k_bin;
    u64* list = call.candidates + u64(blockIdx.y) * CANDIDATES;
    const int size = load_logits<T>(call, blockIdx.x, shared.x);
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
        if (bin_of(subtract_exact(peak, shared.x[i])) > k_bin) continue;
        const u32 place = atomicAdd(&state.num_candidates, 1u);
        if (place < CANDIDATES) list[place] = order_of(shared.x[i], blockIdx.x * SLICE + i);
    }
    if (threadIdx.x == 0) shared.num_taken = 0;
    if (!comes_last(&state.ticket, call.num_slices, shared.scratch)) return;
    const u32 num_candidates = __ldcg(&state.num_candidates);
    const u64 limit = select(most_likely, shared.scratch, [&](Range& range) {
        visit_most_likely<T>(call, k_bin, num_candidates, peak, shared.x, [&](u64 order) { range.take(order, 1); });
    });
    visit_most_likely<T>(call, k_bin, num_candidates, peak, shared.x, [&](u64 order) {
        if (order <= limit) shared.taken[atomicAdd(&shared.num_taken, 1)] = order;
    });
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < most_likely; i += THREADS) {
        const u64 order = shared.taken[i];
        int place = 1;
#pragma unroll 1
        for (int other = 0; other < most_likely; other++) place += shared.taken[other] < order;
        call.ids[i64(blockIdx.y) * call.out_stride + place] = id_of(order);
        call.values[i64(blockIdx.y) * call.out_stride + place] = logit_of(order);
    }
    if (threadIdx.x == 0) state.num_candidates = 0;
}
