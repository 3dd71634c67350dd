// Stages of a decoder layer made of several operations, so that a pass of few tokens is few calls.
#include <vector>

#include "ops.h"

namespace moeflow {
namespace {

// What one operation of a stage hands to the next. Grows to the largest pass.
struct Between {
  std::vector<float> normed, logits, topk_weights;
  std::vector<int64_t> topk_ids;
};

}  // namespace

void moe_stage(const Isa& isa, const MoEStageCall& call) {
  static thread_local Between between;
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows;
  between.normed.resize(tokens * hidden);
  between.logits.resize(tokens * call.layer.num_experts);
  between.topk_weights.resize(tokens * call.top_k);
  between.topk_ids.resize(tokens * call.top_k);
  float *const normed = between.normed.data(), *const logits = between.logits.data();
  float* const topk_weights = between.topk_weights.data();
  int64_t* const topk_ids = between.topk_ids.data();

  linear(isa, LinearCall{call.o_proj, call.attended, tokens, call.o_proj.cols, call.o_bias, call.hidden, call.out});
  rms_norm(isa, RmsNormCall{call.out, call.norm, call.eps, tokens, hidden, normed});
  linear(isa, LinearCall{call.router, normed, tokens, hidden, nullptr, nullptr, logits});
  softmax_topk(isa, SoftmaxTopkCall{logits, tokens, call.layer.num_experts, call.top_k, call.renormalize, topk_ids,
                                    topk_weights});
  experts(isa, ExpertsCall{call.layer, normed, tokens, call.top_k, topk_ids, topk_weights, call.out, call.out});
}

}  // namespace moeflow
