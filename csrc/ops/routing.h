// How a router's logits become a choice of experts and what each of them weighs.
#pragma once

#include <cstdint>

namespace moeflow {

// Of a logit: its share under a softmax over all experts; 1 / (1 + exp(-x)); SparseMixer's (2409.12136): its share under a
// softmax over it and those of the rest that are less than 2 * `jitter` below it, in proportion to the larger of the two
// (by absolute value, of the one below). The rest is what no better choice has taken.
enum class ScoreFunction : int32_t { kSoftmax, kSigmoid, kSparseMixer };

// Of a group of experts, as they are ranked: the best one's rank, or the sum of the two best ones'.
enum class GroupScore : int32_t { kMax, kTopTwoSum };

constexpr int64_t kMaxGroups = 256;

// Experts are ranked by their scores plus `choice_bias`, of equals the lower number first. Where there are groups, those
// of the best groups are alone chosen among; groups are neighbours, of the same size. A chosen expert weighs its score,
// without the bias; with `renormalize` divided by the sum of the chosen ones' and `epsilon`, and by no less than
// `min_total`; and then times `scale`, and times the expert's own. SparseMixer has neither bias nor groups, and is not
// renormalised.
struct Routing {
  int64_t top_k = 1;
  bool renormalize = false;
  ScoreFunction score = ScoreFunction::kSoftmax;
  const float* choice_bias = nullptr;  // [num_experts], or null
  int64_t num_groups = 1, num_chosen_groups = 1;
  GroupScore group_score = GroupScore::kMax;
  float epsilon = 0, min_total = 0, scale = 1;
  const float* expert_scales = nullptr;  // [num_experts], or null
  float jitter = 0;                      // of SparseMixer
};

// An expert takes at most ceil(top_k * factor * num_tokens / num_experts) choices of a pass, and at least one. Those of
// earlier tokens come first, and of one token the better ones. Later choices weigh 0.
struct ExpertCapacity {
  double factor = 0;          // 0: experts take all
  int64_t* counts = nullptr;  // [2], added to: choices, and dropped ones
};

}  // namespace moeflow
