// Attention of a whole pass over the paged cache, for prefill chunks and decodes. The positions of a sequence are split
// into ranges at fixed positions. Each range gives a partial softmax, and ranges are merged in ascending order. So a
// row's bits depend on its visible tokens alone: not on other tokens, on the chunks of a prompt, or on threads. That
// also holds for a branch of a tree, for any places of its tokens in the range: weights are added by their order on the
// branch. A tree that continues in the next range has other bits than its single branches.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/ops.h"
#include "threads/pool.h"
#include "ops/workspace.h"

namespace moeflow {
namespace {

constexpr int64_t kBlockRows = 96;       // rows (heads of tokens) that share one sweep over K and V
constexpr int64_t kItemsPerThread = 16;  // that long decodes are cut into at least
constexpr int64_t kTreePositions = 64;

// Some tokens of a sequence, one KV head, some neighbouring ranges.
struct Item {
  int32_t sequence, head;
  int32_t first_token, num_tokens;  // within the sequence's share of the pass
  int32_t first_range, num_ranges;
  int64_t parts;  // where the results of each range go, in floats; -1: this is all there is, merge at once
};

// Scratch of one thread; row r of a matrix begins at r * stride.
struct Scratch {
  float *q, *scores, *part, *total, *keys;
  float *part_max, *part_sum, *total_max, *total_sum;
  AttentionRow* rows;
};

struct AttentionJob {
  const Isa& isa;
  const AttentionCall& call;
  int64_t group;   // query heads that share a KV head
  int64_t stride;  // head_dim, filled up to whole vectors; values are as wide, or narrower
  Item* items = nullptr;
  int64_t num_items = 0;
  Item* splits = nullptr;  // what items with parts belong to
  int64_t num_splits = 0;
  float* parts = nullptr;
  Scratch* scratch = nullptr;  // [num_threads]

  int64_t context_end(int64_t sequence) const {
    if (call.lengths != nullptr) return call.lengths[sequence];
    return call.sequences.starts[sequence] + call.sequences.counts[sequence];
  }
  // One past what any of the first `num_tokens` that a sequence has in the pass sees.
  int64_t end_of(int64_t sequence, int64_t num_tokens) const {
    if (call.lengths != nullptr) return call.lengths[sequence];
    return call.sequences.starts[sequence] + num_tokens;
  }
};

// What the token at `position` sees of its sequence, which ends at `context_end`.
AttentionRow visible(const AttentionCall& call, int64_t token, int64_t position, int64_t context_end) {
  if (call.lengths != nullptr) return AttentionRow{0, context_end, context_end, 0, 0, 0};
  const int64_t window = call.sliding_window > 0 ? call.sliding_window : position + 1;
  const AttentionRow causal{std::max<int64_t>(0, position + 1 - window), position + 1, position + 1, 0, 0, 0};
  if (call.tree_masks == nullptr) return causal;
  const int64_t tree_begin = context_end - kTreePositions;
  const int64_t num_bits = position + 1 - tree_begin;  // up to the token itself
  if (num_bits <= 0) return causal;
  uint64_t all = num_bits >= kTreePositions ? ~uint64_t{0} : (uint64_t{1} << num_bits) - 1;
  if (tree_begin < 0) all &= ~uint64_t{0} << -tree_begin;
  uint64_t bits = call.tree_masks[token] & all;
  if (bits == all) return causal;
  // The window counts visible tokens: a branch's tokens are neighbours, wherever they are stored.
  int64_t left = window - __builtin_popcountll(bits);
  const int64_t num_hidden = std::max<int64_t>(0, -left);
  for (; left < 0; ++left) bits &= bits - 1;
  const int64_t prefix = std::max<int64_t>(0, tree_begin);
  AttentionRow row{std::max<int64_t>(0, prefix - left), prefix, prefix, tree_begin, bits, prefix + num_hidden};
  if (bits != 0) row.stop = tree_begin + kTreePositions - __builtin_clzll(bits);
  if (row.lo == row.hi && bits != 0) row.lo = row.hi = tree_begin + __builtin_ctzll(bits);
  return row;
}

// What a weight beside `max` is worth beside `larger`.
float falling(float max, float larger) { return max == larger ? 1.0f : std::exp2(max - larger); }

// Add the result of a further range to a row's total. Not inlined: one sequence of operations for all callers.
__attribute__((noinline)) void merge(int64_t dim, float part_max, float part_sum, const float* part, float& max,
                                     float& sum, float* total) {
  if (part_sum == 0) return;
  if (sum == 0) {
    max = part_max;
    sum = part_sum;
    std::memcpy(total, part, dim * sizeof(float));
    return;
  }
  const float larger = std::max(max, part_max);
  const float scale = falling(max, larger), part_scale = falling(part_max, larger);
  for (int64_t d = 0; d < dim; ++d) total[d] = total[d] * scale + part[d] * part_scale;
  sum = sum * scale + part_sum * part_scale;
  max = larger;
}

// Add a score whose value is zero.
void add_sink(float sink, int64_t dim, float& max, float& sum, float* total) {
  const float larger = std::max(max, sink);
  const float scale = falling(max, larger);
  for (int64_t d = 0; d < dim; ++d) total[d] *= scale;
  sum = sum * scale + falling(sink, larger);
  max = larger;
}

// Write rows out, divided by their sums; what sees nothing becomes zero.
void finish(const AttentionJob& job, const Item& item, const Scratch& scratch) {
  const int64_t dim = job.call.cache.value_dim();
  for (int64_t row = 0; row < item.num_tokens * job.group; ++row) {
    const int64_t token = job.call.sequences.first_tokens[item.sequence] + item.first_token + row / job.group;
    const int64_t head = item.head * job.group + row % job.group;
    float& sum = scratch.total_sum[row];
    float* const total = scratch.total + row * job.stride;
    if (job.call.sinks != nullptr && sum != 0) {
      add_sink(job.call.sinks[head] * kLog2E, dim, scratch.total_max[row], sum, total);
    }
    float* const out = job.call.out + (token * job.call.num_heads + head) * dim;
    const float divisor = sum;  // which `out` cannot overlap
    for (int64_t d = 0; d < dim; ++d) out[d] = divisor == 0 ? 0.0f : total[d] / divisor;
  }
}

// Floats that the unfinished results of a range take.
int64_t part_floats(const AttentionJob& job, int64_t num_rows) { return round_up(num_rows * (job.stride + 2), kBand); }

void prepare_rows(const AttentionJob& job, const Item& item, const Scratch& scratch) {
  const AttentionCall& call = job.call;
  const int64_t dim = call.cache.head_dim, end = job.context_end(item.sequence);
  const float scale = kLog2E * (call.scale != 0 ? call.scale : 1.0f / std::sqrt(static_cast<float>(dim)));
  const int64_t bias_size = 2 * call.bias_reach + 1;
  for (int64_t t = 0; t < item.num_tokens; ++t) {
    const int64_t in_sequence = item.first_token + t, token = call.sequences.first_tokens[item.sequence] + in_sequence;
    const int64_t position = call.sequences.starts[item.sequence] + in_sequence;
    AttentionRow seen = visible(call, token, position, end);
    seen.bias_reach = call.bias_reach;
    seen.position = position;
    for (int64_t g = 0; g < job.group; ++g) {
      const int64_t row = t * job.group + g;
      if (call.bias != nullptr) seen.bias = call.bias + (item.head * job.group + g) * bias_size + call.bias_reach;
      scratch.rows[row] = seen;
      scratch.total_sum[row] = 0;
      const float* const from = call.q + token * call.q_stride + (item.head * job.group + g) * dim;
      float* const to = scratch.q + row * job.stride;
      for (int64_t d = 0; d < dim; ++d) to[d] = from[d] * scale;
    }
  }
}

void attend(const AttentionJob& job, const Item& item, const Scratch& scratch) {
  prepare_rows(job, item, scratch);
  const int64_t num_rows = item.num_tokens * job.group, dim = job.call.cache.value_dim();
  const int64_t last = job.end_of(item.sequence, item.first_token + item.num_tokens);
  AttentionRange range{};
  range.cache = &job.call.cache;
  range.block_table = job.call.sequences.block_tables + job.call.sequences.table_offsets[item.sequence];
  range.head = item.head;
  range.num_rows = static_cast<int>(num_rows);
  range.rows = scratch.rows;
  range.q = scratch.q;
  range.stride = job.stride;
  range.soft_cap = job.call.soft_cap * kLog2E;
  range.keys = scratch.keys;
  range.scores = scratch.scores;
  range.max = scratch.part_max;
  range.sum = scratch.part_sum;
  range.out = scratch.part;
  for (int64_t i = 0; i < item.num_ranges; ++i) {
    range.begin = (item.first_range + i) * kRangePositions;
    range.end = std::min(range.begin + kRangePositions, last);
    range.following_end = i + 1 < item.num_ranges ? std::min(range.end + kRangePositions, last) : range.end;
    if (item.parts >= 0) {
      range.out = job.parts + item.parts + i * part_floats(job, num_rows);
      range.max = range.out + num_rows * job.stride;
      range.sum = range.max + num_rows;
    }
    job.isa.attend(range);
    if (item.parts >= 0) continue;
    for (int64_t row = 0; row < num_rows; ++row) {
      merge(dim, range.max[row], range.sum[row], range.out + row * job.stride, scratch.total_max[row],
            scratch.total_sum[row], scratch.total + row * job.stride);
    }
  }
  if (item.parts < 0) finish(job, item, scratch);
}

void merge_split(const AttentionJob& job, const Item& split, const Scratch& scratch) {
  const int64_t num_rows = split.num_tokens * job.group;
  std::fill_n(scratch.total_sum, num_rows, 0.0f);
  for (int64_t i = 0; i < split.num_ranges; ++i) {
    const float* const out = job.parts + split.parts + i * part_floats(job, num_rows);
    const float *const max = out + num_rows * job.stride, *const sum = max + num_rows;
    for (int64_t row = 0; row < num_rows; ++row) {
      merge(job.call.cache.value_dim(), max[row], sum[row], out + row * job.stride, scratch.total_max[row],
            scratch.total_sum[row], scratch.total + row * job.stride);
    }
  }
  finish(job, split, scratch);
}

void run(void* context, Team& team, int thread_idx) {
  const AttentionJob& job = *static_cast<const AttentionJob*>(context);
  const Scratch& scratch = job.scratch[thread_idx];
  team.for_each(0, job.num_items, thread_idx, [&](int64_t i, int64_t) { attend(job, job.items[i], scratch); });
  if (job.num_splits == 0) return;
  team.barrier();
  team.for_each(1, job.num_splits, thread_idx, [&](int64_t i, int64_t) { merge_split(job, job.splits[i], scratch); });
}

// The work of one sequence: groups of tokens, and the ranges visible to each. None, if it brings no tokens.
struct Share {
  int64_t tokens_per_item, num_blocks;

  Share(const AttentionJob& job, int64_t sequence)
      : tokens_per_item(std::max<int64_t>(1, kBlockRows / job.group)),
        num_blocks((job.call.sequences.counts[sequence] + tokens_per_item - 1) / tokens_per_item) {}
};

// Tokens [block * tokens_per_item, ..) of a sequence as an item of its own.
Item whole_item(const AttentionJob& job, int64_t sequence, int64_t head, int64_t block) {
  const AttentionCall& call = job.call;
  const int64_t tokens = Share(job, sequence).tokens_per_item, first = block * tokens;
  const int64_t count = std::min<int64_t>(tokens, call.sequences.counts[sequence] - first);
  const int64_t position = call.sequences.starts[sequence] + first;
  int64_t oldest = 0;
  if (call.sliding_window > 0) {
    // With a tree, the window may reach back further by the number of hidden positions.
    const int64_t hidden = call.tree_masks == nullptr ? 0 : kTreePositions;
    oldest = std::max<int64_t>(0, position + 1 - call.sliding_window - hidden);
  }
  if (call.lengths != nullptr) oldest = 0;
  const int64_t first_range = oldest / kRangePositions, end = job.end_of(sequence, first + count);
  return Item{static_cast<int32_t>(sequence),
              static_cast<int32_t>(head),
              static_cast<int32_t>(first),
              static_cast<int32_t>(count),
              static_cast<int32_t>(first_range),
              static_cast<int32_t>((end + kRangePositions - 1) / kRangePositions - first_range),
              -1};
}

// Ranges that an item of few tokens covers at most, so that there are enough items for all threads.
int64_t ranges_per_item(const AttentionJob& job) {
  int64_t total = 0;
  for (int64_t s = 0; s < job.call.sequences.count; ++s) {
    if (Share(job, s).num_blocks == 1) total += whole_item(job, s, 0, 0).num_ranges;
  }
  return std::max<int64_t>(1, total * job.call.cache.num_heads / (num_threads() * kItemsPerThread));
}

// Cut the pass into items. Called twice: with items null it only counts.
void plan(AttentionJob& job, int64_t max_ranges, int64_t& num_parts) {
  const int64_t num_heads = job.call.cache.num_heads;
  job.num_items = job.num_splits = num_parts = 0;
  const auto add = [&](const Item& item) {
    if (job.items != nullptr) job.items[job.num_items] = item;
    ++job.num_items;
  };
  // Prefill chunks, the longest contexts first, because the last items to end should be short ones.
  for (int64_t s = 0; s < job.call.sequences.count; ++s) {
    const int64_t num_blocks = Share(job, s).num_blocks;
    if (num_blocks <= 1) continue;
    for (int64_t block = num_blocks - 1; block >= 0; --block) {
      for (int64_t head = 0; head < num_heads; ++head) add(whole_item(job, s, head, block));
    }
  }
  for (int64_t s = 0; s < job.call.sequences.count; ++s) {
    if (Share(job, s).num_blocks != 1) continue;
    for (int64_t head = 0; head < num_heads; ++head) {
      Item whole = whole_item(job, s, head, 0);
      if (whole.num_ranges <= max_ranges) {
        add(whole);
        continue;
      }
      const int64_t range_floats = part_floats(job, whole.num_tokens * job.group);
      whole.parts = num_parts;
      num_parts += whole.num_ranges * range_floats;
      if (job.splits != nullptr) job.splits[job.num_splits] = whole;
      ++job.num_splits;
      for (int64_t first = 0; first < whole.num_ranges; first += max_ranges) {
        Item item = whole;
        item.first_range += static_cast<int32_t>(first);
        item.num_ranges = static_cast<int32_t>(std::min(max_ranges, whole.num_ranges - first));
        item.parts += first * range_floats;
        add(item);
      }
    }
  }
}

}  // namespace

void attention(const Isa& isa, const AttentionCall& call) {
  if (call.sequences.count == 0) return;
  WorkspaceLock workspace;  // first of all: while it is held, the number of threads stays
  const int64_t group = call.num_heads / call.cache.num_heads;
  const int64_t rows = std::max(group, kBlockRows), threads = num_threads();
  AttentionJob job{isa, call, group, round_up(call.cache.head_dim, kBand)};
  const int64_t max_ranges = ranges_per_item(job);
  int64_t num_parts = 0;
  plan(job, max_ranges, num_parts);

  const size_t matrix = Workspace::padded<float>(rows * job.stride), vector = Workspace::padded<float>(rows);
  const int64_t keys = call.cache.latent_dim > 0 ? call.cache.head_dim * kKeyPositions : 0;
  const size_t per_thread = 3 * matrix + 4 * vector + Workspace::padded<float>(rows * kRangePositions) +
                            Workspace::padded<AttentionRow>(rows) + Workspace::padded<float>(keys);
  workspace->begin(Workspace::padded<Item>(job.num_items) + Workspace::padded<Item>(job.num_splits) +
                   Workspace::padded<float>(num_parts) + Workspace::padded<Scratch>(threads) + threads * per_thread);
  job.items = workspace->take<Item>(job.num_items);
  job.splits = workspace->take<Item>(job.num_splits);
  job.parts = workspace->take<float>(num_parts);
  job.scratch = workspace->take<Scratch>(threads);
  for (int64_t t = 0; t < threads; ++t) {
    Scratch& s = job.scratch[t];
    for (float** p : {&s.q, &s.part, &s.total}) *p = workspace->take<float>(rows * job.stride);
    for (float** p : {&s.part_max, &s.part_sum, &s.total_max, &s.total_sum}) *p = workspace->take<float>(rows);
    s.scores = workspace->take<float>(rows * kRangePositions);
    s.rows = workspace->take<AttentionRow>(rows);
    s.keys = workspace->take<float>(keys);
  }
  plan(job, max_ranges, num_parts);
  run_on_pool(run, &job);
}

void write_kv(const WriteKVCall& call) {
  const auto run_some = [](void* context, Team& team, int thread_idx) {
    const WriteKVCall& job = *static_cast<const WriteKVCall*>(context);
    const int64_t dim = job.cache.head_dim;
    constexpr int64_t kTokens = 16;
    const int64_t num_blocks = (job.num_tokens + kTokens - 1) / kTokens;
    team.for_each(0, num_blocks * job.cache.num_heads, thread_idx, [&](int64_t item, int64_t) {
      const int64_t head = item % job.cache.num_heads, first = item / job.cache.num_heads * kTokens;
      for (int64_t token = first; token < std::min(first + kTokens, job.num_tokens); ++token) {
        write_kv_row(job.cache, job.slots[token], head, job.k + token * job.k_stride + head * dim,
                     job.v == nullptr ? nullptr : job.v + token * job.v_stride + head * dim);
      }
    });
  };
  run_on_pool(run_some, const_cast<WriteKVCall*>(&call));
}

void move_kv(const MoveKVCall& call) {
  for (int64_t i = 0; i < call.num_tokens; ++i) {
    for (int64_t head = 0; head < call.cache.num_heads; ++head) move_kv_row(call.cache, call.from[i], call.to[i], head);
  }
}

}  // namespace moeflow
