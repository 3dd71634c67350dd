// A router's choice for one row of logits.
//
// Scores are computed lane by lane, so that one is the same number wherever its logit stands, and again where it is
// needed again: a row takes no memory but that of its results.
#pragma once

#include <cstdint>

#include "ops/routing.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// Scores without what a softmax divides by.
struct RowScores {
  ScoreFunction function;
  float largest;  // logit of the row
  float unit;     // what a score of 1 is: of a softmax the sum over all experts; NaN where a logit is none, or infinite

  FORCE_INLINE_MEMBER FloatLanes of(FloatLanes logits) const {
    return function == ScoreFunction::kSoftmax ? exp_vec(logits - largest) : 1.0f / (exp_vec(-logits) + 1.0f);
  }
};

// Calls use(place, part of the band) for each kLanes of so many values, to whole bands' ends.
template <typename Use>
FORCE_INLINE void for_each_part(int64_t count, const Use& use) {
  for (int64_t first = 0; first < count; first += kBand) {
    for (int part = 0; part < kParts; ++part) use(first + part * kLanes, part);
  }
}

RowScores row_scores(ScoreFunction function, const float* logits, int64_t num_experts) {
  RowScores scores{function, logits[0], 0};
  for (int64_t e = 1; e < num_experts; ++e) scores.largest = logits[e] > scores.largest ? logits[e] : scores.largest;
  FloatLanes sums[kParts] = {};
  for_each_part(num_experts, [&](int64_t e, int part) {
    FloatLanes v = scores.of(load_some(logits + e, num_experts - e));
    for (int64_t i = e < num_experts ? num_experts - e : 0; i < kLanes; ++i) v[i] = 0;
    sums[part] += v;
  });
  const float all = sum_band(sums);
  scores.unit = function == ScoreFunction::kSoftmax ? all : 1.0f + (all - all);
  return scores;
}

// Logits have the order of their scores, and distinguish scores that rounding makes equal.
bool ranks_by_logits(const Routing& routing) {
  return routing.choice_bias == nullptr && (routing.num_groups == 1 || routing.group_score == GroupScore::kMax);
}

// Calls use(expert, rank) for all experts, in order.
template <typename Use>
FORCE_INLINE void for_each_rank(const Routing& routing, const RowScores& scores, const float* logits,
                                int64_t num_experts, const Use& use) {
  if (ranks_by_logits(routing)) {
    for (int64_t e = 0; e < num_experts; ++e) use(e, logits[e]);
    return;
  }
  float ranks[kLanes];
  for (int64_t first = 0; first < num_experts; first += kLanes) {
    const int64_t left = num_experts - first;
    FloatLanes rank = scores.of(load_some(logits + first, left)) / scores.unit;
    if (routing.choice_bias != nullptr) rank += load_some(routing.choice_bias + first, left);
    store_unaligned(ranks, rank);
    for (int64_t i = 0; i < left && i < kLanes; ++i) use(first + i, ranks[i]);
  }
}

// Whether experts of each group may be chosen. Comparisons with NaN are false: it makes no group better.
void choose_groups(const Routing& routing, const RowScores& scores, const float* logits, int64_t num_experts,
                   bool* is_chosen) {
  float best[kMaxGroups], second[kMaxGroups];
  const int64_t size = num_experts / routing.num_groups;
  for (int64_t group = 0; group < routing.num_groups; ++group) {
    best[group] = second[group] = -__builtin_inff();
    is_chosen[group] = false;
  }
  for_each_rank(routing, scores, logits, num_experts, [&](int64_t expert, float rank) {
    const int64_t group = expert / size;
    if (rank > best[group]) {
      second[group] = best[group];
      best[group] = rank;
    } else if (rank > second[group]) {
      second[group] = rank;
    }
  });
  if (routing.group_score == GroupScore::kTopTwoSum) {
    for (int64_t group = 0; group < routing.num_groups; ++group) best[group] += second[group];
  }
  for (int64_t i = 0; i < routing.num_chosen_groups; ++i) {
    int64_t next = -1;
    for (int64_t group = 0; group < routing.num_groups; ++group) {
      if (!is_chosen[group] && (next < 0 || best[group] > best[next])) next = group;
    }
    is_chosen[next] = true;
  }
}

// The best experts so far, best first, with their ranks. NaN never displaces another.
struct Best {
  int64_t top_k;
  int64_t* ids;   // [top_k]
  float* ranks;   // [top_k]
  int64_t count = 0;

  FORCE_INLINE_MEMBER void add(int64_t expert, float rank) {
    int64_t place = count < top_k ? count++ : top_k;
    if (place == top_k) {
      if (!(rank > ranks[top_k - 1])) return;
      --place;
    }
    for (; place > 0 && rank > ranks[place - 1]; --place) {
      ranks[place] = ranks[place - 1];
      ids[place] = ids[place - 1];
    }
    ranks[place] = rank;
    ids[place] = expert;
  }
};

// Whether a logit counts relative to the best remaining one. Comparisons with NaN are false: it does.
bool is_near(float best, float logit, float jitter) {
  const float size = logit < 0 ? -logit : logit;
  return !((best - logit) / (size < best ? best : size) > 2 * jitter);
}

void sparse_mixer_row(const Routing& routing, const float* logits, int64_t num_experts, int64_t* ids, float* weights) {
  float spoilt = 0;  // or NaN, if a logit is
  for (int64_t e = 0; e < num_experts; ++e) spoilt = logits[e] != logits[e] ? logits[e] : spoilt;
  for (int64_t k = 0; k < routing.top_k; ++k) {
    const auto is_left = [&](int64_t expert) {
      for (int64_t i = 0; i < k; ++i) {
        if (ids[i] == expert) return false;
      }
      return true;
    };
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; ++e) {
      if (is_left(e) && (best < 0 || logits[e] > logits[best])) best = e;
    }
    FloatLanes sums[kParts] = {};
    for_each_part(num_experts, [&](int64_t first, int part) {
      const int64_t left = num_experts - first;
      FloatLanes shares = exp_vec(load_some(logits + first, left) - logits[best]);
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t e = first + i;
        if (i >= left || !is_left(e) || !is_near(logits[best], logits[e], routing.jitter)) shares[i] = 0;
      }
      sums[part] += shares;
    });
    ids[k] = best;
    weights[k] = 1 / sum_band(sums) + spoilt;
  }
}

void scale_weights(const Routing& routing, const int64_t* ids, float* weights) {
  for (int64_t k = 0; k < routing.top_k; ++k) {
    weights[k] *= routing.scale;
    if (routing.expert_scales != nullptr) weights[k] *= routing.expert_scales[ids[k]];
  }
}

// Logits that are not numbers spoil every weight of their row.
void route_row(const Routing& routing, const float* logits, int64_t num_experts, int64_t* ids, float* weights) {
  if (routing.score == ScoreFunction::kSparseMixer) {
    sparse_mixer_row(routing, logits, num_experts, ids, weights);
    scale_weights(routing, ids, weights);
    return;
  }
  const RowScores scores = row_scores(routing.score, logits, num_experts);
  const bool has_groups = routing.num_groups > 1;
  bool is_chosen[kMaxGroups];
  if (has_groups) choose_groups(routing, scores, logits, num_experts, is_chosen);
  const int64_t size = num_experts / routing.num_groups, top_k = routing.top_k;
  Best best{top_k, ids, weights};
  for_each_rank(routing, scores, logits, num_experts, [&](int64_t expert, float rank) {
    if (!has_groups || is_chosen[expert / size]) best.add(expert, rank);
  });
  if (!ranks_by_logits(routing)) {
    for (int64_t k = 0; k < top_k; ++k) weights[k] = logits[ids[k]];
  }
  float chosen = 0;
  for (int64_t k = 0; k < top_k; k += kLanes) {
    const int64_t left = top_k - k;
    const FloatLanes v = scores.of(load_some(weights + k, left));
    for (int64_t i = 0; i < left && i < kLanes; ++i) chosen += v[i];
    store_some(weights + k, v, left);
  }
  const float unit = scores.unit, least = routing.min_total * unit;
  const float sum = chosen + routing.epsilon * unit;
  const float total = routing.renormalize ? (sum > least ? sum : least) + (unit - unit) : unit;
  for (int64_t k = 0; k < top_k; ++k) weights[k] = weights[k] / total;
  scale_weights(routing, ids, weights);
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
