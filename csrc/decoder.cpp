// Layers of a decoder, one after another in one call: between two kernels of a pass there is then no Python.
//
// Where experts have slots, none may leave its slot while a call runs; those that arrive are found from then on.
#include <algorithm>

#include "ops.h"
#include "scratch.h"

namespace moeflow {
namespace {

// What one stage hands to the next, and what is expected of the next layer.
struct Between {
  Buffer<float> qkv, attended, logits, topk_weights;
  Buffer<int64_t> topk_ids;
};

bool are_in_memory(const ExpertLayer& layer, const int64_t* ids, int64_t count) {
  return std::all_of(ids, ids + count, [&](int64_t id) { return layer.place(id) >= 0; });
}

// The next layer with a router; null after the last.
const MoEStageCall* next_routed(const DecoderCall& call, int64_t layer) {
  for (int64_t i = layer + 1; i < call.num_layers; ++i) {
    if (call.layers[i]->stage.router.data != nullptr) return &call.layers[i]->stage;
  }
  return nullptr;
}

// Whether a layer that is expected to need an expert would find it neither in memory nor on its way. `guesses` is its
// row of them, if there are some.
bool expects_absent(const Isa& isa, const DecoderCall& call, const MoEStageCall& next, const uint8_t* guesses,
                    const float* normed, Between& between) {
  const int64_t num_experts = next.layer.num_experts, num_ids = call.num_tokens * next.top_k;
  const int32_t* const slots = next.layer.slots;
  if (std::find(slots, slots + num_experts, kAbsent) == slots + num_experts) return false;
  if (guesses != nullptr) {
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      if (guesses[expert] != 0 && slots[expert] == kAbsent) return true;
    }
    return false;
  }
  float* const logits = between.logits.at_least(call.num_tokens * num_experts);
  float* const weights = between.topk_weights.at_least(num_ids);
  int64_t* const ids = between.topk_ids.at_least(num_ids);
  linear(isa, LinearCall{next.router, normed, call.num_tokens, next.router.cols, nullptr, nullptr, logits});
  softmax_topk(isa, SoftmaxTopkCall{logits, call.num_tokens, num_experts, next.top_k, next.renormalize, ids, weights});
  return std::any_of(ids, ids + num_ids, [&](int64_t id) { return slots[id] == kAbsent; });
}

void attend(const Isa& isa, const DecoderCall& call, const DecoderLayer& layer, const KVCache& cache, float* qkv,
            float* attended) {
  const int64_t row = layer.qkv.rows, tokens = call.num_tokens;
  linear(isa, LinearCall{layer.qkv, call.hidden, tokens, layer.qkv.cols, layer.qkv_bias, nullptr, qkv, layer.input_norm,
                         layer.eps});
  attention_input(isa, AttentionInputCall{cache, qkv, tokens, layer.num_heads, layer.q_norm, layer.k_norm,
                                          layer.norm_all_heads, layer.eps, layer.clip, call.cos, call.sin, call.slots});
  attention(isa, AttentionCall{cache, qkv, row, layer.num_heads, call.sequences, layer.sliding_window, call.tree_masks,
                               attended});
}

}  // namespace

int64_t decoder(const Isa& isa, const DecoderCall& call) {
  static thread_local Between between;
  const int64_t tokens = call.num_tokens;
  int64_t num_routed = std::count_if(call.layers, call.layers + call.first_layer,
                                     [](const DecoderLayer* layer) { return layer->stage.router.data != nullptr; });
  for (int64_t i = call.first_layer; i < call.num_layers; ++i) {
    const DecoderLayer& layer = *call.layers[i];
    const KVCache& cache = *call.caches[i];
    float* const qkv = between.qkv.at_least(tokens * layer.qkv.rows);
    float* const attended = between.attended.at_least(tokens * layer.num_heads * cache.head_dim);
    attend(isa, call, layer, cache, qkv, attended);
    MoEStageCall stage = layer.stage;
    stage.attended = attended;
    stage.hidden = stage.out = call.hidden;
    stage.num_tokens = tokens;
    if (call.keeps_inputs) stage.normed = call.normed + i * tokens * layer.qkv.cols;
    if (stage.router.data == nullptr) {
      moe_stage(isa, stage);
      continue;
    }
    if (call.topk_ids != nullptr) stage.topk_ids = call.topk_ids + num_routed * tokens * stage.top_k;
    ++num_routed;
    if (stage.layer.slots == nullptr) {
      moe_stage(isa, stage);
      continue;
    }
    if (!call.keeps_inputs) stage.normed = call.normed;
    stage.topk_weights = call.topk_weights;
    route_stage(isa, stage);
    if (!are_in_memory(stage.layer, stage.topk_ids, tokens * stage.top_k)) return i;
    const MoEStageCall* const next = call.asks_next_router || call.guesses != nullptr ? next_routed(call, i) : nullptr;
    const uint8_t* const guesses =
        call.guesses == nullptr ? nullptr : call.guesses + num_routed * stage.layer.num_experts;
    if (next != nullptr && expects_absent(isa, call, *next, guesses, stage.normed, between)) return i;
    experts(isa, ExpertsCall{stage.layer, stage.normed, tokens, stage.top_k, stage.topk_ids, stage.topk_weights,
                             call.hidden, call.hidden});
  }
  return call.num_layers;
}

}  // namespace moeflow
