// Stages of a decoder layer made of several operations, so that a pass of few tokens is few calls.
#include <algorithm>

#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/scratch.h"
#include "threads/clock.h"

namespace moeflow {

namespace {

// out = x * scale * weights, of each row.
void weigh_rows(const Isa& isa, const float* x, float scale, const float* weights, int64_t num_rows, int64_t size,
                float* out) {
  for_each_row(num_rows, size, [&](int64_t row) { isa.scale_row(x + row * size, scale, weights, size, out + row * size); });
}

// out = to + norm(x), which is changed.
void add_normed(const Isa& isa, const Norm& norm, float* x, int64_t num_rows, int64_t size, const float* to,
                float* out) {
  for_each_row(num_rows, 2 * size, [&](int64_t row) {
    float* const at = x + row * size;
    normalise_row(isa, norm, at, size, at);
    isa.add_row(at, nullptr, to + row * size, size, out + row * size);
  });
}

// h = hidden + attended @ o_proj.T
void project(const Isa& isa, const MoEStageCall& call) {
  static thread_local Buffer<float> projected;
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows, attended = call.o_proj.cols;
  if (call.attention_norm.weight == nullptr) {
    linear(isa, LinearCall{call.o_proj, call.attended, tokens, attended, call.o_bias, call.hidden, call.out});
    return;
  }
  float* const added = projected.at_least(tokens * hidden);
  linear(isa, LinearCall{call.o_proj, call.attended, tokens, attended, call.o_bias, nullptr, added});
  add_normed(isa, call.attention_norm, added, tokens, hidden, call.hidden, call.out);
}

}  // namespace

void router_logits(const Isa& isa, const MoEStageCall& call, const float* normed, int64_t num_tokens, float* logits) {
  static thread_local Buffer<float> weighted;
  const int64_t hidden = call.router.cols;
  const NormedExperts& norms = call.normed_experts;
  if (norms.router_weights != nullptr) {
    float* const given = weighted.at_least(num_tokens * hidden);
    weigh_rows(isa, normed, norms.router_scale, norms.router_weights, num_tokens, hidden, given);
    normed = given;
  }
  linear(isa, LinearCall{call.router, normed, num_tokens, hidden, call.router_bias, nullptr, logits});
}

void route_stage(const Isa& isa, const MoEStageCall& call) {
  static thread_local Buffer<float> logits;
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows, num_experts = call.layer.num_experts;
  project(isa, call);
  normalise(isa, NormCall{call.out, call.norm, tokens, hidden, call.normed});
  if (call.router.data == nullptr) {
    std::fill_n(call.topk_ids, tokens, 0);
    std::fill_n(call.topk_weights, tokens, 1.0f);
    stamp(call.routed_ns);
    return;
  }
  float* const scores = logits.at_least(tokens * num_experts);
  router_logits(isa, call, call.normed, tokens, scores);
  route(isa, RouteCall{call.routing, scores, tokens, num_experts, call.topk_ids, call.topk_weights});
  if (call.capacity.factor > 0) {
    limit_choices(isa, LimitCall{call.capacity, call.topk_ids, tokens, call.routing.top_k, num_experts,
                                 call.topk_weights});
  }
  stamp(call.routed_ns);
}

namespace {

// out = (residual +) the shared expert of x.
void shared_expert(const Isa& isa, const MoEStageCall& call, const float* x, const float* residual, float* out) {
  static thread_local Buffer<float> scores, shared_weights;
  static thread_local Buffer<int64_t> shared_ids;
  const int64_t tokens = call.num_tokens;
  int64_t* const ids = shared_ids.at_least(tokens);
  float* const weights = shared_weights.at_least(tokens);
  if (call.shared_gate.data == nullptr) {
    std::fill_n(ids, tokens, 0);
    std::fill_n(weights, tokens, 1.0f);
  } else {
    Routing routing;
    routing.score = ScoreFunction::kSigmoid;
    float* const gates = scores.at_least(tokens);
    linear(isa, LinearCall{call.shared_gate, x, tokens, call.shared_gate.cols, nullptr, nullptr, gates});
    route(isa, RouteCall{routing, gates, tokens, 1, ids, weights});
  }
  experts(isa, ExpertsCall{call.shared, x, tokens, 1, ids, weights, residual, out});
}

}  // namespace

void shared_stage(const Isa& isa, const MoEStageCall& call) {
  static thread_local Buffer<float> weighted;
  const NormedExperts& norms = call.normed_experts;
  if (call.shared.num_experts == 0) return;
  if (norms.shared_weights == nullptr) {
    shared_expert(isa, call, call.normed, call.out, call.out);
    return;
  }
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows;
  float* const given = weighted.at_least(tokens * hidden);
  weigh_rows(isa, call.normed, 1, norms.shared_weights, tokens, hidden, given);
  shared_expert(isa, call, given, nullptr, call.beside);
  normalise(isa, NormCall{call.beside, norms.shared_norm, tokens, hidden, call.beside});
}

ExpertsCall chosen_experts(const Isa& isa, const MoEStageCall& call) {
  static thread_local Buffer<float> weighted, computed;
  const NormedExperts& norms = call.normed_experts;
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows;
  ExpertsCall work{call.layer,    call.normed,       tokens,   call.routing.top_k,
                   call.topk_ids, call.topk_weights, call.out, call.out};
  if (norms.chosen_weights != nullptr) {
    float* const given = weighted.at_least(tokens * hidden);
    weigh_rows(isa, call.normed, 1, norms.chosen_weights, tokens, hidden, given);
    work.x = given;
  }
  if (call.experts_norm.weight != nullptr) {
    work.residual = nullptr;
    work.out = computed.at_least(tokens * hidden);
  }
  return work;
}

void finish_stage(const Isa& isa, const MoEStageCall& call, float* chosen) {
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows;
  if (call.normed_experts.chosen_weights != nullptr) {
    add_normed(isa, call.normed_experts.chosen_norm, chosen, tokens, hidden, call.beside, chosen);
  }
  if (call.experts_norm.weight != nullptr) add_normed(isa, call.experts_norm, chosen, tokens, hidden, call.out, call.out);
  if (call.out_scale == nullptr) return;
  for_each_row(tokens, hidden, [&](int64_t row) {
    for (int64_t i = row * hidden; i < (row + 1) * hidden; ++i) call.out[i] *= *call.out_scale;
  });
}

void moe_stage(const Isa& isa, const MoEStageCall& call) {
  static thread_local Buffer<float> normed, topk_weights, beside;
  static thread_local Buffer<int64_t> topk_ids;
  const int64_t tokens = call.num_tokens, hidden = call.o_proj.rows;
  MoEStageCall stage = call;
  if (stage.normed == nullptr) stage.normed = normed.at_least(tokens * hidden);
  if (stage.topk_ids == nullptr) stage.topk_ids = topk_ids.at_least(tokens * call.routing.top_k);
  if (stage.topk_weights == nullptr) stage.topk_weights = topk_weights.at_least(tokens * call.routing.top_k);
  if (stage.normed_experts.shared_weights != nullptr) stage.beside = beside.at_least(tokens * hidden);
  route_stage(isa, stage);
  shared_stage(isa, stage);
  const ExpertsCall work = chosen_experts(isa, stage);
  experts(isa, work);
  finish_stage(isa, stage, work.out);
}

}  // namespace moeflow
