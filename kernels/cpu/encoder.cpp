// A stack of an encoder's layers in one call: attention to all tokens of a prompt, then a feed-forward half, each added
// to its input and normed.
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
    const int64_t element = batch_.dtype == 0 ? 4 : 2, hidden = call.layers[0].out.n, angles = 2 * call.rotary_half;
    tokens_ = starts_.back();
    qkv_width_ = (batch_.num_heads + 2 * batch_.num_kv_heads) * batch_.head_dim;
    head_bytes_ = batch_.head_dim * element;
    x_ = static_cast<char*>(call.x) + begin * hidden * element;
    if (call.cos) {
      cos_ = static_cast<const char*>(call.cos) + begin * angles * element;
      sin_ = static_cast<const char*>(call.sin) + begin * angles * element;
    }
    slots_ = call.slots + begin;
    batch_.q = call.qkv;
    batch_.out = call.attended;
    batch_.query_start_loc = starts_.data();
    batch_.seq_lens += first;
    batch_.block_table += first * batch_.block_table_stride;
    batch_.num_tokens = tokens_;
    batch_.num_requests = last - first;
    batch_.scale = call.scale;
  }

  // As `pagewire_attention`; 2: a slot lies outside the cache.
  int run() const {
    for (int64_t i = 0; i < call_.num_layers; ++i) {
      const EncoderLayer& layer = call_.layers[i];
      if (const int failure = attend(layer)) return failure;
      add_norm(layer.attention_norm, layer.out.n);
      feed_forward(layer);
      add_norm(layer.output_norm, layer.out.n);
    }
    return 0;
  }

 private:
  int attend(const EncoderLayer& layer) const {
    multiply(layer.qkv, x_, layer.qkv.k, call_.qkv);
    char* const q = static_cast<char*>(call_.qkv);
    char* const k = q + batch_.num_heads * head_bytes_;
    char* const v = k + batch_.num_kv_heads * head_bytes_;
    if (cos_) {
      rotate(q, batch_.num_heads);
      rotate(k, batch_.num_kv_heads);
    }
    if (keep(k, batch_.k_cache, batch_.k_block_stride, batch_.k_head_stride, false) ||
        keep(v, batch_.v_cache, batch_.v_block_stride, batch_.v_head_stride, true))
      return 2;
    if (const int failure = pagewire_attention(&batch_)) return failure;
    multiply(layer.out, call_.attended, layer.out.k, call_.qkv);
    return 0;
  }

  void feed_forward(const EncoderLayer& layer) const {
    multiply(layer.up, x_, layer.up.k, call_.up);
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

  void rotate(char* heads, int64_t count) const {
    pagewire_rotary(heads, cos_, sin_, tokens_, count, call_.rotary_half, qkv_width_, batch_.head_dim,
                    2 * call_.rotary_half, 2 * call_.rotary_half, batch_.dtype, batch_.num_threads);
  }

  int keep(const char* heads, const void* cache, int64_t block_stride, int64_t head_stride, bool values) const {
    return pagewire_store(heads, const_cast<void*>(cache), slots_, tokens_, batch_.num_kv_heads, batch_.head_dim,
                          qkv_width_, batch_.head_dim, block_stride, head_stride, batch_.num_blocks, batch_.block_size,
                          values, batch_.dtype, batch_.cache_dtype, batch_.num_threads);
  }

  // What the last product gave is added to x, and the sum normed.
  void add_norm(const LayerNorm& norm, int64_t size) const {
    pagewire_layer_norm(call_.qkv, x_, norm.weight, norm.bias, x_, tokens_, size, norm.eps, batch_.dtype,
                        batch_.num_threads);
  }

  const EncoderCall& call_;
  AttentionCall batch_;
  std::vector<int32_t> starts_;
  int64_t tokens_, qkv_width_, head_bytes_;
  char* x_;
  const char* cos_ = nullptr;
  const char* sin_ = nullptr;
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
