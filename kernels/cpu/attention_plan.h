// How attention.cpp cuts a batch into work.
//
// A KV tile is kKvTileKeys consecutive positions, counted from position 0 of the sequence. A query tile is all query
// heads of one KV head, for some consecutive tokens. A task is a query tile against a range of KV tiles: a query tile
// that holds too much of the step's work is cut into several tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace {

constexpr int kKvTileKeys = 256;
// Floats from a row's scores to the next row's: not a power of two, whose rows would share few lines of the first-level
// cache, and whose loads would be taken for those of a row stored just before.
constexpr int kScoreStride = kKvTileKeys + 16;
constexpr int kQueryTileRows = 96;  // query rows to aim at: enough to pay for reading K and V
// A few microseconds of work: less than that, and waking a second thread costs more than it brings.
constexpr int64_t kParallelWork = 64;

struct QueryTile {
  int64_t request, kv_head;
  int64_t first_token, num_tokens;  // tokens of the batch
  int64_t first_position;           // in the sequence
  int64_t kv_tile_begin, kv_tile_end;
  int64_t first_partial = -1;  // where its KV tiles store partial results, when cut into several tasks
  int64_t countdown = -1;      // and which countdown tells the last of these
};

struct Task {
  int64_t query_tile;
  int64_t kv_tile_begin, kv_tile_end;
};

// Whether values are the first elements of keys, and so lie in their order: they are brought into that of values once for
// each query tile and KV tile, which takes 7% of a prompt's attention (16 heads, bfloat16, matrix tiles).
bool values_in_keys(const AttentionCall& call) { return call.v_cache == call.k_cache; }

// The first key that a query at this position sees.
int64_t sight_begin(const AttentionCall& call, int64_t position) {
  const int64_t window = call.terms.window, chunk = call.terms.chunk;
  const int64_t begin = window ? std::max<int64_t>(0, position + 1 - window) : 0;
  return chunk ? std::max(begin, position / chunk * chunk) : begin;
}

// The end of the keys that a query at this position sees.
int64_t sight_end(const AttentionCall& call, int64_t request, int64_t position) {
  const int64_t length = call.seq_lens[request];
  if (call.whole && call.whole[request]) return length;
  return std::min<int64_t>(position + 1 + call.terms.future, length);
}

// Keys [begin, end), counted from the first of a KV tile.
struct KeyRange {
  int begin, end;
  bool meets(int first, int last) const { return begin < last && first < end; }
};

// The rows of a query tile: the query heads of its first token, then those of the next.
struct QueryRows {
  const AttentionCall& call;
  const QueryTile& tile;
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t count = tile.num_tokens * group;

  int64_t position(int64_t row) const { return tile.first_position + row / group; }
  int64_t head(int64_t row) const { return tile.kv_head * group + row % group; }
  int64_t token(int64_t row) const { return tile.first_token + row / group; }

  // The keys of a KV tile that a row sees: [visible_begin, visible_end), counted from the tile's first.
  int visible_begin(int64_t kv_tile, int64_t row) const {
    return int(std::max<int64_t>(0, sight_begin(call, position(row)) - kv_tile * kKvTileKeys));
  }
  int visible_end(int64_t kv_tile, int64_t row) const {
    const int64_t end = sight_end(call, tile.request, position(row));
    return int(std::clamp<int64_t>(end - kv_tile * kKvTileKeys, 0, kKvTileKeys));
  }

  // The keys of a KV tile that some of `num_rows` rows see: what a row sees begins and ends where it does for the row
  // before it, or later.
  KeyRange visible(int64_t kv_tile, int64_t first, int64_t num_rows) const {
    return {visible_begin(kv_tile, first), visible_end(kv_tile, first + num_rows - 1)};
  }

  template <class T>
  const T* query(int64_t row) const {
    return static_cast<const T*>(call.q) + token(row) * call.q_token_stride + head(row) * call.q_head_stride;
  }
  template <class T>
  T* out(int64_t row) const {
    return static_cast<T*>(call.out) + (token(row) * call.num_heads + head(row)) * call.v_head_dim;
  }
};

// Which keys of a KV tile some rows see; `keys`: those that any row of the query tile sees.
class Sight {
 public:
  Sight(const QueryRows& rows, int64_t kv_tile, KeyRange keys)
      : rows_(rows),
        kv_tile_(kv_tile),
        keys_(keys),
        all_(rows.visible_begin(kv_tile, rows.count - 1) <= keys.begin && rows.visible_end(kv_tile, 0) >= keys.end) {}

  KeyRange operator()(int64_t first, int64_t num_rows) const {
    return all_ ? keys_ : rows_.visible(kv_tile_, first, num_rows);
  }

 private:
  const QueryRows& rows_;
  const int64_t kv_tile_;
  const KeyRange keys_;
  const bool all_;
};

struct Plan {
  std::vector<QueryTile> query_tiles;
  std::vector<Task> tasks;
  std::vector<int64_t> countdowns;  // the number of tasks of each query tile that was cut
  int64_t num_partials = 0;
  int64_t rows = 0;  // of the largest query tile
  int num_threads = 1;

  void build(const AttentionCall& call) {
    query_tiles.clear();
    tasks.clear();
    countdowns.clear();
    num_partials = rows = 0;
    int64_t work = 0;
    for (int64_t request = 0; request < call.num_requests; ++request) work += add_request(call, request);
    num_threads = work < kParallelWork ? 1 : call.num_threads;
    // Four tasks per thread at least, as far as the work can be cut.
    const int64_t most_work = num_threads == 1 ? work : std::max<int64_t>(1, work / (4 * num_threads));
    for (size_t i = 0; i < query_tiles.size(); ++i) add_tasks(int64_t(i), most_work);
  }

 private:
  int64_t add_request(const AttentionCall& call, int64_t request) {
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t tile_tokens = std::max<int64_t>(1, kQueryTileRows / group);
    const int64_t first = call.query_start_loc[request];
    const int64_t length = call.query_start_loc[request + 1] - first;
    const int64_t first_position = call.seq_lens[request] - length;
    const int64_t num_tiles = (length + tile_tokens - 1) / tile_tokens;
    int64_t work = 0;
    for (int64_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) {
      for (int64_t t = num_tiles - 1; t >= 0; --t) {  // the longest first
        QueryTile tile;
        tile.request = request;
        tile.kv_head = kv_head;
        tile.first_token = first + t * tile_tokens;
        tile.num_tokens = std::min(tile_tokens, length - t * tile_tokens);
        tile.first_position = first_position + t * tile_tokens;
        tile.kv_tile_begin = sight_begin(call, tile.first_position) / kKvTileKeys;
        tile.kv_tile_end =
            (sight_end(call, request, tile.first_position + tile.num_tokens - 1) - 1) / kKvTileKeys + 1;
        rows = std::max(rows, tile.num_tokens * group);
        work += cost(tile) * (tile.kv_tile_end - tile.kv_tile_begin);
        query_tiles.push_back(tile);
      }
    }
    return work;
  }

  // Of one KV tile: reading it costs about as much as a dozen rows of arithmetic.
  static int64_t cost(const QueryTile& tile) { return tile.num_tokens + 12; }

  void add_tasks(int64_t index, int64_t most_work) {
    QueryTile& tile = query_tiles[size_t(index)];
    const int64_t kv_tiles = tile.kv_tile_end - tile.kv_tile_begin;
    const int64_t pieces = std::min(kv_tiles, (kv_tiles * cost(tile) + most_work - 1) / most_work);
    if (pieces > 1) {
      tile.first_partial = num_partials;
      num_partials += kv_tiles;
      tile.countdown = int64_t(countdowns.size());
      countdowns.push_back(pieces);
    }
    for (int64_t piece = 0; piece < pieces; ++piece)
      tasks.push_back({index, tile.kv_tile_begin + kv_tiles * piece / pieces,
                       tile.kv_tile_begin + kv_tiles * (piece + 1) / pieces});
  }
};

}  // namespace
