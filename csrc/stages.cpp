// Stages of a decoder layer made of several operations, so that a pass of few tokens is few calls.
#include <algorithm>
#include <vector>

#include "ops.h"

namespace moeflow {
namespace {

// What one operation of a stage hands to the next. Grows to the largest pass.
struct Between {
  std::vector<float> normed, logits, topk_weights;
  std::vector<int64_t> topk_ids;
};

template <typename T>
T* at_least(std::vector<T>& values, int64_t count) {
  if (static_cast<int64_t>(values.size()) < count) values.resize(count);
  return values.data();
}

}  // namespace

void moe_stage(const Isa& isa, const MoEStageCall& call) {
  static thread_local Between between;
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows;
  float* const normed = at_least(between.normed, tokens * hidden);
  float* const logits = at_least(between.logits, tokens * call.layer.num_experts);
  float* const topk_weights = at_least(between.topk_weights, tokens * call.top_k);
  int64_t* const topk_ids = at_least(between.topk_ids, tokens * call.top_k);

  linear(isa, LinearCall{call.o_proj, call.attended, tokens, call.o_proj.cols, call.o_bias, call.hidden, call.out});
  rms_norm(isa, RmsNormCall{call.out, call.norm, call.eps, tokens, hidden, normed});
  if (call.router.data == nullptr) {
    std::fill_n(topk_ids, tokens, 0);
    std::fill_n(topk_weights, tokens, 1.0f);
  } else {
    linear(isa, LinearCall{call.router, normed, tokens, hidden, nullptr, nullptr, logits});
    softmax_topk(isa, SoftmaxTopkCall{logits, tokens, call.layer.num_experts, call.top_k, call.renormalize, topk_ids,
                                      topk_weights});
  }
  experts(isa, ExpertsCall{call.layer, normed, tokens, call.top_k, topk_ids, topk_weights, call.out, call.out});
}

}  // namespace moeflow
