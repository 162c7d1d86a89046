// Products of heads: those of each head with a matrix of its own.
//
// Rows are ordered by head, so that all heads are one call (experts.cpp), and the results are put where they belong. A
// row's bits are those of its product, wherever it stands.

#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace {

constexpr int64_t kParallelBytes = 1 << 16;  // below which one thread is faster

// Calls body(token, head) for all rows of a call, each of which copies some bytes.
template <class Body>
void for_rows(const HeadsCall& call, int64_t bytes, const Body& body) {
  const int64_t rows = call.tokens * call.heads;
  parallel_for(call.tokens, rows * bytes < kParallelBytes ? 1 : call.num_threads, [&](int64_t token) {
    for (int64_t head = 0; head < call.heads; ++head) body(token, head);
  });
}

}  // namespace

EXPORT void pagewire_heads(const HeadsCall* call) {
  const int64_t tokens = call->tokens, heads = call->heads, element = call->dtype == 0 ? 4 : 2;
  const int64_t size = call->matrices->k * element, out_size = call->matrices->n * element, rest = call->rest * element;
  char* const by_head = static_cast<char*>(call->scratch);
  char* const results = by_head + heads * tokens * size;
  const auto x = [&](int64_t token, int64_t head) {
    return static_cast<const char*>(call->x) + (token * call->x_token_stride + head * call->x_head_stride) * element;
  };
  for_rows(*call, size, [&](int64_t token, int64_t head) {
    std::memcpy(by_head + (head * tokens + token) * size, x(token, head), size_t(size));
  });
  thread_local Scratch scratch;
  scratch.reserve(Scratch::bytes_for<int64_t>(heads + 1));
  int64_t* const starts = scratch.take<int64_t>(heads + 1);
  for (int64_t head = 0; head <= heads; ++head) starts[head] = head * tokens;
  const GroupedCall grouped{call->matrices, starts, by_head, results, heads, call->matrices->k, call->dtype,
                            call->num_threads};
  pagewire_grouped(&grouped);
  for_rows(*call, out_size + rest, [&](int64_t token, int64_t head) {
    char* const out =
        static_cast<char*>(call->out) + (token * call->out_token_stride + head * call->out_head_stride) * element;
    std::memcpy(out, results + (head * tokens + token) * out_size, size_t(out_size));
    if (rest) std::memcpy(out + out_size, x(token, head) + size, size_t(rest));
  });
}
