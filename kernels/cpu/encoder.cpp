// A stack of an encoder's layers in one call: attention to later tokens, too, then a feed-forward half, each added to its
// input. The sum's norm is what the next product takes, and where norms come last, what the next sum begins with.
//
// The same kernels in the same order as `encoder.EncoderStack.__call__` in Python, so the bits are the same. Prompts run
// through all layers in groups: what passes from kernel to kernel then stays in the processor's caches.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "matrix.h"

namespace {

// Some consecutive prompts of a call.
class PromptGroup {
 public:
  PromptGroup(const EncoderCall& call, int64_t first, int64_t last) : call_(call), batch_(call.attention) {
    const int64_t begin = call.attention.query_start_loc[first];
    for (int64_t i = first; i <= last; ++i) starts_.push_back(call.attention.query_start_loc[i] - int32_t(begin));
    element_ = batch_.dtype == 0 ? 4 : 2;
    first_ = begin;
    tokens_ = starts_.back();
    qkv_width_ = (batch_.num_heads + 2 * batch_.num_kv_heads) * batch_.head_dim;
    head_bytes_ = batch_.head_dim * element_;
    hidden_ = call.layers[0].out.n;
    x_ = static_cast<char*>(call.x) + begin * hidden_ * element_;
    slots_ = call.slots + begin;
    batch_.q = call.qkv;
    batch_.out = call.attended;
    batch_.query_start_loc = starts_.data();
    batch_.seq_lens += first;
    batch_.block_table += first * batch_.block_table_stride;
    batch_.num_tokens = tokens_;
    batch_.num_requests = last - first;
  }

  // As `pagewire_attention`; 2: a slot lies outside the cache.
  int run() {
    void* const between = call_.normed ? call_.normed : x_;  // what the products take
    const void* x = x_;
    if (call_.input_norm.weight) x = norm(call_.input_norm, x_, nullptr, nullptr, between);
    for (int64_t i = 0; i < call_.num_layers; ++i) {
      const EncoderLayer& layer = call_.layers[i];
      if (const int failure = attend(layer, x)) return failure;
      x = add_norm(layer.attention_norm, between);
      feed_forward(layer, x);
      x = add_norm(layer.output_norm, i + 1 < call_.num_layers ? between : x_);
    }
    return 0;
  }

 private:
  int attend(const EncoderLayer& layer, const void* x) {
    multiply(layer.qkv, x, layer.qkv.k, call_.qkv);
    char* const q = static_cast<char*>(call_.qkv);
    char* const k = q + batch_.num_heads * head_bytes_;
    char* const v = k + batch_.num_kv_heads * head_bytes_;
    if (layer.angles >= 0) {
      rotate(q, batch_.num_heads, call_.angles[layer.angles]);
      rotate(k, batch_.num_kv_heads, call_.angles[layer.angles]);
    }
    if (keep(k, batch_.k_cache, batch_.k_block_stride, batch_.k_head_stride, false) ||
        keep(v, batch_.v_cache, batch_.v_block_stride, batch_.v_head_stride, true))
      return 2;
    batch_.scale = layer.scale;
    batch_.relative_bias = layer.relative_bias;
    batch_.window = layer.window;
    batch_.future = layer.window ? layer.window - 1 : call_.attention.future;
    if (const int failure = pagewire_attention(&batch_)) return failure;
    multiply(layer.out, call_.attended, layer.out.k, call_.qkv);
    return 0;
  }

  void feed_forward(const EncoderLayer& layer, const void* x) const {
    multiply(layer.up, x, layer.up.k, call_.up);
    if (layer.gated)
      pagewire_activate(call_.up, call_.up, tokens_, layer.down.k, layer.up.n, layer.up.n, layer.activation, batch_.dtype,
                        batch_.num_threads);
    else
      pagewire_activate_each(call_.up, call_.up, tokens_, layer.up.n, layer.activation, batch_.dtype,
                             batch_.num_threads);
    multiply(layer.down, call_.up, layer.up.n, call_.qkv);
  }

  void multiply(const Matrix& matrix, const void* x, int64_t x_stride, void* out) const {
    ::multiply(matrix, x, x_stride, out, tokens_, batch_.dtype, batch_.num_threads);
  }

  void rotate(char* heads, int64_t count, const Angles& angles) const {
    const int64_t size = 2 * call_.rotary_half, before = first_ * size * element_;
    pagewire_rotary(heads, static_cast<const char*>(angles.cos) + before, static_cast<const char*>(angles.sin) + before,
                    tokens_, count, call_.rotary_half, qkv_width_, batch_.head_dim, size, size, batch_.dtype,
                    batch_.num_threads);
  }

  int keep(const char* heads, const void* cache, int64_t block_stride, int64_t head_stride, bool values) const {
    return pagewire_store(heads, const_cast<void*>(cache), slots_, tokens_, batch_.num_kv_heads, batch_.head_dim,
                          qkv_width_, batch_.head_dim, block_stride, head_stride, batch_.num_blocks, batch_.block_size,
                          values, batch_.dtype, batch_.cache_dtype, batch_.num_threads);
  }

  // The norm of what the last product gave and x, of which the sum or its norm stays in x. Returns `out`.
  const void* add_norm(const LayerNorm& parameters, void* out) const {
    return norm(parameters, call_.qkv, x_, call_.normed ? x_ : nullptr, out);
  }

  const void* norm(const LayerNorm& parameters, const void* x, const void* residual, void* sum, void* out) const {
    pagewire_layer_norm(x, residual, parameters.weight, parameters.bias, sum, out, tokens_, hidden_, parameters.eps,
                        batch_.dtype, batch_.num_threads);
    return out;
  }

  const EncoderCall& call_;
  AttentionCall batch_;
  std::vector<int32_t> starts_;
  int64_t element_, first_, tokens_, hidden_, qkv_width_, head_bytes_;
  char* x_;
  const int64_t* slots_;
};

}  // namespace

// Returns 0; 1 if the batch does not fit its tensors, or a group's prompts the scratch; 2 if a slot lies outside the
// cache.
EXPORT int pagewire_encoder(const EncoderCall* call) {
  const AttentionCall& batch = call->attention;
  const int32_t* const starts = batch.query_start_loc;
  if (starts[0] != 0 || starts[batch.num_requests] != batch.num_tokens) return 1;
  for (int64_t i = 0; i < batch.num_requests; ++i)
    if (starts[i + 1] < starts[i] || starts[i + 1] - starts[i] > call->group_tokens) return 1;
  for (int64_t first = 0, last; first < batch.num_requests; first = last) {
    for (last = first + 1; last < batch.num_requests && starts[last + 1] - starts[first] <= call->group_tokens;) ++last;
    if (const int failure = PromptGroup(*call, first, last).run()) return failure;
  }
  return 0;
}
