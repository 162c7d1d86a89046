// Layers with states: matrices of heads (gated delta rule, state space), and channels (scan, convolution, recurrence).
//
// A block (of channels: a thread) computes the tokens of a row one after the other, with its part of the state in
// registers. Sums have one order, which follows from the sizes alone: a token's bits depend on the tokens before it, not
// on the batch or its spans. Which rows there are is read from memory, so a recorded launch serves any batch.
#include "ptx.cuh"

struct GatedDeltaRule {
    float* state;           // [slots, value_heads, key_dim, value_dim], slots slot_stride apart
    const int* row_starts;  // [rows + 1]: the first span of each row
    const int* spans;       // [spans, 4]: first token, token after the last, slot read (-1: zeros), slot written
    const void* q;          // [T, key_heads, key_dim]
    const void* k;          // [T, key_heads, key_dim]
    const void* v;          // [T, value_heads, value_dim]
    const float* decay;     // [T, value_heads, decays]
    const float* beta;      // [T, value_heads]
    void* out;              // [T, value_heads, value_dim]
    i64 slot_stride, q_stride, k_stride, v_stride;
    int key_heads, key_dim, value_heads, value_dim, decays, normed;
    float scale, norm_eps;
};

struct StateSpace {
    float* state;           // [slots, heads, state_dim, head_dim]
    const int* row_starts;
    const int* spans;
    const void* x;          // [T, heads, head_dim]
    const float* dt;        // [T, heads]
    const float* a;         // [heads]
    const void* b;          // [T, groups, state_dim]
    const void* c;          // [T, groups, state_dim]
    const float* d;         // [heads] or null
    void* out;              // [T, heads, head_dim]
    i64 slot_stride, x_stride, b_stride, c_stride;
    int heads, head_dim, groups, state_dim;
};

struct SelectiveScan {
    float* state;           // [slots, state_dim, channels]
    const int* row_starts;
    const int* spans;
    const void* x;          // [T, channels]
    const float* dt;        // [T, channels]
    const float* a;         // [state_dim, channels]
    const void* b;          // [T, state_dim]
    const void* c;          // [T, state_dim]
    const float* d;         // [channels] or null
    void* out;              // [T, channels]
    i64 slot_stride, x_stride, b_stride, c_stride;
    int channels, state_dim;
};

struct CausalConv {
    float* state;           // [slots, taps - 1, channels]
    const int* row_starts;
    const int* spans;
    const void* x;          // [T, channels]
    const void* weight;     // [taps, channels]
    const void* bias;       // [channels] or null
    void* out;              // [T, channels]
    i64 slot_stride, x_stride;
    int channels, silu;
};

struct LinearRecurrence {
    float* state;           // [slots, channels]
    const int* row_starts;
    const int* spans;
    const void* x;          // [T, channels]
    const void* decay;      // [T, channels]
    void* out;              // [T, channels]
    i64 slot_stride, x_stride, decay_stride;
    int channels;
};

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int COLUMNS = 32;  // of a block over matrices: a warp has some of their rows, a lane one column

struct Span {
    int begin, end, read, written;
};

// Calls body(span, is first) for the spans of the block's row (blockIdx.y).
template <class P, class Body>
DEVICE void for_spans(const P& p, Body body) {
    for (int i = p.row_starts[blockIdx.y]; i < p.row_starts[blockIdx.y + 1]; i++)
        body(Span{p.spans[4 * i], p.spans[4 * i + 1], p.spans[4 * i + 2], p.spans[4 * i + 3]},
             i == p.row_starts[blockIdx.y]);
}

template <class T>
DEVICE float number(const void* of, i64 at) {
    return to_float(static_cast<const T*>(of)[at]);
}

// A warp's ROWS rows of a matrix in a state, a column per lane. Those that do not exist are zeros.
template <int ROWS>
struct Rows {
    float held[ROWS];

    DEVICE void load(const float* state, int rows, int columns, int column) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = threadIdx.x / 32 * ROWS + i;
            held[i] = state && row < rows && column < columns ? state[i64(row) * columns + column] : 0.0f;
        }
    }

    DEVICE void store(float* state, int rows, int columns, int column) const {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = threadIdx.x / 32 * ROWS + i;
            if (row < rows && column < columns) state[i64(row) * columns + column] = held[i];
        }
    }
};

// The sum over the warps of what the same lane has in each, in every thread. `sums` [WARPS][32] may be written again
// behind the block's next barrier.
DEVICE float sum_warps(float (*sums)[32]) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp][threadIdx.x % 32];
    return total;
}

// A block computes COLUMNS columns of a head: blockIdx.x is the head times the blocks of a head. key_dim is at most
// WARPS * ROWS.
template <class T, int ROWS>
__global__ void __launch_bounds__(THREADS) gated_delta_rule(const __grid_constant__ GatedDeltaRule p) {
    constexpr int SIZE = WARPS * ROWS;
    __shared__ float query[SIZE], key[SIZE], decay[SIZE];  // of a token
    __shared__ float by_key[WARPS][32], by_query[WARPS][32];
    const int blocks = (p.value_dim + COLUMNS - 1) / COLUMNS, head = blockIdx.x / blocks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x % blocks * COLUMNS + lane;
    const int key_head = head * p.key_heads / p.value_heads;
    const i64 offset = i64(head) * p.key_dim * p.value_dim;
    Rows<ROWS> state;
    for_spans(p, [&](Span span, bool is_first) {
        if (is_first)
            state.load(span.read < 0 ? nullptr : p.state + span.read * p.slot_stride + offset, p.key_dim, p.value_dim,
                       column);
        for (int token = span.begin; token < span.end; token++) {
            const i64 at = i64(token) * p.value_heads + head;
#pragma unroll 1
            for (int i = threadIdx.x; i < SIZE; i += THREADS) {
                const bool is_there = i < p.key_dim;
                query[i] = is_there ? number<T>(p.q, token * p.q_stride + key_head * p.key_dim + i) : 0.0f;
                key[i] = is_there ? number<T>(p.k, token * p.k_stride + key_head * p.key_dim + i) : 0.0f;
                decay[i] = is_there ? expf(p.decay[p.decays == 1 ? at : at * p.decays + i]) : 0.0f;
            }
            __syncthreads();  // the token is there
            float query_squares = 0.0f, key_squares = 0.0f, product = 0.0f;
#pragma unroll 1
            for (int i = lane; i < SIZE; i += 32) {
                query_squares += query[i] * query[i];
                key_squares += key[i] * key[i];
                product += query[i] * key[i];
            }
            const float query_scale = p.normed ? p.scale / sqrtf(sum_lanes(query_squares) + p.norm_eps) : p.scale;
            const float key_scale = p.normed ? 1.0f / sqrtf(sum_lanes(key_squares) + p.norm_eps) : 1.0f;
            product = sum_lanes(product) * key_scale * query_scale;
            float seen = 0.0f, found = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                state.held[i] *= decay[warp * ROWS + i];
                seen += state.held[i] * key[warp * ROWS + i];
                found += state.held[i] * query[warp * ROWS + i];
            }
            by_key[warp][lane] = seen;
            by_query[warp][lane] = found;
            __syncthreads();  // the sums are there
            const float value = column < p.value_dim ? number<T>(p.v, token * p.v_stride + head * p.value_dim + column)
                                                     : 0.0f;
            const float change = (value - sum_warps(by_key) * key_scale) * p.beta[at];
#pragma unroll
            for (int i = 0; i < ROWS; i++) state.held[i] += key[warp * ROWS + i] * (change * key_scale);
            if (warp == 0 && column < p.value_dim)
                static_cast<T*>(p.out)[at * p.value_dim + column] =
                    from_float<T>(sum_warps(by_query) * query_scale + product * change);
            __syncthreads();  // the token is read
        }
        state.store(p.state + span.written * p.slot_stride + offset, p.key_dim, p.value_dim, column);
    });
}

// As `gated_delta_rule`. state_dim is at most WARPS * ROWS.
template <class T, int ROWS>
__global__ void __launch_bounds__(THREADS) state_space(const __grid_constant__ StateSpace p) {
    constexpr int SIZE = WARPS * ROWS;
    __shared__ float write[SIZE], read[SIZE];  // of a token
    __shared__ float sums[WARPS][32];
    const int blocks = (p.head_dim + COLUMNS - 1) / COLUMNS, head = blockIdx.x / blocks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x % blocks * COLUMNS + lane;
    const int group = head * p.groups / p.heads;
    const i64 offset = i64(head) * p.state_dim * p.head_dim;
    Rows<ROWS> state;
    for_spans(p, [&](Span span, bool is_first) {
        if (is_first)
            state.load(span.read < 0 ? nullptr : p.state + span.read * p.slot_stride + offset, p.state_dim, p.head_dim,
                       column);
        for (int token = span.begin; token < span.end; token++) {
#pragma unroll 1
            for (int i = threadIdx.x; i < SIZE; i += THREADS) {
                const bool is_there = i < p.state_dim;
                write[i] = is_there ? number<T>(p.b, token * p.b_stride + group * p.state_dim + i) : 0.0f;
                read[i] = is_there ? number<T>(p.c, token * p.c_stride + group * p.state_dim + i) : 0.0f;
            }
            __syncthreads();  // the token is there, and the sums of the last one are read
            const i64 at = i64(token) * p.heads + head;
            const float dt = p.dt[at], decay = expf(dt * p.a[head]);
            const float x = column < p.head_dim ? number<T>(p.x, token * p.x_stride + head * p.head_dim + column) : 0.0f;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                state.held[i] = state.held[i] * decay + write[warp * ROWS + i] * (dt * x);
                sum += state.held[i] * read[warp * ROWS + i];
            }
            sums[warp][lane] = sum;
            __syncthreads();  // the sums of the warps are there
            if (warp == 0 && column < p.head_dim)
                static_cast<T*>(p.out)[at * p.head_dim + column] =
                    from_float<T>(sum_warps(sums) + (p.d ? p.d[head] : 0.0f) * x);
        }
        state.store(p.state + span.written * p.slot_stride + offset, p.state_dim, p.head_dim, column);
    });
}

// A thread computes a channel. state_dim is at most ROWS.
template <class T, int ROWS>
__global__ void __launch_bounds__(THREADS) selective_scan(const __grid_constant__ SelectiveScan p) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= p.channels) return;
    float state[ROWS], a[ROWS];
#pragma unroll
    for (int n = 0; n < ROWS; n++) a[n] = n < p.state_dim ? p.a[i64(n) * p.channels + channel] : 0.0f;
    const float d = p.d ? p.d[channel] : 0.0f;
    for_spans(p, [&](Span span, bool is_first) {
        const float* const from = p.state + span.read * p.slot_stride + channel;
        float* const to = p.state + span.written * p.slot_stride + channel;
#pragma unroll
        for (int n = 0; n < ROWS; n++)
            if (is_first) state[n] = span.read >= 0 && n < p.state_dim ? from[i64(n) * p.channels] : 0.0f;
        for (int token = span.begin; token < span.end; token++) {
            const float x = number<T>(p.x, token * p.x_stride + channel), dt = p.dt[i64(token) * p.channels + channel];
            float sum = d * x;
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                if (n >= p.state_dim) continue;
                state[n] = state[n] * expf(dt * a[n]) + dt * x * number<T>(p.b, token * p.b_stride + n);
                sum += state[n] * number<T>(p.c, token * p.c_stride + n);
            }
            static_cast<T*>(p.out)[i64(token) * p.channels + channel] = from_float<T>(sum);
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++)
            if (n < p.state_dim) to[i64(n) * p.channels] = state[n];
    });
}

// A thread computes a channel.
template <class T, int TAPS>
__global__ void __launch_bounds__(THREADS) causal_conv(const __grid_constant__ CausalConv p) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= p.channels) return;
    float window[TAPS], taps[TAPS];  // the oldest input first
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) taps[tap] = number<T>(p.weight, i64(tap) * p.channels + channel);
    const float bias = p.bias ? number<T>(p.bias, channel) : 0.0f;
    for_spans(p, [&](Span span, bool is_first) {
        const float* const from = p.state + span.read * p.slot_stride + channel;
        float* const to = p.state + span.written * p.slot_stride + channel;
#pragma unroll
        for (int tap = 1; tap < TAPS; tap++)
            if (is_first) window[tap] = span.read >= 0 ? from[i64(tap - 1) * p.channels] : 0.0f;
        for (int token = span.begin; token < span.end; token++) {
            float sum = bias;
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) {
                window[tap] = tap + 1 < TAPS ? window[tap + 1] : number<T>(p.x, token * p.x_stride + channel);
                sum += window[tap] * taps[tap];
            }
            const float rounded_sum = rounded<T>(sum);
            static_cast<T*>(p.out)[i64(token) * p.channels + channel] =
                from_float<T>(p.silu ? rounded_sum / (1.0f + expf(-rounded_sum)) : rounded_sum);
        }
#pragma unroll
        for (int tap = 1; tap < TAPS; tap++) to[i64(tap - 1) * p.channels] = window[tap];
    });
}

// A thread computes a channel. There is one variant for each type.
template <class T>
__global__ void __launch_bounds__(THREADS) linear_recurrence(const __grid_constant__ LinearRecurrence p) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= p.channels) return;
    float state = 0.0f;
    for_spans(p, [&](Span span, bool is_first) {
        if (is_first && span.read >= 0) state = p.state[span.read * p.slot_stride + channel];
        for (int token = span.begin; token < span.end; token++) {
            state = number<T>(p.decay, token * p.decay_stride + channel) * state +
                    number<T>(p.x, token * p.x_stride + channel);
            static_cast<T*>(p.out)[i64(token) * p.channels + channel] = from_float<T>(state);
        }
        p.state[span.written * p.slot_stride + channel] = state;
    });
}
