// Attention over a paged KV cache, for CPUs.
//
// The unit of arithmetic is a KV tile (attention_plan.h). For one query row and one KV tile the kernel computes a
// partial result (max logit, sum of exponentials, weighted sum of V), and the partial results of a row's tiles are
// merged in ascending order. Nothing else enters a row's arithmetic: not the rows computed beside it, not the chunk of
// the prompt it arrives in, not the thread that runs it. So the output has the same bits in any batch.
//
// The unit of scheduling is a task. Where a query tile was cut into several of them, each stores its partial results,
// and whichever finishes last merges them.
//
// The two matrix products and what lies between them are in attention_vectors.h or, where the CPU has matrix tiles for
// the elements, in attention_tiles.h.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "attention_codes.h"
#include "attention_keys.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "kernels.h"
#include "parallel.h"

namespace {

// T is the type of the cache's elements throughout; queries and outputs are of the same, but with codes of 8 bits. Where
// the cache (Stored) holds nibbles, T is the type of the queries, in which they are unpacked.
#if defined(PAGEWIRE_TILES)
template <class T>
using Floating = std::conditional_t<kTiled<T>, TiledAttention<T>, VectorAttention<T>>;
#else
template <class T>
using Floating = VectorAttention<T>;
#endif
template <class T>
struct Chosen {
  using Products = Floating<T>;
};
template <>
struct Chosen<code8> {
  using Products = CodedAttention;
};

// Keys and values that some query tile needs.
struct Stretch {
  const QueryTile& query_tile;
  int64_t kv_tile;
};

template <class T, class Stored>
class QueryTileKernel {
  using Tile = std::conditional_t<kNibbles<Stored>, NibbleTile<T>, KvTile<T>>;

 public:
  QueryTileKernel(const AttentionCall& call, const QueryTile& tile, const Workspace& work)
      : rows_{call, tile}, work_(work), products_(rows_, work) {}

  int64_t num_rows() const { return rows_.count; }

  // The partial result of every row for KV tile after KV tile, in ascending order. `ahead` comes after it.
  void attend(int64_t kv_tile, const Stretch& ahead, const Partial& result) {
    Tile& keys = keys_[kv_tile % 2];
    Tile& next = keys_[(kv_tile + 1) % 2];
    if (!found_) keys.find(rows_.call, rows_.tile, kv_tile, work_.zeros);
    next.find(rows_.call, ahead.query_tile, ahead.kv_tile, work_.zeros);
    found_ = true;
    if constexpr (kNibbles<Stored>)
      keys.unpack(rows_.call, next, work_.copied);
    else if (values_in_keys(rows_.call))
      keys.copy_values(rows_.call, work_.copied);
    products_.attend(kv_tile, keys, next, result);
  }

  void write(const Partial& total) const {
    if constexpr (kCoded<T>)
      dispatch(rows_.call.dtype, [&](auto element) { write<decltype(element)>(total); });
    else
      write<T>(total);
  }

 private:
  template <class Out>
  void write(const Partial& total) const {
    const AttentionCall& call = rows_.call;
    const int64_t width = values_width<T>(call.v_head_dim);
    for (int64_t row = 0; row < rows_.count; ++row) {
      float scale = 1.0f, sum = total.sum[row];
      if (call.terms.sinks) {
        const float sink = call.terms.sinks[rows_.head(row)] * kLog2E, top = std::max(total.max[row], sink);
        scale = exp2(broadcast(total.max[row] - top))[0];
        sum = sum * scale + exp2(broadcast(sink - top))[0];
      }
      for (int64_t i = 0; i < call.v_head_dim; i += kLanes)
        store(rows_.out<Out>(row) + i, load(total.values + row * width + i) * scale / sum, call.v_head_dim - i);
    }
  }

  const QueryRows rows_;
  const Workspace& work_;
  typename Chosen<T>::Products products_;
  Tile keys_[2];  // of this KV tile and of what comes after it, which is fetched meanwhile
  bool found_ = false;
};

// Whether all lengths and block numbers are such that only memory of the arguments is touched.
template <class T>
bool valid(const AttentionCall& call) {
  if (call.num_requests > 0 && call.query_start_loc[0] != 0) return false;
  if (call.block_size % kPair<T>) return false;
  for (int64_t request = 0; request < call.num_requests; ++request) {
    const int64_t end = call.query_start_loc[request + 1];
    const int64_t length = end - call.query_start_loc[request];
    const int64_t seq_len = call.seq_lens[request];
    if (length < 0 || end > call.num_tokens) return false;
    if (length == 0) continue;
    const int64_t num_blocks = (seq_len + call.block_size - 1) / call.block_size;
    if (seq_len < length || num_blocks > call.max_blocks) return false;
    // Logits are computed for whole steps of keys, up to the end of the last KV tile.
    if (call.terms.relative_bias && (seq_len + kKvTileKeys - 1) / kKvTileKeys * kKvTileKeys > call.terms.bias_radius)
      return false;
    const int32_t* blocks = call.block_table + request * call.block_table_stride;
    for (int64_t i = sight_begin(call, seq_len - length) / call.block_size; i < num_blocks; ++i)
      if (blocks[i] < 0 || blocks[i] >= call.num_blocks) return false;
  }
  return true;
}

thread_local Plan thread_plan;
thread_local Scratch thread_workspace;
thread_local Scratch thread_partials;

template <class T, class Stored = T>
void attention(const AttentionCall& call) {
  const int64_t num_queries = call.query_start_loc[call.num_requests];
  const int64_t token_bytes = call.num_heads * call.v_head_dim * (call.dtype == 0 ? 4 : 2);
  std::memset(static_cast<char*>(call.out) + num_queries * token_bytes, 0,
              size_t((call.num_tokens - num_queries) * token_bytes));

  Plan& plan = thread_plan;
  plan.build(call);
  const int64_t width = values_width<T>(call.v_head_dim);
  const int64_t partial_floats = Partial::floats(plan.rows, width);
  Scratch& partials = thread_partials;
  partials.reserve(Scratch::bytes_for<float>(plan.num_partials * partial_floats) +
                   Scratch::bytes_for<std::atomic<int64_t>>(int64_t(plan.countdowns.size())));
  float* partial_memory = partials.take<float>(plan.num_partials * partial_floats);
  auto* countdowns = partials.take<std::atomic<int64_t>>(int64_t(plan.countdowns.size()));
  for (size_t i = 0; i < plan.countdowns.size(); ++i)
    new (countdowns + i) std::atomic<int64_t>(plan.countdowns[i]);

  parallel_for(int64_t(plan.tasks.size()), plan.num_threads, [&](int64_t i) {
    const Task& task = plan.tasks[size_t(i)];
    const QueryTile& tile = plan.query_tiles[size_t(task.query_tile)];
    const Workspace work = Workspace::take(thread_workspace, call, plan.rows, width);
    QueryTileKernel<T, Stored> kernel(call, tile, work);
    // Threads take tasks in turn, so the task after the next is most likely this thread's.
    const Task& later = plan.tasks[std::min(size_t(i + plan.num_threads), plan.tasks.size() - 1)];
    const auto attend = [&](int64_t kv_tile, const Partial& result) {
      if (kv_tile + 1 < task.kv_tile_end)
        kernel.attend(kv_tile, {tile, kv_tile + 1}, result);
      else
        kernel.attend(kv_tile, {plan.query_tiles[size_t(later.query_tile)], later.kv_tile_begin}, result);
    };
    if (tile.first_partial < 0) {
      attend(task.kv_tile_begin, work.total);
      for (int64_t kv_tile = task.kv_tile_begin + 1; kv_tile < task.kv_tile_end; ++kv_tile) {
        attend(kv_tile, work.tile);
        merge(work.total, work.tile, kernel.num_rows(), width);
      }
      return kernel.write(work.total);
    }
    const auto stored = [&](int64_t kv_tile) {
      return Partial::at(partial_memory + (tile.first_partial + kv_tile - tile.kv_tile_begin) * partial_floats,
                         plan.rows);
    };
    for (int64_t kv_tile = task.kv_tile_begin; kv_tile < task.kv_tile_end; ++kv_tile)
      attend(kv_tile, stored(kv_tile));
    if (countdowns[tile.countdown].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Partial total = stored(tile.kv_tile_begin);
    for (int64_t kv_tile = tile.kv_tile_begin + 1; kv_tile < tile.kv_tile_end; ++kv_tile)
      merge(total, stored(kv_tile), kernel.num_rows(), width);
    kernel.write(total);
  });
}

}  // namespace

// Returns 0, or 1 if the batch does not fit its tensors (then nothing was computed).
EXPORT int pagewire_attention(const AttentionCall* call) {
  bool done = false;
  dispatch_cache(call->cache_dtype, [&](auto element) {
    using Stored = decltype(element);
    if (!(done = valid<Stored>(*call))) return;
    if constexpr (kNibbles<Stored>)
      dispatch(call->dtype, [&](auto query) { attention<decltype(query), Stored>(*call); });
    else
      attention<Stored>(*call);
  });
  return done ? 0 : 1;
}
