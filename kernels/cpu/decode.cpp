// Steps in which each request runs one token and samples the next one, without anything but kernels in between.
//
// The same kernels in the same order as `Runner.launch` and `RunningStep.sample` in Python, so the bits are the same.

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "embeddings.h"
#include "kernels.h"
#include "matrix.h"
#include "parallel.h"
#include "simd.h"

namespace {

// A sequence whose next logits are changed: its tokens, and what it wants.
struct Penalised {
  const DecodeSlot& slot;
  const int64_t* tokens;  // [length]
  int64_t length;

  bool is_penalised() const { return slot.repetition != 1 || slot.frequency != 0 || slot.presence != 0; }
  bool is_held_back() const { return length < slot.least && slot.num_ends > 0; }

  // Changes logits [size]. times [size]: zeros, which it leaves so.
  void edit(float* logits, int64_t size, std::vector<int32_t>& times) const {
    if (is_penalised()) penalise(logits, size, times.data());
    if (!is_held_back()) return;
    for (int64_t i = 0; i < slot.num_ends; ++i)
      if (slot.ends[i] >= 0 && slot.ends[i] < size) logits[slot.ends[i]] = -INFINITY;
  }

 private:
  // `times` counts the tokens of the output from 1 on, and has 1 for those of the prompt alone: each is changed once.
  void penalise(float* logits, int64_t size, int32_t* times) const {
    for (int64_t i = slot.num_prompt; i < length; ++i)
      if (tokens[i] < size) times[tokens[i]] += times[tokens[i]] ? 1 : 2;
    for (int64_t i = slot.num_prompt; i < length; ++i)
      if (tokens[i] < size && times[tokens[i]] > 0) change(logits + tokens[i], times + tokens[i]);
    if (slot.repetition != 1)
      for (int64_t i = 0; i < slot.num_prompt; ++i)
        if (tokens[i] < size && times[tokens[i]] == 0) {
          times[tokens[i]] = 1;
          change(logits + tokens[i], times + tokens[i]);
        }
    for (int64_t i = 0; i < length; ++i)
      if (tokens[i] < size) times[tokens[i]] = 0;
  }

  // Changes a logit, and marks it as changed.
  void change(float* logit, int32_t* times) const {
    const float count = float(*times - 1);
    float value = *logit < 0 ? *logit * slot.repetition : *logit / slot.repetition;
    value = value - slot.frequency * count;
    value = value - slot.presence * float(count > 0);
    *logit = std::min(value, std::numeric_limits<float>::max());
    *times = -1;
  }
};

// The rows of a call, step by step.
class Decoding {
 public:
  explicit Decoding(const DecodeCall& call)
      : call_(call),
        stack_(*call.stack),
        rows_(call.rows),
        element_(stack_.attention.dtype == 0 ? 4 : 2),
        starts_(call.starts, call.starts + rows_),
        seq_lens_(rows_),
        query_start_loc_(rows_ + 1),
        spans_(call.states ? 4 * rows_ : 0),
        slots_(rows_),
        peaks_(rows_),
        draws_(rows_) {
    for (int64_t row = 0; row <= rows_; ++row) query_start_loc_[row] = int32_t(row);
    AttentionCall& attention = stack_.attention;
    attention.num_tokens = attention.num_requests = rows_;
    attention.query_start_loc = query_start_loc_.data();
    attention.seq_lens = seq_lens_.data();
    stack_.slots = slots_.data();
    if (call.states) lay_spans();
    lay_blocks();
  }

  // Runs a step; 0, as `pagewire_stack`, or -1: a row's logits cannot be sampled, and nothing was.
  int step(int64_t* chosen) {
    for (int64_t row = 0; row < rows_; ++row) lay(row);
    if (call_.inputs.words.rows) lay_inputs(call_.inputs);
    if (const int failure = pagewire_stack(&stack_)) return failure;
    const int64_t vocab = call_.head.n;
    const AttentionCall& attention = stack_.attention;
    const void* const x = stack_.normed ? stack_.normed : stack_.states;
    multiply(call_.head, x, stack_.hidden, call_.logits, rows_, attention.dtype, attention.num_threads);
    if (call_.logit_scale != 1 || call_.softcap != 0)
      pagewire_cap(call_.logits, rows_ * vocab, call_.logit_scale, call_.softcap, attention.dtype, attention.num_threads);
    pagewire_largest(call_.logits, nullptr, peaks_.data(), chosen, rows_, vocab, vocab, attention.dtype,
                     attention.num_threads);
    for (const float peak : peaks_)
      if (!std::isfinite(peak)) return -1;
    if (edits_ && !sample_edited(chosen)) return -1;
    pagewire_draw(call_.logits, peaks_.data(), draws_.data(), chosen, rows_, vocab, vocab, attention.dtype,
                  attention.num_threads);
    for (int64_t row = 0; row < rows_; ++row) take(row, chosen[row]);
    return 0;
  }

  // True if a row has just sampled a token that ends it.
  bool has_ended(const int64_t* chosen) const {
    for (int64_t row = 0; row < rows_; ++row) {
      const DecodeSlot& slot = call_.sequences[call_.slots[row]];
      if (std::find(slot.ends, slot.ends + slot.num_ends, chosen[row]) != slot.ends + slot.num_ends) return true;
    }
    return false;
  }

 private:
  // A span of states is the token of a row.
  void lay_spans() {
    for (int32_t row = 0; row < rows_; ++row) {
      const int32_t span[] = {row, row + 1, call_.states[2 * row], call_.states[2 * row + 1]};
      std::copy_n(span, 4, spans_.data() + 4 * row);
    }
    stack_.row_starts = query_start_loc_.data();
    stack_.spans = spans_.data();
    stack_.num_rows = stack_.num_spans = rows_;
  }

  // Points to the rows' block numbers; those of several rows are put together, as far as the steps need them.
  void lay_blocks() {
    AttentionCall& attention = stack_.attention;
    if (!attention.block_size) return;  // no layer attends
    const int64_t last = *std::max_element(starts_.begin(), starts_.end()) + call_.steps;
    attention.max_blocks = (last + attention.block_size - 1) / attention.block_size;
    attention.block_table = call_.block_table + call_.slots[0] * call_.max_blocks;
    attention.block_table_stride = call_.max_blocks;
    if (rows_ == 1) return;
    const int64_t width = attention.max_blocks;
    blocks_.resize(rows_ * width);
    for (int64_t row = 0; row < rows_; ++row)
      std::copy_n(call_.block_table + call_.slots[row] * call_.max_blocks, width, blocks_.data() + row * width);
    attention.block_table = blocks_.data();
    attention.block_table_stride = width;
  }

  // Samples the rows whose logits are changed; false if one has no token left. `pagewire_draw` leaves these out then.
  bool sample_edited(int64_t* chosen) {
    const int64_t vocab = call_.head.n;
    std::atomic<bool> failed{false};
    parallel_for(rows_, stack_.attention.num_threads, [&](int64_t row) {
      const Penalised sequence = sequence_of(row);
      if (!sequence.is_penalised() && !sequence.is_held_back()) return;
      thread_local std::vector<float> logits;
      thread_local std::vector<int32_t> times;
      logits.resize(size_t(vocab));
      times.resize(size_t(vocab));
      dispatch(stack_.attention.dtype, [&](auto element) {
        const auto* const from = static_cast<const decltype(element)*>(call_.logits) + row * vocab;
        for (int64_t i = 0; i < vocab; i += kLanes)
          vocab - i >= kLanes ? store(&logits[i], load(from + i)) : store(&logits[i], load(from + i, vocab - i), vocab - i);
      });
      sequence.edit(logits.data(), vocab, times);
      pagewire_largest(logits.data(), nullptr, &peaks_[row], chosen + row, 1, vocab, vocab, 0, 1);
      if (peaks_[row] == -INFINITY)
        failed = true;
      else
        pagewire_draw(logits.data(), &peaks_[row], &draws_[row], chosen + row, 1, vocab, vocab, 0, 1);
      draws_[row].temperature = 0;
    });
    return !failed;
  }

  // With the token that this step runs.
  Penalised sequence_of(int64_t row) const {
    const int64_t slot = call_.slots[row];
    return {call_.sequences[slot], call_.tokens + slot * call_.max_tokens, starts_[row] + 1};
  }

  // Lays the next token of a row: its embedding, its angles, and where its keys and values go.
  void lay(int64_t row) {
    const AttentionCall& attention = stack_.attention;
    const int64_t start = starts_[row], slot = call_.slots[row];
    const DecodeSlot& sequence = call_.sequences[slot];
    const int64_t position = start + call_.long_from[slot];
    char* const state = static_cast<char*>(stack_.states) + row * stack_.hidden * element_;
    embed(call_.embeddings, token_of(row), state, stack_.hidden, attention.dtype);
    add_row(call_.positions, position, state, stack_.hidden, attention.dtype);
    norm_rows(call_.norm, state, 1, stack_.hidden, attention.dtype);
    lay_angles(stack_, row, call_.tables, call_.num_tables, position);
    if (const int64_t size = attention.block_size)
      slots_[row] = attention.block_table[row * attention.block_table_stride + start / size] * size + start % size;
    seq_lens_[row] = int32_t(start + 1);
    draws_[row] = sequence.draw;
    draws_[row].position = start + 1;
    const Penalised changed = sequence_of(row);
    edits_ = edits_ || changed.is_penalised() || changed.is_held_back();
  }

  // Lays what layers get of the rows' tokens beside states, as `LayerInputs` in Python.
  void lay_inputs(const LayerInputs& inputs) {
    const AttentionCall& attention = stack_.attention;
    const int64_t width = inputs.projection.n, size = rows_ * width;
    void* const to = const_cast<void*>(stack_.inputs);
    multiply(inputs.projection, stack_.states, stack_.hidden, to, rows_, attention.dtype, attention.num_threads);
    pagewire_cap(to, size, inputs.projection_scale, 0, attention.dtype, attention.num_threads);
    pagewire_rms_norm(to, inputs.norm.weight, to, rows_, width / inputs.size, inputs.size, width, inputs.size, width,
                      inputs.size, inputs.norm.eps, inputs.norm.offset, attention.dtype, attention.num_threads);
    for (int64_t row = 0; row < rows_; ++row)
      embed(inputs.words, token_of(row), static_cast<char*>(inputs.looked_up) + row * width * element_, width,
            attention.dtype);
    pagewire_add_scaled(inputs.looked_up, to, size, 1, attention.dtype, attention.num_threads);
    pagewire_cap(to, size, inputs.scale, 0, attention.dtype, attention.num_threads);
  }

  // The token that a row runs.
  int64_t token_of(int64_t row) const { return call_.tokens[call_.slots[row] * call_.max_tokens + starts_[row]]; }

  void take(int64_t row, int64_t token) {
    const int64_t slot = call_.slots[row];
    call_.tokens[slot * call_.max_tokens + ++starts_[row]] = token;
    ++call_.num_tokens[slot];
    if (call_.states) spans_[4 * row + 2] = spans_[4 * row + 3];  // the next step goes on from what this one has written
  }

  const DecodeCall& call_;
  StackCall stack_;
  int64_t rows_, element_;
  bool edits_ = false;  // some row's logits may be changed
  std::vector<int64_t> starts_;
  std::vector<int32_t> seq_lens_, query_start_loc_, spans_, blocks_;
  std::vector<int64_t> slots_;
  std::vector<float> peaks_;
  std::vector<Draw> draws_;
};

// True if one of the descriptors can be read.
bool is_disturbed(const DecodeCall& call) {
  pollfd found[2];
  const int64_t count = std::min<int64_t>(call.num_descriptors, 2);
  for (int64_t i = 0; i < count; ++i) found[i] = {call.descriptors[i], POLLIN, 0};
  return count > 0 && poll(found, nfds_t(count), 0) > 0;
}

}  // namespace

// Returns the number of steps that were run, from 0 on, or -1 - what `pagewire_stack` has returned.
EXPORT int64_t pagewire_decode(const DecodeCall* call) {
  Decoding decoding(*call);
  for (int64_t step = 0; step < call->steps; ++step) {
    int64_t* const chosen = call->chosen + step * call->rows;
    if (step > 0 && (decoding.has_ended(chosen - call->rows) || is_disturbed(*call))) return step;
    if (const int failure = decoding.step(chosen)) return failure < 0 ? step : -1 - failure;
  }
  return call->steps;
}
