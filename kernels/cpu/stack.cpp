// A stack of layers in one call: nothing but kernels runs between the first and the last.
//
// The same kernels in the same order as `Stack.__call__` in Python, so the bits are the same.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "matrix.h"

namespace {

constexpr int32_t kXielu = 7;  // the activation whose parameters a layer has

// x[n] of each rank becomes the sum of all ranks'.
using AllReduce = void (*)(const void* ranks, void* x, int64_t n, int32_t dtype, int32_t num_threads);

// Some consecutive requests of a call, or all of them.
class Requests {
 public:
  explicit Requests(const StackCall& call)
      : call_(call),
        batch_(call.attention),
        tokens_(batch_.num_tokens),
        hidden_(call.hidden),
        element_(batch_.dtype == 0 ? 4 : 2),
        states_(static_cast<char*>(call.states)),
        normed_(static_cast<char*>(call.normed)),
        slots_(call.slots) {
    batch_.out = call.attended;
  }

  // Those from `first` to before `last`.
  Requests(const StackCall& call, int64_t first, int64_t last) : Requests(call) {
    const int32_t* const starts = batch_.query_start_loc;
    for (int64_t i = first; i <= last; ++i) starts_.push_back(starts[i] - starts[first]);
    first_token_ = starts[first];
    tokens_ = starts_.back();
    states_ += first_token_ * hidden_ * element_;
    if (normed_) normed_ += first_token_ * hidden_ * element_;
    slots_ += first_token_;
    batch_.query_start_loc = starts_.data();
    batch_.seq_lens += first;
    batch_.block_table += first * batch_.block_table_stride;
    batch_.num_tokens = tokens_;
    batch_.num_requests = last - first;
  }

  // As `pagewire_attention`; 2: a slot lies outside the cache.
  int run() {
    int64_t half = call_.first_half;
    const void* x = call_.given ? add(half++, call_.given) : first_input();
    for (; half < call_.last_half; ++half) {
      const Layer& layer = call_.layers[half / 2];
      if (!has(half)) continue;
      const bool aside = layer.parallel && half % 2 == 0;  // what attention gives waits for the other half
      if (const int failure = half % 2 ? feed_forward(layer, x) : attend(layer, x, aside ? call_.aside : result()))
        return failure;
      if (aside)
        x = layer.attention_norm.weight ? norm(layer.attention_norm, states_, normed()) : x;
      else
        x = add(half, result());
    }
    return 0;
  }

 private:
  bool has(int64_t half) const { return call_.layers[half / 2].halves & (half % 2 ? 2 : 1); }

  // The last half that its layer has.
  bool is_last(int64_t half) const { return half % 2 || !has(half + 1); }

  // What products take: the normed states, which are the states themselves where norms come last.
  void* normed() const { return normed_ ? normed_ : states_; }

  // Where a half's last product goes until it is added: to what it was made of, or to scratch if those are the states.
  void* result() const { return normed_ ? normed_ : call_.qkv; }

  // Adds what a half gives to the states, and norms the sum.
  const void* add(int64_t half, void* given) const {
    const Layer& layer = call_.layers[half / 2];
    const void* x = add_norm(layer, half, given);
    if (!is_last(half)) return x;
    if (ends(layer)) x = end(layer);
    const int64_t size = hidden_ * element_;
    if (layer.tap) std::copy_n(states_, tokens_ * size, static_cast<char*>(layer.tap) + first_token_ * size);
    return x;
  }

  // True if something is done to the layer's sum at its end.
  static bool ends(const Layer& layer) { return layer.input_gate.gate.packed || layer.output_scale != 1; }

  // Does it, and norms the sum.
  const void* end(const Layer& layer) const {
    const int64_t size = tokens_ * hidden_;
    if (const InputGate& own = layer.input_gate; own.gate.packed) {
      const int64_t before = first_token_ * call_.input_stride + own.number * own.gate.n;
      multiply(own.gate, states_, hidden_, call_.up);
      activate_each(layer, own.gate.n);
      pagewire_multiply_rows(call_.up, static_cast<const char*>(call_.inputs) + before * element_, tokens_, own.gate.n,
                             call_.input_stride, batch_.dtype, batch_.num_threads);
      multiply(own.out, call_.up, own.gate.n, result());
      pagewire_add_scaled(norm(own.norm, result(), result()), states_, size, 1, batch_.dtype, batch_.num_threads);
    }
    if (layer.output_scale != 1)
      pagewire_cap(states_, size, layer.output_scale, 0, batch_.dtype, batch_.num_threads);
    return layer.output_norm.weight ? norm(layer.output_norm, states_, normed()) : states_;
  }

  // What attention, or a mixer in its place, makes of x; or the sum of both.
  int attend(const Layer& layer, const void* x, void* out) {
    const bool both = layer.beside.packed;
    if (both) {
      multiply(layer.beside, x, layer.beside.k, call_.qkv);
      if (const int failure = mix(layer, x, layer.beside.n)) return failure;
      multiply(layer.beside_out, call_.attended, layer.beside_out.k, call_.aside);
    }
    multiply(layer.qkv, x, layer.qkv.k, call_.qkv);
    if (const int failure = run_attention(layer, x)) return failure;
    norm_input(layer.out_norm, call_.attended, layer.out.k, layer.out.k);
    multiply(layer.out, call_.attended, layer.out.k, out);
    if (both) pagewire_add_scaled(call_.aside, out, tokens_ * hidden_, 1, batch_.dtype, batch_.num_threads);
    return 0;
  }

  // From the layer's first product to what its last one takes.
  int run_attention(const Layer& layer, const void* x) {
    if (layer.mixer.kind && !layer.beside.packed) return mix(layer, x, layer.qkv.n);
    take_sizes(layer.sizes);
    return layer.latents.keys ? attend_to_latents(layer, layer.latents, x) : attend_heads(layer);
  }

  // What a mixer makes of `qkv`, whose rows are given_stride numbers apart.
  int mix(const Layer& layer, const void* x, int64_t given_stride) const {
    const MixerCall mixer{x, call_.qkv, call_.attended, call_.convolved, call_.factors, call_.numbers, call_.adapters,
                          call_.row_starts, call_.spans, call_.num_rows, call_.num_spans, tokens_, given_stride,
                          batch_.dtype, batch_.num_threads};
    return pagewire_mix(&layer.mixer, &mixer);
  }

  void take_sizes(const AttentionSizes& sizes) {
    batch_.num_heads = sizes.num_heads;
    batch_.num_kv_heads = sizes.num_kv_heads;
    batch_.head_dim = sizes.head_dim;
    batch_.v_head_dim = sizes.v_head_dim;
    batch_.k_block_stride = sizes.k_block_stride;
    batch_.k_head_stride = sizes.k_head_stride;
    batch_.v_block_stride = sizes.v_block_stride;
    batch_.v_head_stride = sizes.v_head_stride;
  }

  int attend_heads(const Layer& layer) {
    const int64_t size = batch_.head_dim, queries = batch_.num_heads * size * element_;
    const int64_t keys = batch_.num_kv_heads * size * element_;
    if (layer.qkv_limit != 0)
      pagewire_clamp(call_.qkv, tokens_ * layer.qkv.n, layer.qkv_limit, batch_.dtype, batch_.num_threads);
    char* const q = static_cast<char*>(call_.qkv);
    char* const gates = q + queries;  // where there are some
    char* const k = layer.gated_queries ? gates + queries : gates;
    turn(layer, layer.query_norm, layer.query_angles, q, batch_.num_heads);
    if (!layer.reads_others && !keep_heads(layer, k, layer.values_are_keys ? k : k + keys)) return 2;
    if (const int failure = attend_to_cache(layer, q, layer.qkv.n, size, call_.attended)) return failure;
    if (layer.gated_queries || layer.head_gates) {
      const OutputGate form{nullptr, size, 0, 0, 1, 0, layer.head_gates};
      const int64_t made = layer.reads_others ? 0 : layer.values_are_keys ? keys : 2 * keys;
      const char* const opening = layer.head_gates ? k + made : gates;
      pagewire_open_by(call_.attended, opening, call_.attended, tokens_, batch_.num_heads, layer.qkv.n,
                       layer.head_gates ? 1 : size, &form, batch_.dtype, batch_.num_threads);
    }
    return 0;
  }

  // Stores keys and values [tokens, heads, head_dim] of the layer's qkv; false if a slot lies outside the cache. Values come
  // first, as they may be keys that are not normed and turned yet.
  bool keep_heads(const Layer& layer, char* k, const char* v) const {
    const int64_t heads = batch_.num_kv_heads, size = batch_.head_dim;
    int64_t stride = layer.qkv.n;
    if (const Norm& norm = layer.value_norm; norm.weight) {
      pagewire_rms_norm(v, norm.weight, call_.attended, tokens_, heads, size, stride, size, heads * size, size, norm.eps,
                        norm.offset, batch_.dtype, batch_.num_threads);
      v = static_cast<const char*>(call_.attended);
      stride = heads * size;
    }
    if (keep(v, stride, layer.v_cache, batch_.v_block_stride, batch_.v_head_stride, true)) return false;
    turn(layer, layer.key_norm, layer.angles, k, heads);
    return !keep(k, layer.qkv.n, layer.k_cache, batch_.k_block_stride, batch_.k_head_stride, false);
  }

  int attend_to_latents(const Layer& layer, const Latents& latents, const void* x) {
    const int64_t heads = batch_.num_heads, size = batch_.head_dim, rank = latents.keys->n, nope = latents.keys->k;
    const int64_t before = layer.qkv.n - size;  // what stands before a token's latent in qkv
    char* const latent = static_cast<char*>(call_.qkv) + before * element_;
    char* queries = static_cast<char*>(call_.qkv);
    int64_t stride = layer.qkv.n;
    norm_heads(latents.query_norm, queries, 1, before, stride, before);
    if (latents.indexer.num_chosen && !choose(layer, latents.indexer, x)) return 1;
    if (latents.queries.packed) {
      multiply(latents.queries, queries, stride, call_.queries);
      queries = static_cast<char*>(call_.queries);
      stride = latents.queries.n;
    }
    const int64_t rope = size - rank, head_stride = nope + rope;
    norm_heads(latents.norm, latent, 1, rank, layer.qkv.n, rank);
    if (layer.angles >= 0) {
      rotate(call_.angles[layer.angles], queries + nope * element_, heads, stride, head_stride, layer.interleaved);
      rotate(call_.angles[layer.angles], latent + rank * element_, 1, layer.qkv.n, rope, layer.interleaved);
    }
    if (keep(latent, layer.qkv.n, layer.k_cache, batch_.k_block_stride, batch_.k_head_stride, false)) return 2;
    multiply_heads(latents.keys, queries, stride, head_stride, rope, call_.attended, call_.absorbed);
    const int failure = attend_to_cache(layer, call_.absorbed, heads * size, size, call_.queries);
    if (failure) return failure;
    multiply_heads(latents.values, call_.queries, heads * rank, rank, 0, call_.absorbed, call_.attended);
    return 0;
  }

  // Lets an indexer choose what tokens see in this layer, and in those that follow it; false if the batch does not fit.
  // The layer's qkv begins with what queries are made of.
  bool choose(const Layer& layer, const Indexer& indexer, const void* x) {
    const int64_t size = indexer.keys.n, heads = indexer.weights.n;
    char* const keys = static_cast<char*>(call_.index);
    char* const queries = keys + tokens_ * size * element_;
    char* const weights = queries + tokens_ * heads * size * element_;
    multiply(indexer.keys, x, layer.qkv.k, keys);
    pagewire_layer_norm(keys, nullptr, indexer.norm.weight, indexer.norm.bias, nullptr, keys, tokens_, size,
                        indexer.norm.eps, batch_.dtype, batch_.num_threads);
    multiply(indexer.queries, call_.qkv, layer.qkv.n, queries);
    multiply(indexer.weights, x, layer.qkv.k, weights);
    if (layer.angles >= 0) {
      rotate(call_.angles[layer.angles], queries, heads, heads * size, size, indexer.interleaved);
      rotate(call_.angles[layer.angles], keys, 1, size, size, indexer.interleaved);
    }
    const ChooseCall call{queries, keys, weights, layer.index_cache, call_.chosen, slots_, batch_.query_start_loc,
                          batch_.seq_lens, batch_.block_table, batch_.block_table_stride, tokens_, batch_.num_requests,
                          heads, size, indexer.num_chosen, batch_.num_blocks, batch_.block_size, batch_.max_blocks,
                          float(std::pow(double(size), -0.5)), float(std::pow(double(heads), -0.5)), batch_.dtype,
                          batch_.num_threads};
    const int found = pagewire_choose(&call);
    chosen_ = found > 0 ? call_.chosen : nullptr;
    num_chosen_ = indexer.num_chosen;
    return found >= 0;
  }

  // Attention of queries [tokens, heads, head_dim], with these strides, to what the layer has cached.
  int attend_to_cache(const Layer& layer, const void* q, int64_t token_stride, int64_t head_stride, void* out) {
    batch_.q = q;
    batch_.q_token_stride = token_stride;
    batch_.q_head_stride = head_stride;
    batch_.out = out;
    batch_.k_cache = layer.k_cache;
    batch_.v_cache = layer.v_cache;
    batch_.terms = layer.terms;
    if (layer.latents.indexer.num_chosen || layer.latents.follows) {
      batch_.terms.chosen = chosen_;
      batch_.terms.num_chosen = num_chosen_;
    }
    batch_.scale = layer.scale;
    return pagewire_attention(&batch_);
  }

  // x [tokens, heads, k + rest] times a matrix of each head, to `out` [tokens, heads, n + rest], contiguous.
  void multiply_heads(const Matrix* matrices, const void* x, int64_t x_stride, int64_t x_head_stride, int64_t rest,
                      void* scratch, void* out) const {
    const int64_t heads = batch_.num_heads, size = matrices->n + rest;
    const HeadsCall call{matrices, x, out, scratch, tokens_, heads, x_stride, x_head_stride, heads * size, size,
                         rest, batch_.dtype, batch_.num_threads};
    pagewire_heads(&call);
  }

  int feed_forward(const Layer& layer, const void* x) const {
    if (layer.mixture.router.packed) return run_mixture(layer, layer.mixture, x);
    run_feed_forward(layer, x, result());
    return 0;
  }

  void run_feed_forward(const Layer& layer, const void* x, void* out) const {
    multiply(layer.up, x, layer.up.k, call_.up);
    activate(layer);
    norm_input(layer.down_norm, call_.up, layer.down.k, layer.up.n);
    multiply(layer.down, call_.up, layer.up.n, out);
  }

  // Makes what `down` takes of what `up` gives: rows as far apart as before.
  void activate(const Layer& layer) const {
    if (layer.gated)
      pagewire_activate(call_.up, call_.up, tokens_, layer.down.k, layer.up.n, layer.up.n, layer.activation,
                        batch_.dtype, batch_.num_threads);
    else
      activate_each(layer, layer.up.n);
  }

  // Of each number by itself in rows [size] of `up`.
  void activate_each(const Layer& layer, int64_t size) const {
    if (layer.activation == kXielu)
      pagewire_xielu(call_.up, call_.up, tokens_, size, &layer.xielu, batch_.dtype, batch_.num_threads);
    else
      pagewire_activate_each(call_.up, call_.up, tokens_, size, layer.activation, batch_.dtype, batch_.num_threads);
  }

  // Norms the first `size` numbers of rows, where there is a norm.
  void norm_input(const Norm& norm, void* x, int64_t size, int64_t stride) const {
    if (norm.weight)
      pagewire_rms_norm(x, norm.weight, x, tokens_, 1, size, stride, size, stride, size, norm.eps, norm.offset,
                        batch_.dtype, batch_.num_threads);
  }

  int run_mixture(const Layer& layer, const Mixture& mixture, const void* x) const {
    const bool is_shared = layer.up.packed, is_gated = mixture.shared_gate.packed;
    if (is_shared) run_feed_forward(layer, x, call_.shared);
    if (mixture.of_sum.norm.weight) return add_dense(mixture, mixture.of_sum);
    route(mixture, x);
    if (is_gated) multiply(mixture.shared_gate, x, hidden_, call_.logits);
    const int failure = run_experts(mixture, x);
    if (is_gated)
      pagewire_add_gated(result(), call_.shared, call_.logits, tokens_, hidden_, batch_.dtype, batch_.num_threads);
    else if (is_shared)
      pagewire_add_scaled(call_.shared, result(), tokens_ * hidden_, 1, batch_.dtype, batch_.num_threads);
    return failure;
  }

  int run_experts(const Mixture& mixture, const void* x) const {
    const ExpertsCall experts{x, call_.ids, call_.weights, result(), call_.of_experts,
                              tokens_, mixture.routing.num_chosen, batch_.dtype, batch_.num_threads,
                              call_.adapters};
    return pagewire_experts(&mixture.experts, &experts);
  }

  // What experts make of the sum, normed, and added to what the dense half beside them has made: both of all ranks.
  int add_dense(const Mixture& mixture, const SumTaker& own) const {
    const int64_t size = tokens_ * hidden_;
    norm(own.router_norm, states_, call_.aside);
    pagewire_multiply_rows(call_.aside, own.router_scale, tokens_, hidden_, 0, batch_.dtype, batch_.num_threads);
    pagewire_cap(call_.aside, size, own.router_factor, 0, batch_.dtype, batch_.num_threads);
    route(mixture, call_.aside);
    for (int64_t i = 0; i < tokens_ * mixture.routing.num_chosen; ++i)
      call_.weights[i] *= own.expert_scales[call_.ids[i]];
    const int failure = run_experts(mixture, norm(own.norm, states_, call_.aside));
    if (failure) return failure;
    for (void* const x : {result(), call_.shared}) all_reduce(x);
    norm(own.dense_norm, call_.shared, call_.shared);
    norm(own.given_norm, result(), result());
    pagewire_add_scaled(call_.shared, result(), size, 1, batch_.dtype, batch_.num_threads);
    return 0;
  }

  // x [tokens, hidden] becomes the sum of all ranks'.
  void all_reduce(void* x) const {
    if (call_.all_reduce)
      reinterpret_cast<AllReduce>(const_cast<void*>(call_.all_reduce))(call_.ranks, x, tokens_ * hidden_, batch_.dtype,
                                                                       batch_.num_threads);
  }

  // Chooses experts. Routers of float32 have no adapters in layers of another dtype.
  void route(const Mixture& mixture, const void* x) const {
    const Routing& routing = mixture.routing;
    if (routing.logit_dtype == batch_.dtype) {
      multiply(mixture.router, x, hidden_, call_.logits);
    } else {
      pagewire_floats(x, call_.floats, tokens_ * hidden_, batch_.dtype, batch_.num_threads);
      ::multiply(mixture.router, call_.floats, hidden_, call_.logits, tokens_, routing.logit_dtype, batch_.num_threads);
    }
    pagewire_route(call_.logits, call_.ids, call_.weights, tokens_, mixture.experts.count, &routing, routing.logit_dtype);
  }

  void multiply(const Matrix& matrix, const void* x, int64_t x_stride, void* out) const {
    ::multiply(matrix, x, x_stride, out, tokens_, call_.adapters, batch_.dtype, batch_.num_threads);
  }

  // Norms of queries or keys, where there are some, and rotary embedding, where the layer has angles.
  void turn(const Layer& layer, const Norm& norm, int64_t angles, char* heads, int64_t count) const {
    const int64_t stride = layer.qkv.n, size = batch_.head_dim;
    if (layer.head_norms == 1)
      norm_heads(norm, heads, 1, count * size, stride, size);
    else if (layer.head_norms == 0)
      norm_heads(norm, heads, count, size, stride, size);
    if (angles >= 0)
      rotate(call_.angles[angles], heads, count, stride, size, layer.interleaved && layer.angles >= 0);
    if (layer.head_norms == 2) norm_heads(norm, heads, count, size, stride, size);
  }

  // Heads [tokens, count, size], with these strides; without a weight they stay as they are. Those of layer norms lie
  // side by side.
  void norm_heads(const Norm& norm, char* heads, int64_t count, int64_t size, int64_t stride, int64_t head_stride) const {
    if (norm.weight && norm.centred)
      pagewire_head_layer_norm(heads, norm.weight, norm.bias, tokens_, count, size, stride, norm.eps, batch_.dtype,
                               batch_.num_threads);
    else if (norm.weight)
      pagewire_rms_norm(heads, norm.weight, heads, tokens_, count, size, stride, head_stride, stride, head_stride, norm.eps,
                        norm.offset, batch_.dtype, batch_.num_threads);
  }

  void rotate(const Angles& angles, char* heads, int64_t count, int64_t stride, int64_t head_stride,
              bool interleaved) const {
    const int64_t size = 2 * angles.half, before = first_token_ * size * element_;
    if (interleaved)
      pagewire_by_halves(heads, tokens_, count, angles.half, stride, head_stride, batch_.dtype, batch_.num_threads);
    pagewire_rotary(heads, static_cast<const char*>(angles.cos) + before, static_cast<const char*>(angles.sin) + before,
                    tokens_, count, angles.half, stride, head_stride, size, size, batch_.dtype,
                    batch_.num_threads);
  }

  int keep(const char* heads, int64_t stride, void* cache, int64_t block_stride, int64_t head_stride,
           bool values) const {
    return pagewire_store(heads, cache, slots_, tokens_, batch_.num_kv_heads, batch_.head_dim, stride, batch_.head_dim,
                          block_stride, head_stride, batch_.num_blocks, batch_.block_size, values, batch_.dtype,
                          batch_.cache_dtype, batch_.num_threads);
  }

  // What the first product takes.
  const void* first_input() const {
    if (call_.x) return static_cast<const char*>(call_.x) + first_token_ * call_.layers[0].qkv.k * element_;
    return call_.input_norm.weight ? norm(call_.input_norm, states_, normed()) : states_;
  }

  // What a norm makes of x [tokens, hidden], in `out`, which may be x.
  const void* norm(const Norm& norm, const void* x, void* out) const {
    if (norm.centred)
      pagewire_layer_norm(x, nullptr, norm.weight, norm.bias, nullptr, out, tokens_, hidden_, norm.eps, batch_.dtype,
                          batch_.num_threads);
    else
      pagewire_rms_norm(x, norm.weight, out, tokens_, 1, hidden_, hidden_, hidden_, hidden_, hidden_, norm.eps,
                        norm.offset, batch_.dtype, batch_.num_threads);
    return out;
  }

  // Adds the result of a half, of all ranks, to the states, and norms the sum, if it is not changed before. An RMS norm
  // never comes last. Halves that compute themselves, and experts beside a dense half, give what is of all ranks already.
  const void* add_norm(const Layer& layer, int64_t half, void* given) const {
    if (layer.parallel) pagewire_add_scaled(call_.aside, given, tokens_ * hidden_, 1, batch_.dtype, batch_.num_threads);
    if (given != call_.given && !(half % 2 && layer.mixture.of_sum.norm.weight)) all_reduce(given);
    const Norm& own = half % 2 ? layer.fed_norm : layer.attended_norm;
    const Norm none{};
    const Norm& next = !is_last(half) ? layer.attention_norm : ends(layer) ? none : layer.output_norm;
    if (own.weight) norm(own, given, given);
    const bool is_plain = layer.residual_scale == 1;
    if (!next.weight || !is_plain)
      pagewire_add_scaled(given, states_, tokens_ * hidden_, layer.residual_scale, batch_.dtype, batch_.num_threads);
    if (!next.weight) return states_;
    if (!is_plain) return norm(next, states_, normed());
    if (next.centred)
      pagewire_layer_norm(given, states_, next.weight, next.bias, normed_ ? states_ : nullptr, normed(), tokens_,
                          hidden_, next.eps, batch_.dtype, batch_.num_threads);
    else
      pagewire_add_rms_norm(given, states_, next.weight, normed(), tokens_, hidden_, next.eps, next.offset, batch_.dtype,
                            batch_.num_threads);
    return normed();
  }

  const StackCall& call_;
  AttentionCall batch_;
  std::vector<int32_t> starts_;
  int64_t first_token_ = 0, tokens_, hidden_, element_;
  char *states_, *normed_;
  const int64_t* slots_;
  const int32_t* chosen_ = nullptr;  // what tokens see, see `LogitTerms`; null: all keys
  int64_t num_chosen_ = 0;
};

}  // namespace

// Returns 0; 1 if the batch does not fit its tensors, or a group's prompts the scratch; 2 if a slot lies outside the
// cache.
//
// Whole prompts run through all layers in groups: what passes from kernel to kernel then stays in the processor's caches.
EXPORT int pagewire_stack(const StackCall* call) {
  if (!call->group_tokens) return Requests(*call).run();
  const AttentionCall& batch = call->attention;
  const int32_t* const starts = batch.query_start_loc;
  if (starts[0] != 0 || starts[batch.num_requests] != batch.num_tokens) return 1;
  for (int64_t i = 0; i < batch.num_requests; ++i)
    if (starts[i + 1] < starts[i] || starts[i + 1] - starts[i] > call->group_tokens) return 1;
  for (int64_t first = 0, last; first < batch.num_requests; first = last) {
    for (last = first + 1; last < batch.num_requests && starts[last + 1] - starts[first] <= call->group_tokens;) ++last;
    if (const int failure = Requests(*call, first, last).run()) return failure;
  }
  return 0;
}
