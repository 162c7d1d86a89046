// What the library offers, to Python and to stack.cpp: library.py reads the structs and functions from here. Tensors
// are described where each function is defined.
#pragma once

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

// ---- attention.cpp. Strides count elements. ----

// Which keys a query sees, and what changes its logits; kernels/data/paging.py says how.
struct LogitTerms {
  const float* sinks;          // [heads] or null
  const float* alibi;          // [heads] or null
  const float* relative_bias;  // [heads, 2 bias_radius] or null: added to logits, by bias_radius + key - query
  int64_t bias_radius;
  const int32_t* chosen;  // [tokens, num_chosen] or null: ascending positions of the only keys that a token sees
  int64_t num_chosen;
  int64_t window;  // 0: none
  int64_t chunk;   // 0: none
  int64_t future;  // keys after its own position that a query sees; 0: causal
  float softcap;   // 0: none
};

struct AttentionCall {
  const void* q;        // [tokens, heads, head_dim]
  const void* k_cache;  // [blocks, kv_heads, block_size * head_dim] (codes: with scales behind), see layout.h, nibbles.h
  const void* v_cache;  // [blocks, kv_heads, block_size * v_head_dim]; k_cache: values are the first elements of keys
  void* out;            // [tokens, heads, v_head_dim], contiguous
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_table;
  const int32_t* whole;  // [requests] or null: not 0: queries see all keys of the request
  int64_t q_token_stride, q_head_stride;
  int64_t k_block_stride, k_head_stride;
  int64_t v_block_stride, v_head_stride;
  int64_t block_table_stride;
  int64_t num_tokens, num_requests, num_heads, num_kv_heads, head_dim, v_head_dim;
  int64_t num_blocks, block_size, max_blocks;
  LogitTerms terms;
  float scale;
  int32_t dtype;        // 0 float32, 1 bfloat16, 2 float16
  int32_t cache_dtype;  // the same, or codes: 3 of 8 bits, 4 of 4 bits
  int32_t num_threads;
};

EXPORT int pagewire_prepare();

EXPORT int pagewire_pair(int32_t dtype);

EXPORT int pagewire_attention(const AttentionCall* call);

EXPORT int pagewire_store(const void* source, void* cache, const int64_t* slots, int64_t tokens, int64_t heads,
                          int64_t size, int64_t token_stride, int64_t head_stride, int64_t block_stride,
                          int64_t cache_head_stride, int64_t num_blocks, int64_t block_size, int32_t values,
                          int32_t dtype, int32_t cache_dtype, int32_t num_threads);

EXPORT void pagewire_rms_norm(const void* x, const void* weight, void* out, int64_t outer, int64_t inner,
                              int64_t size, int64_t outer_stride, int64_t inner_stride, int64_t out_outer_stride,
                              int64_t out_inner_stride, float eps, float offset, int32_t dtype,
                              int32_t num_threads);

EXPORT void pagewire_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                                  int64_t size, float eps, float offset, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_layer_norm(const void* x, const void* residual, const void* weight, const void* bias, void* sum,
                                void* out, int64_t rows, int64_t size, float eps, int32_t dtype, int32_t num_threads);

EXPORT int pagewire_fixed_sums(const void* x, const int64_t* ends, int64_t* sums, int64_t segments, int64_t size,
                               double one, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_activate_each(const void* x, void* out, int64_t rows, int64_t size, int32_t activation,
                                   int32_t dtype, int32_t num_threads);

EXPORT void pagewire_activate(const void* x, void* out, int64_t rows, int64_t size, int64_t row_stride,
                              int64_t out_stride, int32_t activation, int32_t dtype, int32_t num_threads);

// The activation of each element: see kernels/data/layer.py.
struct Xielu {
  float positive, negative, slope, least;
};

EXPORT void pagewire_xielu(const void* x, void* out, int64_t rows, int64_t size, const Xielu* parameters, int32_t dtype,
                           int32_t num_threads);

EXPORT void pagewire_head_layer_norm(void* heads, const void* weight, const void* bias, int64_t tokens, int64_t count,
                                     int64_t size, int64_t token_stride, float eps, int32_t dtype,
                                     int32_t num_threads);
EXPORT void pagewire_clamp(void* x, int64_t size, float limit, int32_t dtype, int32_t num_threads);
EXPORT void pagewire_by_halves(void* x, int64_t tokens, int64_t heads, int64_t half, int64_t token_stride,
                               int64_t head_stride, int32_t dtype, int32_t num_threads);
EXPORT void pagewire_cap(void* x, int64_t size, float scale, float softcap, int32_t dtype, int32_t num_threads);
EXPORT void pagewire_add_scaled(const void* x, void* sum, int64_t size, float scale, int32_t dtype, int32_t num_threads);
EXPORT void pagewire_multiply_rows(void* x, const void* factors, int64_t rows, int64_t size, int64_t stride,
                                   int32_t dtype, int32_t num_threads);
EXPORT void pagewire_rotary(void* x, const void* cos, const void* sin, int64_t tokens, int64_t heads, int64_t half,
                            int64_t token_stride, int64_t head_stride, int64_t cos_stride, int64_t sin_stride,
                            int32_t dtype, int32_t num_threads);

EXPORT void pagewire_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t k,
                            int64_t n, int64_t x_stride, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_linear_unpacked(const void* x, const void* weight, const void* bias, void* out, int64_t rows,
                                     int64_t k, int64_t n, int64_t x_stride, int64_t weight_stride, int32_t dtype,
                                     int32_t num_threads);

EXPORT void pagewire_largest(const void* x, const uint32_t* allowed, float* values, int64_t* ids, int64_t rows,
                             int64_t size, int64_t row_stride, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_only_allowed(const void* x, const uint32_t* allowed, float* out, int64_t rows, int64_t size,
                                  int64_t row_stride, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_fixed_point_probabilities(const float* depths, int64_t* masses, int64_t size, int32_t num_threads);

// How a row's token is drawn; workers/sample/fixed_point.py says what it means.
struct Draw {
  int64_t seed;
  int64_t position;   // the number of tokens before it
  int64_t min_mass;   // smaller ones count as none
  int64_t top_k;      // 0: all
  double top_p;       // 1: all
  float temperature;  // 0: the likeliest token
  int32_t unused;
};

EXPORT void pagewire_draw(const void* x, const float* peaks, const Draw* draws, int64_t* ids, int64_t rows,
                          int64_t size, int64_t row_stride, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_pack(const void* weight, void* packed, int64_t n, int64_t k, int64_t row_stride, int32_t dtype,
                          int32_t num_threads);

// ---- quantised.cpp ----

// A weight of integers with scales; kernels/data/integers.py says what the fields mean.
struct Integers {
  const void* table;  // uint8 [16], or null
  int64_t group;      // 0: none
  int32_t bits, zero;
  int32_t scale_dtype;  // of scales and offsets, as in AttentionCall
  int32_t offsets;      // 0: there are none
};

EXPORT void pagewire_quantised_pack(const void* codes, const void* scales, const void* offsets, void* packed,
                                    int64_t n, int64_t k, const Integers* form, int32_t num_threads);

EXPORT void pagewire_quantised_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows,
                                      int64_t k, int64_t n, int64_t x_stride, const Integers* form, int32_t dtype,
                                      int32_t num_threads);

// ---- integers.cpp ----

EXPORT int pagewire_quantise(const void* numbers, uint8_t* codes, void* scales, void* offsets, int64_t n, int64_t k,
                             int64_t row_stride, const Integers* form, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_dequantise(const uint8_t* codes, const void* scales, const void* offsets, void* out, int64_t n,
                                int64_t k, const Integers* form, int32_t dtype, int32_t num_threads);

// ---- collective.cpp ----

// A rank's view of the memory that it shares with the other ranks of its group.
struct Group {
  void* region;        // pagewire_region_bytes, zeros at first
  int64_t slot_bytes;  // a multiple of 64
  int32_t rank, size;
};

EXPORT int64_t pagewire_region_bytes(int32_t size, int64_t slot_bytes);

EXPORT void pagewire_all_reduce(const Group* group, void* data, int64_t n, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_all_gather(const Group* group, const void* x, void* out, int64_t rows, int64_t row_bytes);

EXPORT void pagewire_broadcast(const Group* group, void* data, int64_t bytes, int32_t source);

EXPORT void pagewire_barrier(const Group* group);

// The memory that a rank shares with another one, to which it sends.
struct Link {
  void* region;         // pagewire_link_bytes, zeros at first
  int64_t piece_bytes;  // a multiple of 64
  int64_t num_pieces;   // that may be on their way
};

EXPORT int64_t pagewire_link_bytes(int64_t piece_bytes, int64_t num_pieces);

EXPORT void pagewire_send(const Link* link, const void* data, int64_t bytes);

EXPORT void pagewire_receive(const Link* link, void* data, int64_t bytes);

// ---- experts.cpp: several matrices at once ----

struct Matrix {
  const void* packed;        // null: there is none
  const void* bias;          // [n] or null
  const Integers* integers;  // null: a dense matrix
  int64_t n, k;
  int64_t number;  // among those that adapters may change; -1: they may not
};

// The product of rows with matrices of equal n and k: rows from starts[i] to before starts[i + 1] with matrix i.
struct GroupedCall {
  const Matrix* matrices;
  const int64_t* starts;  // [count + 1]
  const void* x;          // [rows, k], rows x_stride apart
  void* out;              // [rows, n], contiguous
  int64_t count, x_stride;
  int32_t dtype, num_threads;
};

EXPORT void pagewire_linear_grouped(const GroupedCall* call);

EXPORT void pagewire_quantised_grouped(const GroupedCall* call);

EXPORT void pagewire_grouped(const GroupedCall* call);

// The experts of a layer; kernels/data/layer.py says what they compute. The numbers of `up` follow one another, and so do
// those of `down`.
struct Experts {
  const Matrix* up;    // [count]: of hidden states to gate and up together, or to up alone
  const Matrix* down;  // [count]
  int64_t count;
  int32_t activation;
  int32_t weighs_inputs;  // weights are of what experts take, not of what they give
  int32_t gated;          // `up` makes gates, too
  int32_t unused;
};

struct AdapterRows;

struct ExpertsCall {
  const void* x;         // [tokens, hidden], contiguous; may be `out`
  const int64_t* ids;    // [tokens, chosen]
  const float* weights;  // [tokens, chosen]
  void* out;             // [tokens, hidden], contiguous
  void* scratch;         // [tokens * chosen, hidden + up.n]
  int64_t num_tokens, num_chosen;
  int32_t dtype, num_threads;
  const AdapterRows* adapters;  // null: no token has one
};

EXPORT int pagewire_experts(const Experts* experts, const ExpertsCall* call);

// How a router chooses experts; kernels/data/routing.py says what the numbers mean.
struct Routing {
  const float* bias;  // [experts] or null
  int64_t num_chosen;
  int64_t groups, kept_groups, best;  // one group: there are none
  float epsilon, factor, margin;
  int32_t sigmoid, normalised;
  int32_t weight_dtype, logit_dtype;  // as in AttentionCall
  int32_t unused;
};

EXPORT void pagewire_route(const void* logits, int64_t* ids, float* weights, int64_t rows, int64_t experts,
                           const Routing* routing, int32_t dtype);

EXPORT void pagewire_floats(const void* x, float* out, int64_t size, int32_t dtype, int32_t num_threads);

EXPORT void pagewire_add_gated(void* out, const void* x, const void* gate, int64_t rows, int64_t size, int32_t dtype,
                               int32_t num_threads);

// ---- latents.cpp ----

// The product of each head's rows with a matrix of its own, all of equal n and k.
struct HeadsCall {
  const Matrix* matrices;  // [heads]
  const void* x;           // [tokens, heads, k + rest]
  void* out;               // [tokens, heads, n + rest]; not x
  void* scratch;           // [tokens, heads, k + n]
  int64_t tokens, heads;
  int64_t x_token_stride, x_head_stride, out_token_stride, out_head_stride;
  int64_t rest;  // elements that stay as they are
  int32_t dtype, num_threads;
};

EXPORT void pagewire_heads(const HeadsCall* call);

// ---- indexer.cpp ----

// What an indexer makes of the tokens of a batch, and the keys that it has cached; kernels/indexed.py says what it chooses.
struct ChooseCall {
  const void* queries;  // [tokens, heads, size]
  const void* keys;     // [tokens, size]
  const void* weights;  // [tokens, heads]
  void* index;          // [blocks, block_size, size]
  int32_t* chosen;      // [tokens, num_chosen]
  const int64_t* slots;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  int64_t tokens, requests, heads, size, num_chosen, num_blocks, block_size, max_blocks;
  float scale, weight_scale;  // of products, and of weights
  int32_t dtype, num_threads;
};

EXPORT int pagewire_choose(const ChooseCall* call);

// ---- adapters.cpp ----

// What a LoRA adapter changes in some outputs of a product; kernels/data/deltas.py says how.
struct Delta {
  const void* a;       // [rank, k]
  const void* b;       // [n / 64, rank, 64], with zeros behind n, or null
  const float* gain;   // [n] or null
  const float* shift;  // [n] or null
  int64_t rank, first, n;
  float scale;
  int32_t is_float;  // a and b are float32, not of the tensors' type
};

// What it changes in one product.
struct Deltas {
  const Delta* parts;
  int64_t count;
};

// The rows of a batch that have adapters, ordered by adapter. Those of a grouped product are ordered by matrix, and those
// of a matrix by adapter; matrix m has then the number `AdaptCall::product` + m.
struct AdapterRows {
  const int64_t* rows;    // [starts[matrices * count]]
  const int64_t* starts;  // [matrices * count + 1]
  const void* tables;     // [count], for each adapter a pointer to the Deltas of all products
  int64_t count, matrices;
};

struct AdaptCall {
  const AdapterRows* adapters;
  const void* x;  // rows of k, x_stride apart
  void* out;      // rows of n, contiguous
  int64_t product, k, n, x_stride;
  int32_t dtype, num_threads;
};

EXPORT void pagewire_adapt(const AdaptCall* call);

// ---- state_matrices.cpp, state_channels.cpp: layers with states; kernels/reference/states.py says what they compute ----

// The states of a layer, and which tokens change them; kernels/data/states.py says how.
struct States {
  float* state;               // [slots, ...], slots slot_stride apart
  const int32_t* row_starts;  // [rows + 1]
  const int32_t* spans;       // [spans, 4]
  int64_t num_slots, slot_stride, num_rows, num_spans, num_tokens;
  int32_t dtype, num_threads;  // dtype: of the tensors below that are void
};

// Strides count elements from token to token; other axes are contiguous, and so are tensors without a stride.
struct DeltaRuleCall {
  States states;       // [value_heads, key_dim, value_dim]
  const void* q;       // [tokens, key_heads, key_dim]
  const void* k;       // [tokens, key_heads, key_dim]
  const void* v;       // [tokens, value_heads, value_dim]
  const float* decay;  // [tokens, value_heads, decays]
  const float* beta;   // [tokens, value_heads]
  void* out;           // [tokens, value_heads, value_dim]
  int64_t q_stride, k_stride, v_stride;
  int64_t key_heads, key_dim, value_heads, value_dim;
  int64_t decays;  // 1 or key_dim
  float scale, norm_eps;
  int32_t normed;
};

EXPORT int pagewire_gated_delta_rule(const DeltaRuleCall* call);

struct StateSpaceCall {
  States states;    // [heads, state_dim, head_dim]
  const void* x;    // [tokens, heads, head_dim]
  const float* dt;  // [tokens, heads]
  const float* a;   // [heads]
  const void* b;    // [tokens, groups, state_dim]
  const void* c;    // [tokens, groups, state_dim]
  const float* d;   // [heads] or null
  void* out;        // [tokens, heads, head_dim]
  int64_t x_stride, b_stride, c_stride;
  int64_t heads, head_dim, groups, state_dim;
};

EXPORT int pagewire_state_space(const StateSpaceCall* call);

struct SelectiveScanCall {
  States states;    // [state_dim, channels]
  const void* x;    // [tokens, channels]
  const float* dt;  // [tokens, channels]
  const float* a;   // [state_dim, channels]
  const void* b;    // [tokens, state_dim]
  const void* c;    // [tokens, state_dim]
  const float* d;   // [channels] or null
  void* out;        // [tokens, channels]
  int64_t x_stride, b_stride, c_stride, channels, state_dim;
};

EXPORT int pagewire_selective_scan(const SelectiveScanCall* call);

struct CausalConvCall {
  States states;       // [taps - 1, channels]
  const void* x;       // [tokens, channels]
  const void* weight;  // [taps, channels]
  const void* bias;    // [channels] or null
  void* out;           // [tokens, channels]
  int64_t x_stride, channels, taps;
  int32_t silu;
};

EXPORT int pagewire_causal_conv(const CausalConvCall* call);

struct LinearRecurrenceCall {
  States states;      // [channels]
  const void* x;      // [tokens, channels]
  const void* decay;  // [tokens, channels]
  void* out;          // [tokens, channels]
  int64_t x_stride, decay_stride, channels;
};

EXPORT int pagewire_linear_recurrence(const LinearRecurrenceCall* call);

// ---- mixers.cpp: what layers with states compute between two products; kernels/mixers.py is the same in Python ----

// What opens a result, and may norm it; kernels/data/mixers.py says how.
struct OutputGate {
  const void* weight;     // [group], or [groups, group]; null: there is no norm
  int64_t group;          // numbers that are normed together
  int64_t weight_stride;  // from group to group
  float eps;
  int32_t sigmoid, first;
  int32_t single;  // a group has one gate
};

EXPORT void pagewire_open_by(const void* x, const void* gates, void* out, int64_t rows, int64_t groups,
                             int64_t gates_stride, int64_t group_stride, const OutputGate* form, int32_t dtype,
                             int32_t num_threads);

EXPORT void pagewire_step_sizes(const void* x, const float* bias, const float* factor, float* out, int64_t rows,
                                int64_t size, int64_t x_stride, float least, float most, int32_t dtype,
                                int32_t num_threads);

EXPORT void pagewire_rates(const void* x, float* out, int64_t rows, int64_t size, int64_t x_stride, float most,
                           int32_t dtype, int32_t num_threads);

// A mixer of states. Of the calls of kernels only what is the same for all tokens is set, and only of its own kind.
struct Mixer {
  CausalConvCall conv;
  DeltaRuleCall delta;
  StateSpaceCall space;
  SelectiveScanCall scan;
  Matrix factors, steps, gates;
  const float* bias;    // of steps
  const float* decay;   // of the delta rule: what a step of 1 leaves
  const void* step_norm;   // of the factors of a scan; null: there are none
  const void* write_norm;
  const void* read_norm;
  OutputGate gate;
  float least, most;    // of steps
  float eps;            // of norms
  float rate;           // of the delta rule: the most of a value that is new
  int32_t unused;
  int32_t kind;         // 0: there is none; 1 a short convolution, 2 a gated delta rule, 3 a state space, 4 a scan
};

struct MixerCall {
  const void* x;         // [tokens, k of `factors`]
  const void* given;     // [tokens, given_stride]
  void* out;             // [tokens, ...]
  void* convolved;       // scratch [tokens, channels]
  void* factors;         // scratch [tokens, factors.n]
  float* numbers;        // scratch [tokens, ...]: steps, and of the delta rule rates as well
  const AdapterRows* adapters;
  const int32_t* row_starts;  // see `States`
  const int32_t* spans;
  int64_t num_rows, num_spans, num_tokens, given_stride;
  int32_t dtype, num_threads;
};

EXPORT int pagewire_mix(const Mixer* mixer, const MixerCall* call);

// ---- stack.cpp: a stack of layers; kernels/data/layer.py says what they compute ----

struct Norm {
  const void* weight;  // null: there is none
  const void* bias;    // of a layer norm; null: there is none
  float eps;
  float offset;     // of an RMS norm
  int32_t centred;  // it is a layer norm
};

// What experts have for themselves that take the sum before their half; the layer's `up` and `down` are beside them.
struct SumTaker {
  Norm router_norm;            // of what the router takes of the sum
  const void* router_scale;    // [hidden], which that is multiplied by, and by router_factor
  const float* expert_scales;  // [experts], which experts' weights are multiplied by
  Norm norm;                   // of what experts take of the sum; no weight: they take what `up` takes
  Norm given_norm, dense_norm;  // of what experts give, and of what `down` gives
  float router_factor;
  int32_t unused;
};

// A feed-forward half of experts. The `up` and `down` of its layer, if there are some, are those of a shared expert.
struct Mixture {
  Matrix router;  // null: there is none
  Matrix shared_gate;  // null: the shared expert is added as it is
  Experts experts;
  Routing routing;
  SumTaker of_sum;
};

// Chooses the keys that a token sees, by keys of its own.
struct Indexer {
  Matrix keys, queries, weights;
  Norm norm;           // of keys
  int64_t num_chosen;  // 0: there is no indexer
  int32_t interleaved;
  int32_t unused;
};

// Attention to latents. The layer's qkv makes queries, or what they are made of, a latent, and the rotated part of a key.
struct Latents {
  Norm query_norm, norm;  // of what queries are made of, and of latents
  Matrix queries;         // makes them; null: qkv does
  const Matrix* keys;     // of each head: queries that are not rotated to those of latents; null: there are no latents
  const Matrix* values;   // of each head: sums of latents to those of values
  Indexer indexer;
  int32_t follows;        // tokens see what the indexer of a layer before has chosen
  int32_t unused;
};

// Cosines and sines of the tokens of a call.
struct Angles {
  const void* cos;  // [tokens, 2 half]
  const void* sin;
  int64_t half;     // pairs of elements that they turn in a head
};

// What differs between layers in an AttentionCall.
struct AttentionSizes {
  int64_t num_heads, num_kv_heads, head_dim, v_head_dim;
  int64_t k_block_stride, k_head_stride;
  int64_t v_block_stride, v_head_stride;
};

// What a layer adds to its sum at its end: the product of what a token gives it beside states and of what a gate lets
// through of the sum.
struct InputGate {
  Matrix gate, out;  // [hidden] to [gate.n], and back; not packed: there is none
  Norm norm;         // of what `out` gives
  int64_t number;    // which of the layers' inputs is given
};

struct Layer {
  Matrix qkv, out, up, down;
  AttentionSizes sizes;
  Latents latents;
  Mixture mixture;
  Mixer mixer;  // in place of attention, between `qkv` and `out`; or beside it
  Matrix beside, beside_out;  // before and behind a mixer beside attention; not packed: there is none
  InputGate input_gate;
  Norm query_norm, key_norm;
  Norm value_norm;  // an RMS norm of each head of values; no weight: they are not normed
  Norm attention_norm, output_norm;  // of sums; no weight: the next product takes the sum itself
  Norm attended_norm, fed_norm;      // of what a half gives, before it is added; no weight: it is not normed
  Norm out_norm, down_norm;          // RMS norms of what `out` and `down` take; no weight: it is not normed
  void* k_cache;
  void* v_cache;
  void* index_cache;  // [blocks, block_size, size] of its indexer's keys
  void* tap;  // [tokens, hidden]: gets the states behind the layer; null: they are not kept
  LogitTerms terms;
  int64_t angles, query_angles;  // the numbers of those that turn keys and queries; -1: none do
  Xielu xielu;               // where the activation is that
  float scale;
  float residual_scale;      // of what a half gives
  int32_t activation;        // of up; see activations.cpp. 7: `xielu`
  int32_t gated;             // up holds gates and then what they are multiplied with
  int32_t parallel;          // both halves take the layer's input, and their results are added together
  int32_t interleaved;       // rotation turns neighbours
  int32_t head_norms;        // of query_norm and key_norm: 0 each head, 1 all heads of a token, 2 each head that is turned
  int32_t gated_queries;     // behind all query heads stands a gate as long for each: its sigmoid opens what attention gives
  int32_t halves;            // that it has: 1 attention, 2 the feed-forward half, 3 both
  int32_t head_gates;        // behind the values stands a gate of each query head: its sigmoid opens what attention gives
  float qkv_limit;           // of queries, keys and values; 0: none
  float output_scale;        // of the layer's sum, at its end
  int32_t values_are_keys;   // values are what qkv gives for keys, before these are normed and turned
  int32_t reads_others;      // qkv makes queries alone, for keys and values of another layer
};

struct StackCall {
  const Layer* layers;
  Norm input_norm;  // before the first layer
  const void* x;    // [tokens, k of the first product]: what it takes in place of the normed states; null: those
  void* states;     // [tokens, hidden]: the input; in the end the last sum, or where norms come last, its norm
  void* normed;     // [tokens, hidden]: in the end the norm of the last sum; null: norms come last
  const void* inputs;  // [tokens, input_stride]: what layers with an input gate get, one behind the other
  void* given;      // [tokens, hidden]: what the first half gives, which is then only added; null: it is computed
  // Scratch, of all tokens or those of a group.
  void* qkv;         // [tokens, qkv.n] or [tokens, beside.n], and where norms come last [tokens, hidden]
  void* attended;    // [tokens, out.k]; with latents also [tokens, heads, k + n] of their keys
  void* queries;     // with latents: [tokens, queries.n], and [tokens, heads, v_head_dim], what attention gives
  void* absorbed;    // with latents: [tokens, heads, head_dim], queries of them; and [tokens, heads, k + n] of values
  void* index;       // with an indexer: [tokens, size], [tokens, heads, size] and [tokens, heads]
  int32_t* chosen;   // with an indexer: [tokens, num_chosen], until the next one chooses
  void* up;          // [tokens, up.n], and [tokens, input_gate.gate.n]
  void* shared;      // [tokens, hidden], the output of the shared experts
  void* logits;      // [tokens, experts], of routers' dtype
  float* floats;     // [tokens, hidden], what routers of float32 take in layers of another dtype
  void* of_experts;  // see ExpertsCall
  void* aside;       // [tokens, hidden], what attention gives in parallel layers, or a mixer beside attention; and what
                     // experts take of the sum
  void* convolved;   // this one and the next two are of mixers of states: see `MixerCall`
  void* factors;
  float* numbers;
  int64_t* ids;      // [tokens, chosen]
  float* weights;    // [tokens, chosen]
  const Angles* angles;  // by number
  const int64_t* slots;
  const void* all_reduce;  // adds up the ranks' outputs of `out` and `down`, see `AllReduce`; null: they are whole
  const void* ranks;       // its first argument
  const AdapterRows* adapters;  // null: no row has one
  const int32_t* row_starts;    // of states, with `spans`; see `States`
  const int32_t* spans;
  int64_t num_rows, num_spans;
  int64_t hidden, input_stride;
  int64_t first_half, last_half;  // from the first to before the last: halves of layers, attention of layer i is 2 i
  int64_t group_tokens;     // whole prompts run in groups of this many tokens at most; 0: all requests run together
  AttentionCall attention;  // but for what differs between layers
};

EXPORT int pagewire_stack(const StackCall* call);

// ---- decode.cpp ----

// How the sequence of a slot goes on.
struct DecodeSlot {
  Draw draw;            // but for its position
  const int64_t* ends;  // tokens that end it, which must not come before it has `least` tokens
  int64_t num_ends, least;
  int64_t num_prompt;   // tokens of its prompt
  float repetition;     // penalties, see workers/sample/logit_edits.py; 1 and 0: none
  float frequency, presence;
  int32_t unused;
};

// The embeddings of tokens: rows of numbers, or of codes with scales.
struct EmbeddingRows {
  const void* rows;      // [vocab, hidden], or codes [vocab, hidden], of 4 bits [vocab, hidden / 2]
  const void* scales;    // [vocab, groups]
  const void* offsets;   // the same, or null
  const Integers* form;  // null: numbers
  int64_t row_bytes, scale_bytes;  // from row to row
  int64_t count;           // of rows
  float factor;            // of each number
  int32_t unused;
};

// What each layer gets of a token beside states: a row of a table, and a product of its embedding, normed.
struct LayerInputs {
  EmbeddingRows words;    // [vocab, projection.n]; without rows: there are none
  Matrix projection;      // of embeddings, to the inputs of all layers
  Norm norm;              // an RMS norm of a layer's part of the product, of `size` numbers
  int64_t size;
  void* looked_up;        // scratch [rows, projection.n]
  float projection_scale, scale;  // of the product, and of the sum
};

struct DecodeCall {
  const StackCall* stack;        // but for what differs between steps
  Matrix head;
  float logit_scale, softcap;    // see pagewire_cap
  EmbeddingRows embeddings;
  EmbeddingRows positions;       // numbers; without rows: there are none
  Norm norm;                     // of the sum of both
  LayerInputs inputs;
  const Angles* tables;          // of all positions, of each kind
  int64_t num_tables;
  // By slot.
  const DecodeSlot* sequences;
  int64_t* tokens;               // [slots, max_tokens]; those that are sampled are added
  int64_t* num_tokens;
  const int64_t* long_from;      // see `Slots`
  const int32_t* block_table;    // [slots, max_blocks]
  int64_t max_tokens, max_blocks;
  // Of the rows.
  const int64_t* slots;          // [rows]
  const int64_t* starts;         // [rows]: the place of the token that each runs first
  const int32_t* states;         // [rows, 2]: state slots that each reads, and writes in all steps; null: there are none
  int64_t rows, steps;
  void* logits;                  // scratch [rows, head.n]
  int64_t* chosen;               // [steps, rows]: the tokens sampled
  const int32_t* descriptors;    // a step that is not the first begins only while none of them can be read
  int64_t num_descriptors;       // at most 2
};

EXPORT int64_t pagewire_decode(const DecodeCall* call);

// ---- encode.cpp ----

// Whole prompts of an encoder.
struct EncodeCall {
  const StackCall* stack;  // but for what depends on the prompts
  EmbeddingRows words;
  EmbeddingRows types, positions;  // numbers; without rows: there are none
  Norm norm;                       // of the sum
  const Angles* tables;            // of all positions, of each kind
  int64_t num_tables;
  int64_t first_position, num_positions;
  const int64_t* tokens;           // [slots, max_tokens]
  int64_t max_tokens;
  // Of the prompts.
  const int64_t* slots;            // [rows]
  const int64_t* lengths;          // [rows]: tokens
  const int64_t* seconds;          // [rows]: the first token of the second text
  int64_t rows;
};

EXPORT int pagewire_encode(const EncodeCall* call);
