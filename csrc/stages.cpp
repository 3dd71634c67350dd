// Stages of a decoder layer made of several operations, so that a pass of few tokens is few calls.
#include <algorithm>

#include "ops.h"
#include "scratch.h"

namespace moeflow {

void route_stage(const Isa& isa, const MoEStageCall& call) {
  static thread_local Buffer<float> logits;
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows, num_experts = call.layer.num_experts;
  linear(isa, LinearCall{call.o_proj, call.attended, tokens, call.o_proj.cols, call.o_bias, call.hidden, call.out});
  normalise(isa, NormCall{call.out, call.norm, tokens, hidden, call.normed});
  if (call.router.data == nullptr) {
    std::fill_n(call.topk_ids, tokens, 0);
    std::fill_n(call.topk_weights, tokens, 1.0f);
    return;
  }
  float* const scores = logits.at_least(tokens * num_experts);
  linear(isa, LinearCall{call.router, call.normed, tokens, hidden, nullptr, nullptr, scores});
  softmax_topk(isa, SoftmaxTopkCall{scores, tokens, num_experts, call.top_k, call.renormalize, call.topk_ids,
                                    call.topk_weights});
}

void moe_stage(const Isa& isa, const MoEStageCall& call) {
  static thread_local Buffer<float> normed, topk_weights;
  static thread_local Buffer<int64_t> topk_ids;
  const int64_t tokens = call.num_tokens;
  MoEStageCall stage = call;
  if (stage.normed == nullptr) stage.normed = normed.at_least(tokens * call.o_proj.rows);
  if (stage.topk_ids == nullptr) stage.topk_ids = topk_ids.at_least(tokens * call.top_k);
  if (stage.topk_weights == nullptr) stage.topk_weights = topk_weights.at_least(tokens * call.top_k);
  route_stage(isa, stage);
  experts(isa, ExpertsCall{call.layer, stage.normed, tokens, call.top_k, stage.topk_ids, stage.topk_weights, call.out,
                           call.out});
}

}  // namespace moeflow
