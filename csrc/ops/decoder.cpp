// Layers of a decoder, one after another in one call: between two kernels of a pass there is then no Python.
//
// Where experts have slots, a fetcher reads missing experts of a layer, and prefetches for later ones. Experts must not
// be moved while a call runs.
#include <algorithm>
#include <vector>

#include "io/expert_fetcher.h"
#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/scratch.h"
#include "threads/clock.h"

namespace moeflow {
namespace {

// The data between stages, and the predicted experts of later layers.
struct Between {
  Buffer<float> projected, ordered, mixed, logits, topk_weights, pairs, beside;
  Buffer<int64_t> topk_ids;
  Buffer<int32_t> slots;
  std::vector<const MoEStageCall*> routed;  // the stages with routers
};

// A layer whose experts have slots: its stage up to the router is done, and no expert yet.
struct RoutedLayer {
  const MoEStageCall& stage;
  int64_t number;       // of those with routers
  int64_t first, last;  // likewise, of the layers with predictions
};

bool are_in_memory(const ExpertLayer& layer, const int64_t* ids, int64_t count) {
  return std::all_of(ids, ids + count, [&](int64_t id) { return layer.place(id) >= 0; });
}

// Each layer's router runs once ahead of time, by the given number of layers. At the first layer, all routers up to
// there run.
RoutedLayer routed_layer(const DecoderCall& call, const MoEStageCall& stage, int64_t number, const Between& between) {
  const int64_t reach = call.predicted != nullptr ? 1 : call.routers_ahead;
  const int64_t last = std::min(number + reach, static_cast<int64_t>(between.routed.size()) - 1);
  return {stage, number, number == 0 || reach == 0 ? number + 1 : number + reach, last};
}

bool lacks_any(const ExpertLayer& layer) {
  return std::find(layer.slots, layer.slots + layer.num_experts, kAbsent) != layer.slots + layer.num_experts;
}

// What a later layer's router would choose now, [num_tokens, top_k].
const int64_t* choose_ahead(const Isa& isa, const DecoderCall& call, const RoutedLayer& layer, const MoEStageCall& next,
                            Between& between) {
  const int64_t num_experts = next.layer.num_experts, num_ids = call.num_tokens * next.routing.top_k;
  float* const logits = between.logits.at_least(call.num_tokens * num_experts);
  float* const weights = between.topk_weights.at_least(num_ids);
  int64_t* const ids = between.topk_ids.at_least(num_ids);
  router_logits(isa, next, layer.stage.normed, call.num_tokens, logits);
  route(isa, RouteCall{next.routing, logits, call.num_tokens, num_experts, ids, weights});
  return ids;
}

// Whether a layer is expected to need an expert that is neither in memory nor on its way.
bool expects_absent(const Isa& isa, const DecoderCall& call, const RoutedLayer& layer, int64_t later,
                    Between& between) {
  const MoEStageCall& stage = *between.routed[later];
  if (!lacks_any(stage.layer)) return false;
  const int32_t* const slots = stage.layer.slots;
  if (call.predicted != nullptr) {
    const int64_t num_experts = stage.layer.num_experts;
    const uint8_t* const predicted = call.predicted + later * num_experts;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      if (predicted[expert] != 0 && slots[expert] == kAbsent) return true;
    }
    return false;
  }
  const int64_t* const ids = choose_ahead(isa, call, layer, stage, between);
  return std::any_of(ids, ids + call.num_tokens * stage.routing.top_k, [&](int64_t id) { return slots[id] == kAbsent; });
}

// Computes with the experts that are in memory and that `slots` has not yet, which are there afterwards.
void compute_arrived(const Isa& isa, ExpertsCall call, const int32_t* place, int32_t* slots, const int64_t* ids,
                     int64_t num_ids) {
  const int64_t num_experts = call.layer.num_experts;
  // Pairs are computed for all experts with a slot, so earlier experts are hidden meanwhile.
  constexpr int32_t kDone = -3;
  bool is_any = false;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    if (slots[expert] >= 0) slots[expert] = kDone;
  }
  for (int64_t i = 0; i < num_ids; ++i) {
    if (slots[ids[i]] != kAbsent || place[ids[i]] < 0) continue;
    slots[ids[i]] = place[ids[i]];
    is_any = true;
  }
  call.layer.slots = slots;
  if (is_any) expert_pairs(isa, call);
}

// Computes a layer's experts as they come. False: the fetcher cannot bring them all; then only the shared one was,
// unless it is normalised by itself.
bool fetch_and_compute(const Isa& isa, const DecoderCall& call, const RoutedLayer& layer, Between& between) {
  ExpertFetcher& fetcher = *call.fetcher;
  const MoEStageCall& stage = layer.stage;
  const int64_t num_ids = call.num_tokens * stage.routing.top_k, hidden = stage.layer.hidden;
  const bool is_coming = fetcher.request(layer.number, stage.topk_ids, num_ids);
  for (int64_t later = layer.first; is_coming && later <= layer.last; ++later) {
    const MoEStageCall& next = *between.routed[later];
    if (!lacks_any(next.layer)) continue;
    fetcher.prefetch(later, choose_ahead(isa, call, layer, next, between), call.num_tokens, next.routing.top_k);
  }
  shared_stage(isa, stage);  // meanwhile
  if (!is_coming) return false;
  const ExpertsCall whole = chosen_experts(isa, stage);
  if (!fetcher.missing().empty()) {
    ExpertsCall work = whole;
    work.residual = nullptr;
    work.out = between.pairs.at_least(num_ids * hidden);
    int32_t* const slots = between.slots.at_least(stage.layer.num_experts);
    std::fill_n(slots, stage.layer.num_experts, kAbsent);
    compute_arrived(isa, work, stage.layer.slots, slots, stage.topk_ids, num_ids);
    while (!fetcher.missing().empty()) {
      if (!fetcher.wait()) return false;
      compute_arrived(isa, work, stage.layer.slots, slots, stage.topk_ids, num_ids);
    }
    add_pairs(isa, AddPairsCall{work.out, call.num_tokens, stage.routing.top_k, hidden, stage.topk_ids, whole.residual,
                                whole.out});
  } else {
    experts(isa, whole);
  }
  finish_stage(isa, stage, whole.out);
  fetcher.finish();
  return true;
}

// False: the layer lacks an expert, or a later one will, and somebody else has to see to that; the shared one is done.
bool compute_in_slots(const Isa& isa, const DecoderCall& call, const RoutedLayer& layer, Between& between) {
  const MoEStageCall& stage = layer.stage;
  if (call.fetcher != nullptr && call.fetcher->may_load()) return fetch_and_compute(isa, call, layer, between);
  shared_stage(isa, stage);
  if (call.fetcher != nullptr) call.fetcher->collect();
  if (!are_in_memory(stage.layer, stage.topk_ids, call.num_tokens * stage.routing.top_k)) return false;
  for (int64_t later = layer.first; later <= layer.last; ++later) {
    if (expects_absent(isa, call, layer, later, between)) return false;
  }
  const ExpertsCall work = chosen_experts(isa, stage);
  experts(isa, work);
  finish_stage(isa, stage, work.out);
  return true;
}

// What goes into a layer's mixer, [num_tokens, layer.mixed()].
float* project(const Isa& isa, const DecoderCall& call, const DecoderLayer& layer, Between& between) {
  const int64_t row = layer.projected(), hidden = layer.hidden(), tokens = call.num_tokens;
  float* const projected = between.projected.at_least(tokens * row);
  int64_t first = 0;
  for (const Matrix& part : layer.in_proj) {
    const float* const bias = layer.in_bias == nullptr ? nullptr : layer.in_bias + first;
    linear(isa, LinearCall{part, call.hidden, tokens, hidden, bias, nullptr, projected + first, layer.input_norm, row});
    first += part.rows;
  }
  if (layer.order.empty()) return projected;
  const int64_t mixed = layer.mixed();
  float* const ordered = between.ordered.at_least(tokens * mixed);
  for_each_row(tokens, mixed, [&](int64_t token) {
    float* to = ordered + token * mixed;
    for (const ValueRange& range : layer.order) {
      to = std::copy_n(projected + token * row + range.first, range.count, to);
    }
  });
  return ordered;
}

void attend(const Isa& isa, const DecoderCall& call, const DecoderLayer& of_layer, const KVCache& cache, float* projected,
            float* attended) {
  const AttentionLayer& layer = of_layer.attention;
  const int64_t row = of_layer.mixed(), tokens = call.num_tokens;
  if (layer.latent != nullptr) {
    latent_attention(isa, LatentAttentionCall{*layer.latent, cache, projected, tokens, layer.num_heads,
                                              call.rotary[layer.rotary], call.slots, call.sequences,
                                              layer.sliding_window, call.tree_masks, layer.scale, attended});
    return;
  }
  AttentionInputCall input{cache, projected, tokens, layer.num_heads, layer.q_norm, layer.k_norm, layer.norm_all_heads,
                           of_layer.input_norm.eps, layer.clip,
                           layer.rotary < 0 ? RotaryTable{} : call.rotary[layer.rotary], call.slots};
  input.norms_last = layer.norms_last;
  input.is_interleaved = layer.is_interleaved;
  input.qkv_stride = row;
  input.v_norm = layer.v_norm;
  input.has_keys = layer.has_keys;
  attention_input(isa, input);
  AttentionCall attending{cache, projected, row, layer.num_heads, call.sequences, layer.sliding_window, call.tree_masks,
                          attended};
  attending.scale = layer.scale;
  attending.soft_cap = layer.soft_cap;
  attending.sinks = layer.sinks;
  attention(isa, attending);
  if (!layer.is_gated) return;
  const int64_t size = layer.num_heads * cache.head_dim;
  sigmoid_gate(isa, SigmoidGateCall{attended, projected + row - size, row, tokens, size, attended});
}

// Has the tokens of layer `number` see those before them. Returns what its output projection takes.
const float* mix(const Isa& isa, const DecoderCall& call, int64_t number, Between& between) {
  const DecoderLayer& layer = *call.layers[number];
  float* const projected = project(isa, call, layer, between);
  float* const mixed = between.mixed.at_least(call.num_tokens * layer.stage.o_proj.cols);
  if (layer.attends()) {
    attend(isa, call, layer, *call.caches[number], projected, mixed);
  } else {
    const StateMemory states{call.states[number], call.slot_floats, 0};
    recurrent_mixer(isa, RecurrentMixerCall{layer.recurrent, projected, layer.mixed(), call.num_tokens, states,
                                            call.state_sequences, mixed});
  }
  return mixed;
}

// What layer `number` gets for each token besides, if it gets something, goes into `hidden`.
void add_layer_input(const Isa& isa, const DecoderCall& call, int64_t number) {
  const LayerInput& layer = call.layers[number]->input;
  if (layer.gate.data == nullptr) return;
  const float* const inputs = call.layer_inputs + number * layer.size();
  layer_input(isa, LayerInputCall{layer, inputs, call.inputs_stride, call.num_tokens, call.hidden});
}

}  // namespace

int64_t decoder(const Isa& isa, const DecoderCall& call) {
  static thread_local Between between;
  const int64_t tokens = call.num_tokens;
  between.routed.clear();
  for (int64_t i = 0; i < call.num_layers; ++i) {
    if (call.layers[i]->stage.router.data != nullptr) between.routed.push_back(&call.layers[i]->stage);
  }
  int64_t num_routed = std::count_if(call.layers, call.layers + call.first_layer,
                                     [](const DecoderLayer* layer) { return layer->stage.router.data != nullptr; });
  for (int64_t i = call.first_layer; i < call.num_layers; ++i) {
    const DecoderLayer& layer = *call.layers[i];
    MoEStageCall stage = layer.stage;
    LayerTimes* const times = call.times == nullptr ? nullptr : call.times + i;
    if (times != nullptr) times->begun_ns = i > call.first_layer ? times[-1].ended_ns : now_ns();
    stage.attended = mix(isa, call, i, between);
    if (times != nullptr) {
      stamp(&times->mixed_ns);
      stage.routed_ns = &times->routed_ns;
    }
    stage.hidden = stage.out = call.hidden;
    stage.num_tokens = tokens;
    if (call.keeps_inputs) stage.normed = call.normed + i * tokens * layer.hidden();
    if (stage.router.data == nullptr) {
      moe_stage(isa, stage);
      add_layer_input(isa, call, i);
      if (times != nullptr) stamp(&times->ended_ns);
      continue;
    }
    if (call.topk_ids != nullptr) stage.topk_ids = call.topk_ids + num_routed * tokens * stage.routing.top_k;
    const int64_t number = num_routed++;
    if (stage.layer.slots == nullptr) {
      moe_stage(isa, stage);
      add_layer_input(isa, call, i);
      if (times != nullptr) stamp(&times->ended_ns);
      continue;
    }
    if (!call.keeps_inputs) stage.normed = call.normed;
    stage.topk_weights = call.topk_weights;
    if (stage.normed_experts.shared_weights != nullptr) stage.beside = between.beside.at_least(tokens * layer.hidden());
    route_stage(isa, stage);
    if (!compute_in_slots(isa, call, routed_layer(call, stage, number, between), between)) return i;
    if (times != nullptr) stamp(&times->ended_ns);
  }
  if (call.out != nullptr) {
    normalise(isa, NormCall{call.hidden, call.out_norm, tokens, call.layers[0]->hidden(), call.out});
  }
  return call.num_layers;
}

}  // namespace moeflow
