// A stack of Llama-like layers in one call: nothing but kernels runs between the first and the last.
//
// The same kernels in the same order as `decoder.Stack.__call__` in Python, so the bits are the same.

#include "kernels.h"
#include "matrix.h"

namespace {

// x[n] of each rank becomes the sum of all ranks'.
using AllReduce = void (*)(const void* ranks, void* x, int64_t n, int32_t dtype, int32_t num_threads);

class Stack {
 public:
  explicit Stack(const StackCall& call)
      : call_(call),
        batch_(call.attention),
        tokens_(batch_.num_tokens),
        element_(batch_.dtype == 0 ? 4 : 2),
        qkv_width_((batch_.num_heads + 2 * batch_.num_kv_heads) * batch_.head_dim) {}

  // As `pagewire_attention`; 2: a slot lies outside the cache.
  int run() const {
    first_norm(call_.input_norm, call_.layers[0].qkv.k);
    for (int64_t i = 0; i < call_.num_layers; ++i) {
      const Layer& layer = call_.layers[i];
      if (const int failure = attend(layer)) return failure;
      add_up(layer.out.n);
      add_norm(layer.attention_norm, layer.out.n);
      if (const int failure = feed_forward(layer)) return failure;
      add_up(layer.out.n);
      add_norm(layer.next_norm, layer.out.n);
    }
    return 0;
  }

 private:
  int attend(const Layer& layer) const {
    multiply(first_product(layer), layer.qkv, call_.x, call_.qkv);
    char* q = static_cast<char*>(call_.qkv);
    char* k = q + batch_.num_heads * batch_.head_dim * element_;
    char* v = k + batch_.num_kv_heads * batch_.head_dim * element_;
    turn(layer.query_norm, q, batch_.num_heads);
    turn(layer.key_norm, k, batch_.num_kv_heads);

    AttentionCall attention = batch_;
    attention.q = q;
    attention.k_cache = layer.k_cache;
    attention.v_cache = layer.v_cache;
    attention.out = call_.attended;
    attention.window = layer.window;
    attention.scale = layer.scale;
    if (keep(k, layer.k_cache, batch_.k_block_stride, batch_.k_head_stride, false) ||
        keep(v, layer.v_cache, batch_.v_block_stride, batch_.v_head_stride, true))
      return 2;
    if (const int failure = pagewire_attention(&attention)) return failure;
    multiply(first_product(layer) + 1, layer.out, call_.attended, call_.x);
    return 0;
  }

  int feed_forward(const Layer& layer) const {
    if (layer.mixture.router.packed) return run_mixture(layer, layer.mixture);
    run_feed_forward(layer, call_.x);
    return 0;
  }

  void run_feed_forward(const Layer& layer, void* out) const {
    multiply(first_product(layer) + 2, layer.gate_up, call_.x, call_.gate_up);
    pagewire_activate(call_.gate_up, call_.gated, tokens_, layer.down.k, layer.gate_up.n, layer.down.k, layer.activation,
                      batch_.dtype, batch_.num_threads);
    multiply(first_product(layer) + 3, layer.down, call_.gated, out);
  }

  int run_mixture(const Layer& layer, const Mixture& mixture) const {
    const bool is_shared = mixture.shared_gate.packed;
    if (is_shared) run_feed_forward(layer, call_.shared);
    multiply(mixture.first_product, mixture.router, call_.x, call_.logits);
    pagewire_route(call_.logits, call_.ids, call_.weights, tokens_, mixture.experts.count, mixture.num_chosen,
                   mixture.normalised, mixture.rounded, batch_.dtype);
    if (is_shared) multiply(mixture.first_product + 1, mixture.shared_gate, call_.x, call_.logits);
    const ExpertsCall experts{call_.x, call_.ids, call_.weights, call_.x, call_.of_experts,
                              tokens_, mixture.num_chosen, batch_.dtype, batch_.num_threads,
                              call_.adapters, mixture.first_product + 2};
    const int failure = pagewire_experts(&mixture.experts, &experts);
    if (is_shared)
      pagewire_add_gated(call_.x, call_.shared, call_.logits, tokens_, layer.down.n, batch_.dtype, batch_.num_threads);
    return failure;
  }

  // The number of a layer's first product, `qkv`.
  int64_t first_product(const Layer& layer) const { return 4 * (&layer - call_.layers); }

  // A product, with what adapters change in it.
  void multiply(int64_t product, const Matrix& matrix, const void* x, void* out) const {
    ::multiply(matrix, x, matrix.k, out, tokens_, batch_.dtype, batch_.num_threads);
    if (!call_.adapters) return;
    const AdaptCall adapt{call_.adapters, x, out, product, matrix.k, matrix.n, matrix.k, batch_.dtype,
                          batch_.num_threads};
    pagewire_adapt(&adapt);
  }

  // x[tokens, size] of this rank becomes the sum of all ranks'.
  void add_up(int64_t size) const {
    if (!call_.all_reduce) return;
    const auto all_reduce = reinterpret_cast<AllReduce>(const_cast<void*>(call_.all_reduce));
    all_reduce(call_.ranks, call_.x, tokens_ * size, batch_.dtype, batch_.num_threads);
  }

  // Norm of each head, where there is one, and rotary embedding.
  void turn(const Norm& norm, char* heads, int64_t count) const {
    if (norm.weight)
      pagewire_rms_norm(heads, norm.weight, heads, tokens_, count, batch_.head_dim, qkv_width_, batch_.head_dim,
                        qkv_width_, batch_.head_dim, norm.eps, norm.offset, batch_.dtype, batch_.num_threads);
    pagewire_rotary(heads, call_.cos, call_.sin, tokens_, count, call_.rotary_half, qkv_width_, batch_.head_dim,
                    2 * call_.rotary_half, 2 * call_.rotary_half, batch_.dtype, batch_.num_threads);
  }

  int keep(const char* heads, char* cache, int64_t block_stride, int64_t head_stride, bool values) const {
    return pagewire_store(heads, cache, call_.slots, tokens_, batch_.num_kv_heads, batch_.head_dim, qkv_width_,
                          batch_.head_dim, block_stride, head_stride, batch_.num_blocks, batch_.block_size, values,
                          batch_.dtype, batch_.cache_dtype, batch_.num_threads);
  }

  void first_norm(const Norm& norm, int64_t size) const {
    pagewire_rms_norm(call_.residual, norm.weight, call_.x, tokens_, 1, size, size, size, size, size, norm.eps,
                      norm.offset, batch_.dtype, batch_.num_threads);
  }

  void add_norm(const Norm& norm, int64_t size) const {
    pagewire_add_rms_norm(call_.x, call_.residual, norm.weight, call_.x, tokens_, size, norm.eps, norm.offset,
                          batch_.dtype, batch_.num_threads);
  }

  const StackCall& call_;
  const AttentionCall& batch_;
  const int64_t tokens_, element_, qkv_width_;
};

}  // namespace

EXPORT int pagewire_decoder(const StackCall* call) { return Stack(*call).run(); }
