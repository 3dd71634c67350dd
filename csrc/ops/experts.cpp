// The expert layer in one call (ExpertFlow algorithms 5.2-5.4 on a CPU). Pairs (token, k) are sorted by expert
// as indices; no row moves. Three phases on the pool, two barriers:
//   prepare  each token's activations once;
//   up       (expert, up to four bands): hidden units, at once prepared for the next product;
//   down     bands of outputs: all touched experts in ascending order, weighted and added up.
// Where experts come into memory one after another, `down` leaves the pairs as they are, and `add_pairs` adds them up.
// Where several processes have a part of each expert, `up` and `down` are calls of their own, which exchange units.
// An item's results lie in memory that no other item touches: threads only share who takes which.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ops/ops.h"
#include "threads/pool.h"
#include "ops/rows.h"
#include "ops/workspace.h"

namespace moeflow {
namespace {

static_assert(kMaxTileBands * kBand / 2 % kGroup == 0, "units of an item are whole groups, gated or not");

enum class Part {
  kAll,
  kPresent,  // likewise, of experts in memory
  kPairs,    // without adding up
  kUnits,    // `up` alone
  kSums,     // `down` alone
};

struct ExpertsJob {
  const Isa& isa;
  const ExpertsCall& call;
  Part part;
  Activation x_kind{}, h_kind{};
  int64_t x_bytes = 0, h_bytes = 0;
  uint8_t* x_rows = nullptr;   // [num_tokens, x_bytes]
  uint8_t* h_rows = nullptr;   // [pairs, h_bytes]
  float* sums = nullptr;       // [num_tokens, hidden filled up to whole tiles]; null: pairs are not added up
  int32_t* touched = nullptr;  // experts with at least one pair, ascending
  int64_t num_touched = 0;
  int64_t* starts = nullptr;  // [num_experts + 1], first sorted pair of each expert
  int64_t* pairs = nullptr;   // [num_tokens * top_k], (token * top_k + k) sorted by expert, then by token

  const Matrix& up_of(int64_t expert) const { return call.layer.up[call.layer.place(expert)]; }
  const Matrix& down_of(int64_t expert) const { return call.layer.down[call.layer.place(expert)]; }
  bool needs(int64_t token) const {
    const int64_t* const ids = call.topk_ids + token * call.top_k;
    return needs_all() || std::any_of(ids, ids + call.top_k, [&](int64_t id) { return call.layer.place(id) >= 0; });
  }
  int64_t num_pairs() const { return starts[call.layer.num_experts]; }  // of experts in memory
  bool has_up() const { return part != Part::kSums; }
  bool has_down() const { return part != Part::kUnits; }
  bool needs_all() const { return part == Part::kAll || part == Part::kSums; }
  bool adds_up() const { return needs_all() || part == Part::kPresent; }
  // A choice without weight needs no computation. Where pairs or units go elsewhere, each has a row.
  bool skips(int64_t pair) const {
    return (part == Part::kAll || part == Part::kPresent) && call.topk_weights[pair] == 0;
  }
  // What `up` alone gives of a pair: its units, filled up to whole bands.
  int64_t units_stride() const { return round_up(call.layer.width, kBand); }
  int64_t out_stride() const { return round_up(call.layer.hidden, kTileStride); }
};

void sort_pairs(ExpertsJob& job) {
  const ExpertsCall& call = job.call;
  const int64_t num_pairs = call.num_tokens * call.top_k;
  std::memset(job.starts, 0, (call.layer.num_experts + 1) * sizeof(int64_t));
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t expert = call.topk_ids[pair];
    if (expert < 0 || expert >= call.layer.num_experts) {
      throw std::out_of_range("topk_ids names an expert that is not there");
    }
    if (call.layer.place(expert) >= 0) {
      job.starts[expert + 1] += !job.skips(pair);
    } else if (job.needs_all()) {
      throw std::out_of_range("topk_ids names an expert that is not in memory");
    }
  }
  job.num_touched = 0;
  for (int64_t expert = 0; expert < call.layer.num_experts; ++expert) {
    if (job.starts[expert + 1] > 0) job.touched[job.num_touched++] = static_cast<int32_t>(expert);
    job.starts[expert + 1] += job.starts[expert];
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t expert = call.topk_ids[pair];
    if (call.layer.place(expert) >= 0 && !job.skips(pair)) job.pairs[job.starts[expert]++] = pair;
  }
  for (int64_t expert = call.layer.num_experts; expert > 0; --expert) job.starts[expert] = job.starts[expert - 1];
  job.starts[0] = 0;
}

// Multiply an expert's pairs with up to four bands, a tile of rows at a time.
template <typename RowOf, typename Use>
void for_each_tile(const ExpertsJob& job, const Matrix& weight, int64_t first_band, int bands, int64_t first,
                   int64_t last, const uint8_t* following, RowOf row_of, Use use) {
  alignas(64) float tile_out[kMaxTileRows * kTileStride];
  const void* rows[kMaxTileRows];
  Tile tile{};
  tile.bands = weight.band(first_band);
  tile.band_stride = band_bytes(weight.format, weight.cols);
  tile.num_bands = bands;
  tile.rows = rows;
  tile.cols = weight.cols;
  tile.out = tile_out;
  tile.following = following;
  for (int64_t at = first; at < last; at += kMaxTileRows) {
    tile.num_rows = static_cast<int>(last - at < kMaxTileRows ? last - at : kMaxTileRows);
    for (int r = 0; r < tile.num_rows; ++r) rows[r] = row_of(at + r);
    tile.fetch = fetch_in(at == first, at + kMaxTileRows >= last);
    job.isa.tile(weight, tile);
    use(at, tile.num_rows, tile_out);
  }
}

void up(const ExpertsJob& job, int64_t expert, int64_t group, const uint8_t* following) {
  const ExpertsCall& call = job.call;
  const ExpertLayer& layer = call.layer;
  const Matrix& weight = job.up_of(expert);
  const int64_t first_band = group * kMaxTileBands, bands_left = num_bands(weight.rows) - first_band;
  const int bands = bands_left < kMaxTileBands ? static_cast<int>(bands_left) : kMaxTileBands;
  const int64_t row = first_band * kBand, first_unit = layer.is_gated ? row / 2 : row;
  const int64_t units_left = layer.width - first_unit, num_units = bands * kBand / (layer.is_gated ? 2 : 1);
  const RowPart part{first_unit, std::min(num_units, units_left), layer.width};
  const ExpertBiases& biases = layer.biases;
  const float* const gate_bias = ExpertBiases::row(biases.gate, expert, biases.up_stride, first_unit);
  const float* const up_bias = ExpertBiases::row(biases.up, expert, biases.up_stride, first_unit);
  for_each_tile(
      job, weight, first_band, bands, job.starts[expert], job.starts[expert + 1], following,
      [&](int64_t at) { return job.x_rows + job.pairs[at] / call.top_k * job.x_bytes; },
      [&](int64_t at, int num_rows, const float* tile_out) {
        alignas(64) float tile_units[kMaxTileRows * kTileStride];
        const int64_t stride = job.has_down() ? kTileStride : job.units_stride();
        float* const units = job.has_down() ? tile_units : call.out + at * stride + first_unit;
        job.isa.activate({layer.function, layer.alpha, layer.limit, layer.is_gated, tile_out, gate_bias, up_bias,
                          units_left, num_rows, bands, units, stride});
        for (int r = 0; r < num_rows && job.has_down(); ++r) {
          job.isa.prepare_part(job.h_kind, units + r * stride, part, job.h_rows + (at + r) * job.h_bytes);
        }
      });
}

void down(const ExpertsJob& job, int64_t group, int bands_per_item, int64_t next_group) {
  const ExpertsCall& call = job.call;
  const int64_t hidden = call.layer.hidden;
  const ExpertBiases& biases = call.layer.biases;
  const int64_t first_band = group * bands_per_item, bands_left = num_bands(hidden) - first_band;
  const int bands = bands_left < bands_per_item ? static_cast<int>(bands_left) : bands_per_item;
  const int64_t col = first_band * kBand, cols_left = hidden - col;
  const int64_t num_cols = cols_left < bands * kBand ? cols_left : bands * kBand;
  for (int64_t token = 0; token < call.num_tokens && job.sums != nullptr; ++token) {
    std::memset(job.sums + token * job.out_stride() + col, 0, num_cols * sizeof(float));
  }
  for (int64_t i = 0; i < job.num_touched; ++i) {
    const int32_t expert = job.touched[i];
    const float* const bias = ExpertBiases::row(biases.down, expert, biases.down_stride, col);
    const uint8_t* following = nullptr;
    if (i + 1 < job.num_touched) {
      following = job.down_of(job.touched[i + 1]).band(first_band);
    } else if (next_group * bands_per_item < num_bands(hidden)) {
      following = job.down_of(job.touched[0]).band(next_group * bands_per_item);
    }
    for_each_tile(
        job, job.down_of(expert), first_band, bands, job.starts[expert], job.starts[expert + 1], following,
        [&](int64_t at) { return job.h_rows + at * job.h_bytes; },
        [&](int64_t at, int num_rows, const float* tile_out) {
          for (int r = 0; r < num_rows; ++r) {
            const int64_t pair = job.pairs[at + r];
            const float weight = call.topk_weights[pair];
            float* sum = job.sums + pair / call.top_k * job.out_stride() + col;
            if (job.sums == nullptr) {
              sum = call.out + pair * hidden + col;
              std::memset(sum, 0, num_cols * sizeof(float));
            }
            job.isa.add_weighted_row(tile_out + r * kTileStride, bias, weight, num_cols, sum);
          }
        });
  }
  for (int64_t token = 0; token < call.num_tokens && job.sums != nullptr; ++token) {
    const float* sum = job.sums + token * job.out_stride() + col;
    const int64_t at = token * hidden + col;
    job.isa.add_row(sum, nullptr, call.residual == nullptr ? nullptr : call.residual + at, num_cols, call.out + at);
  }
}

void run_up(const ExpertsJob& job, Team& team, int thread_idx) {
  const ExpertsCall& call = job.call;
  const int64_t hidden = call.layer.hidden;
  team.for_each(0, call.num_tokens, thread_idx, [&](int64_t token, int64_t) {
    if (!job.needs(token)) return;
    prepare_row(job.isa, job.x_kind, call.x + token * hidden, hidden, job.x_rows + token * job.x_bytes);
  });
  team.barrier();
  const int64_t groups = (num_bands(call.layer.num_up_rows()) + kMaxTileBands - 1) / kMaxTileBands;
  team.for_each(1, job.num_touched * groups, thread_idx, [&](int64_t item, int64_t next) {
    const uint8_t* following = nullptr;
    if (next < job.num_touched * groups) {
      following = job.up_of(job.touched[next / groups]).band(next % groups * kMaxTileBands);
    }
    up(job, job.touched[item / groups], item % groups, following);
  });
}

void run_down(const ExpertsJob& job, Team& team, int thread_idx) {
  const int64_t hidden = job.call.layer.hidden, width = job.call.layer.width;
  if (!job.has_up()) {
    team.for_each(2, job.num_pairs(), thread_idx, [&](int64_t pair, int64_t) {
      prepare_row(job.isa, job.h_kind, job.call.x + pair * width, width, job.h_rows + pair * job.h_bytes);
    });
    team.barrier();
  }
  // Small layers are cut finer, so that no thread waits long for the one with the last item.
  const int bands_per_item = num_bands(hidden) >= 16 * team.num_threads() ? 4 : 2;
  const int64_t items = (num_bands(hidden) + bands_per_item - 1) / bands_per_item;
  team.for_each(3, items, thread_idx, [&](int64_t item, int64_t next) { down(job, item, bands_per_item, next); });
}

void run(void* context, Team& team, int thread_idx) {
  const ExpertsJob& job = *static_cast<const ExpertsJob*>(context);
  if (job.has_up()) run_up(job, team, thread_idx);
  if (job.has_up() && job.has_down()) team.barrier();
  if (job.has_down()) run_down(job, team, thread_idx);
}

void compute(const Isa& isa, const ExpertsCall& call, Part part) {
  if (call.num_tokens == 0) return;
  const int64_t num_pairs = call.num_tokens * call.top_k;
  const ExpertLayer& layer = call.layer;
  WorkspaceLock workspace;
  ExpertsJob job{isa, call, part};
  if (job.has_up()) {
    job.x_kind = isa.activation(layer.up[0]);
    job.x_bytes = activation_bytes(job.x_kind, layer.hidden);
  }
  if (job.has_down()) {
    job.h_kind = isa.activation(layer.down[0]);
    job.h_bytes = activation_bytes(job.h_kind, layer.width);
  }
  const int64_t num_sums = job.adds_up() ? call.num_tokens * job.out_stride() : 0;
  workspace->begin(Workspace::padded<uint8_t>(call.num_tokens * job.x_bytes) +
                   Workspace::padded<uint8_t>(num_pairs * job.h_bytes) + Workspace::padded<float>(num_sums) +
                   Workspace::padded<int32_t>(layer.num_experts) + Workspace::padded<int64_t>(layer.num_experts + 1) +
                   Workspace::padded<int64_t>(num_pairs));
  job.x_rows = workspace->take<uint8_t>(call.num_tokens * job.x_bytes);
  job.h_rows = workspace->take<uint8_t>(num_pairs * job.h_bytes);
  job.sums = job.adds_up() ? workspace->take<float>(num_sums) : nullptr;
  job.touched = workspace->take<int32_t>(layer.num_experts);
  job.starts = workspace->take<int64_t>(layer.num_experts + 1);
  job.pairs = workspace->take<int64_t>(num_pairs);
  sort_pairs(job);
  if (job.needs_all() || job.num_touched > 0) {
    run_on_pool(run, &job);
  } else if (job.adds_up()) {
    std::memset(call.out, 0, call.num_tokens * layer.hidden * sizeof(float));
  }
}

// The pair of a token that comes after the k-th (-1: before all) in the order of experts; top_k after the last.
int64_t next_pair(const int64_t* ids, int64_t top_k, int64_t k) {
  int64_t best = top_k;
  for (int64_t other = 0; other < top_k; ++other) {
    const bool is_after = k < 0 || ids[other] > ids[k] || (ids[other] == ids[k] && other > k);
    if (is_after && (best == top_k || ids[other] < ids[best])) best = other;
  }
  return best;
}

}  // namespace

void experts(const Isa& isa, const ExpertsCall& call) { compute(isa, call, Part::kAll); }

void present_experts(const Isa& isa, const ExpertsCall& call) { compute(isa, call, Part::kPresent); }

void expert_pairs(const Isa& isa, const ExpertsCall& call) { compute(isa, call, Part::kPairs); }

void expert_units(const Isa& isa, const ExpertsCall& call) { compute(isa, call, Part::kUnits); }

void expert_sums(const Isa& isa, const ExpertsCall& call) { compute(isa, call, Part::kSums); }

void add_pairs(const Isa& isa, const AddPairsCall& call) {
  for_each_row(call.num_tokens, call.top_k * call.hidden, [&](int64_t token) {
    const int64_t* const ids = call.topk_ids + token * call.top_k;
    float* const rows = call.pairs + token * call.top_k * call.hidden;
    float* const out = call.out + token * call.hidden;
    float* sum = nullptr;
    for (int64_t k = next_pair(ids, call.top_k, -1); k < call.top_k; k = next_pair(ids, call.top_k, k)) {
      float* const row = rows + k * call.hidden;
      if (sum == nullptr) {
        sum = row;
      } else {
        isa.add_row(sum, nullptr, row, call.hidden, sum);
      }
    }
    isa.add_row(sum, nullptr, call.residual == nullptr ? nullptr : call.residual + token * call.hidden, call.hidden,
                out);
  });
}

}  // namespace moeflow
