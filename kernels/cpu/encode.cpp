// Whole prompts of an encoder in one call: their tokens' embeddings, pages for keys and values, and all layers.
//
// The same operations in the same order as `Embeddings`, `in_pages` and `Stack` in Python, so the bits are the same.

#include <algorithm>
#include <vector>

#include "embeddings.h"
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kTokens = 32;  // whose embeddings a thread makes together

class Encoding {
 public:
  explicit Encoding(const EncodeCall& call) : call_(call), stack_(*call.stack), starts_(call.rows + 1), lengths_(call.rows) {
    for (int64_t row = 0; row < call.rows; ++row) {
      lengths_[row] = int32_t(call.lengths[row]);
      starts_[row + 1] = starts_[row] + lengths_[row];
    }
    lay_pages();
    AttentionCall& attention = stack_.attention;
    attention.num_tokens = starts_.back();
    attention.num_requests = call.rows;
    attention.query_start_loc = starts_.data();
    attention.seq_lens = lengths_.data();
    stack_.slots = slots_.data();
  }

  // As `pagewire_stack`; 1 also if a token, or a position, has no row.
  int run() {
    if (num_pages_ > stack_.attention.num_blocks || !has_rows()) return 1;
    const int64_t num_tokens = stack_.attention.num_tokens;
    parallel_for((num_tokens + kTokens - 1) / kTokens, stack_.attention.num_threads, [&](int64_t chunk) {
      lay(chunk * kTokens, std::min(num_tokens, (chunk + 1) * kTokens));
    });
    return pagewire_stack(&stack_);
  }

 private:
  // Pages for each prompt, one prompt behind the other.
  void lay_pages() {
    const int64_t page = stack_.attention.block_size;
    int64_t widest = 0;
    for (const int32_t length : lengths_) widest = std::max(widest, (length + page - 1) / page);
    table_.assign(size_t(call_.rows * widest), 0);
    for (int64_t row = 0; row < call_.rows; ++row) {
      for (int64_t i = 0; i < lengths_[row]; ++i) slots_.push_back(num_pages_ * page + i);
      const int64_t count = (lengths_[row] + page - 1) / page;
      for (int64_t i = 0; i < count; ++i) table_[row * widest + i] = int32_t(num_pages_++);
    }
    stack_.attention.block_table = table_.data();
    stack_.attention.block_table_stride = stack_.attention.max_blocks = widest;
  }

  bool has_rows() const {
    for (int64_t row = 0; row < call_.rows; ++row) {
      const int64_t* const tokens = call_.tokens + call_.slots[row] * call_.max_tokens;
      if (call_.first_position + lengths_[row] > call_.num_positions) return false;
      for (int64_t i = 0; i < lengths_[row]; ++i)
        if (tokens[i] < 0 || tokens[i] >= call_.words.count) return false;
    }
    return true;
  }

  // Makes the states of some tokens of the batch.
  void lay(int64_t first, int64_t last) const {
    const int64_t hidden = stack_.hidden, size = hidden * (stack_.attention.dtype == 0 ? 4 : 2);
    int64_t row = std::upper_bound(starts_.begin(), starts_.end(), int32_t(first)) - starts_.begin() - 1;
    for (int64_t token = first; token < last; ++token) {
      while (token >= starts_[row + 1]) ++row;
      const int64_t place = token - starts_[row], position = call_.first_position + place;
      char* const to = static_cast<char*>(stack_.states) + token * size;
      embed(call_.words, call_.tokens[call_.slots[row] * call_.max_tokens + place], to, hidden, stack_.attention.dtype);
      add_row(call_.types, place >= call_.seconds[row], to, hidden, stack_.attention.dtype);
      add_row(call_.positions, position, to, hidden, stack_.attention.dtype);
      lay_angles(stack_, token, call_.tables, call_.num_tables, position);
    }
    char* const states = static_cast<char*>(stack_.states) + first * size;
    norm_rows(call_.norm, states, last - first, hidden, stack_.attention.dtype);
  }

  const EncodeCall& call_;
  StackCall stack_;
  std::vector<int32_t> starts_, lengths_, table_;
  std::vector<int64_t> slots_;
  int64_t num_pages_ = 0;
};

}  // namespace

// Returns 0; 1 if a token or a position has no row, or the prompts do not fit the call; 2 as `pagewire_stack`.
EXPORT int pagewire_encode(const EncodeCall* call) { return Encoding(*call).run(); }
