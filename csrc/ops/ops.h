// The operations that Python calls: a few big calls a layer, each spread over the pool. Raw pointers and sizes;
// activations are float32 throughout. Operations allocate only memory that outlives calls and grows to the largest: the
// workspace (workspace.h), and buffers between operations (scratch.h).
#pragma once

#include <cstdint>
#include <vector>

#include "simd/isa.h"
#include "ops/kv_cache.h"
#include "formats/matrix.h"
#include "ops/norm.h"
#include "ops/recurrent.h"
#include "ops/routing.h"

namespace moeflow {

// out[r, n] = norm(x)[r, k] @ weight.T (+ bias[n]) (+ residual[r, n]). `residual` may be `out` itself.
struct LinearCall {
  Matrix weight;  // [n, k]
  const float* x;
  int64_t num_rows;
  int64_t x_stride;             // floats from a row of x to the next
  const float* bias;            // or null
  const float* residual;        // or null
  float* out;
  Norm norm = {};               // that x goes through first
  int64_t out_stride = 0;       // floats from a row of out, and of residual, to the next; 0: n
  // With several heads each one has a matrix of its own, [head_rows, k], one below the other, filled up to whole bands;
  // neither bias nor residual. Floats from a head of x, and of out, to the next.
  int64_t num_heads = 1, head_rows = 0, x_head_stride = 0, out_head_stride = 0;
};
void linear(const Isa& isa, const LinearCall& call);

// Biases of an expert's gates, ups and outputs; null: none. Rows of experts lie `up_stride` and `down_stride`
// floats apart.
struct ExpertBiases {
  const float* gate = nullptr;  // [num_experts, width]
  const float* up = nullptr;    // likewise
  const float* down = nullptr;  // [num_experts, hidden]
  int64_t up_stride = 0, down_stride = 0;

  static const float* row(const float* of, int64_t expert, int64_t stride, int64_t first) {
    return of == nullptr ? nullptr : of + expert * stride + first;
  }
};

// The experts of a layer: down(function(gate(x)) * up(x)), or down(function(up(x))) where there is no gate.
struct ExpertLayer {
  // One each, [num_up_rows, hidden]: up, or gated with alternating bands: gate 0..15, up 0..15, gate 16..31, ...; null
  // where a process has only the other half, see `expert_units`.
  const Matrix* up;
  const Matrix* down;  // likewise, [hidden, width]; or null
  int64_t num_experts, hidden, width;
  Nonlinearity function = Nonlinearity::kSilu;
  bool is_gated = true;
  float alpha = 0, limit = 0;  // of kClampedSwiglu
  ExpertBiases biases{};
  // [num_experts]: the place of each in `up` and `down`, which then hold experts in memory; negative: absent. Null: all
  // are, in order.
  const int32_t* slots = nullptr;

  int64_t num_up_rows() const { return (is_gated ? 2 : 1) * round_up(width, kBand); }
  int64_t place(int64_t expert) const { return slots == nullptr ? expert : slots[expert]; }
};

// out[t] = (residual[t] +) sum over k of topk_weights[t, k] * expert topk_ids[t, k] of x[t]. The results of a token's
// experts are added in ascending order of expert number.
struct ExpertsCall {
  ExpertLayer layer;
  const float* x;  // [num_tokens, hidden]
  int64_t num_tokens, top_k;
  const int64_t* topk_ids;    // [num_tokens, top_k], each below num_experts
  const float* topk_weights;  // [num_tokens, top_k]
  const float* residual;      // [num_tokens, hidden], or null; may be `out` itself
  float* out;                 // [num_tokens, hidden]
};
void experts(const Isa& isa, const ExpertsCall& call);

// The same without residual, of the experts in a slot alone: a token without one gets 0.
void present_experts(const Isa& isa, const ExpertsCall& call);

// The same in parts, as experts come into memory. For pairs (token, k) with an expert in a slot: out[pair] is
// topk_weights[pair] * its result, [num_tokens * top_k, hidden]. Rows of other pairs stay unchanged.
void expert_pairs(const Isa& isa, const ExpertsCall& call);

// The two halves of `experts`, for processes that have a part of each expert: a layer of some hidden units, and one of
// some outputs. Between them they exchange the units, so that no sum is cut. Pairs are in the order of expert, then
// token. The first needs `up` alone: out is [num_tokens * top_k, width filled up to whole bands]. The second needs `down`
// alone: x is the units [num_tokens * top_k, width].
void expert_units(const Isa& isa, const ExpertsCall& call);
void expert_sums(const Isa& isa, const ExpertsCall& call);

// With the rows of all pairs that `expert_pairs` writes, what `experts` returns.
struct AddPairsCall {
  float* pairs;  // [num_tokens * top_k, hidden]; changed
  int64_t num_tokens, top_k, hidden;
  const int64_t* topk_ids;  // [num_tokens, top_k]
  const float* residual;    // [num_tokens, hidden], or null; may be `out` itself
  float* out;               // [num_tokens, hidden]
};
void add_pairs(const Isa& isa, const AddPairsCall& call);

// Store K and V of some tokens.
struct WriteKVCall {
  KVCache cache;
  int64_t num_tokens;
  const int64_t* slots;  // [num_tokens]: block * block_size + offset
  const float *k, *v;    // [num_tokens, KV heads, head_dim], rows k_stride and v_stride floats apart; v may be null
                         // where values are the first dimensions of keys
  int64_t k_stride, v_stride;
};
void write_kv(const WriteKVCall& call);

// Copy some tokens' K and V to other slots, one after another.
struct MoveKVCall {
  KVCache cache;
  int64_t num_tokens;
  const int64_t *from, *to;  // [num_tokens]
};
void move_kv(const MoveKVCall& call);

// The sequences of a pass.
struct Sequences {
  int64_t count;
  const int32_t* first_tokens;   // [count]: index in the pass of each sequence's first token,
  const int32_t* starts;         // its position in its sequence,
  const int32_t* counts;         // how many tokens of the pass are the sequence's,
  const int32_t* table_offsets;  // and where its block numbers begin in:
  const int32_t* block_tables;
};

// Attention of every token of a pass over its sequence; K and V of the pass are in the cache already. Causal, or with
// `lengths` over that many first positions of the sequence, for any token. Query heads that share a KV head are
// neighbours. block_size must be a multiple
// of 16, head_dim of 2.
//
// A sliding window limits a token to its last `sliding_window` visible positions, itself included.
// A tree mask covers the last 64 positions of the sequence after this pass: bit i of a token's mask is position start +
// count - 64 + i. The token sees of them those with a bit, none beyond itself, and all positions
// before. So a mask of all ones is plainly causal. A row's bits equal those for contiguous visible positions, if the
// sequence's tokens of this pass lie in one aligned range of 256 positions.
struct AttentionCall {
  KVCache cache;
  const float* q;  // [T, num_heads, head_dim], rows q_stride floats apart
  int64_t q_stride, num_heads;
  Sequences sequences;
  int64_t sliding_window;      // 0: none
  const uint64_t* tree_masks;  // [T], or null
  float* out;                  // [T, num_heads * value_dim]
  float scale = 0;                   // of the scores; 0: head_dim^-0.5
  const int32_t* lengths = nullptr;  // [sequences], or null: causal
  // [num_heads, 2 * bias_reach + 1], added to a score by the distance of the key behind the query, from -bias_reach on.
  // Larger distances count as `bias_reach`. Null: nothing is added. Not for trees.
  const float* bias = nullptr;
  int64_t bias_reach = 0;
  float soft_cap = 0;            // c: scores become c * tanh(score / c) before anything is added; 0: they stay
  const float* sinks = nullptr;  // [num_heads]: one more score of each token, of a value that is zero; or null
};
void attention(const Isa& isa, const AttentionCall& call);

// A layer of an LSTM, after the products of its inputs: for each step and text, `inputs` is added to the weights times
// the text's last state. Computed by the calling thread alone, which waits for no other.
struct LstmCall {
  Matrix weights;       // [4 hidden, hidden]: of the gates input, forget, cell and output
  const float* inputs;  // [num_steps, num_texts, 4 hidden], biases included
  int64_t num_steps, num_texts;
  float *state, *cell;  // [num_texts, hidden]; as they were before the first step, and then after the last
  float* out;           // [num_steps, num_texts, hidden]: the state after each step
};
void lstm(const Isa& isa, const LstmCall& call);

// Layers that keep a state of each sequence, see recurrent.h.
void short_conv(const Isa& isa, const ShortConvCall& call);
void recurrence(const Isa& isa, const RecurrenceCall& call);
void gated_norm(const Isa& isa, const GatedNormCall& call);
void sigmoid_gate(const Isa& isa, const SigmoidGateCall& call);
void recurrent_mixer(const Isa& isa, const RecurrentMixerCall& call);

// out[r] = norm(x[r])
struct NormCall {
  const float* x;  // [num_rows, size]
  Norm norm;
  int64_t num_rows, size;
  float* out;  // may be x
};
void normalise(const Isa& isa, const NormCall& call);

// cos and sin of the tokens of a pass for heads with `dim` rotated first dimensions.
struct RotaryTable {
  const float *cos, *sin;  // [num_tokens, dim], the first half of sin negated; null: nothing is rotated
  int64_t dim;
};

// How such a table is made: of each token's position times the frequency of each pair, that product in float32.
struct Rotary {
  const float* frequencies;  // [num_pairs]
  int64_t num_pairs;
  double scale;  // of cos and sin
};

struct RotaryTableCall {
  Rotary rotary;
  const int64_t* positions;  // [num_tokens]
  int64_t num_tokens;
  float *cos, *sin;  // [num_tokens, 2 * num_pairs]
};
void rotary_table(const Isa& isa, const RotaryTableCall& call);

// Everything between the QKV projection and attention: queries and keys are normalised, clipped (values too) and
// rotated, keys and values stored in the cache. Queries stay where they are.
struct AttentionInputCall {
  KVCache cache;
  float* qkv;  // [num_tokens, (num_heads + 2 KV heads) * head_dim]; changed
  int64_t num_tokens, num_heads;
  const float *q_norm, *k_norm;  // [head_dim]; over all heads: [heads * head_dim]; or null
  bool norm_all_heads;
  float eps;
  float clip;  // 0: none
  RotaryTable rotary;
  const int64_t* slots;  // [num_tokens]: block * block_size + offset
  bool norms_last = false;      // norms of single heads come after the rotation
  bool is_interleaved = false;  // neighbours are rotated against each other, else halves
  int64_t qkv_stride = 0;       // floats from a token's row to the next; 0: they lie side by side
  const float* v_norm = nullptr;  // [head_dim], or null: values are not normalised
  bool has_keys = true;  // else rows are queries alone, and nothing is stored: keys and values are another layer's
};
constexpr int64_t kMaxInterleaved = 2048;  // dimensions that are rotated so
void attention_input(const Isa& isa, const AttentionInputCall& call);

// Latent attention: keys and values of all heads are up-projections of one latent a token. Queries are multiplied by
// the projection of keys, so that they attend to latents. The result, a latent, is multiplied by the projection of
// values.
struct LatentProjections {
  Matrix q_b;                // [num_heads * (nope_dim + rotary), q rank]; without data: queries are projected at once
  Norm q_norm;               // of what goes into q_b
  Norm latent_norm;
  Matrix k_b;                // of each head [latent_dim, nope_dim], filled up to whole bands
  Matrix v_b;                // of each head [value_dim, latent_dim], likewise
  int64_t nope_dim, value_dim;  // of a head: unrotated part of queries; of values
  bool is_interleaved;       // rotary positions rotate neighbours against each other, else halves
};

// All between the first projections and the output projection. The cache has one head: latents, then rotary keys.
struct LatentAttentionCall {
  const LatentProjections& projections;
  KVCache cache;
  // [num_tokens, (q rank, or num_heads * (nope_dim + rotary)) + head_dim]: queries, latents, rotary keys
  const float* projected;
  int64_t num_tokens, num_heads;
  RotaryTable rotary;    // of all rotary dimensions: head_dim - latent_dim
  const int64_t* slots;  // [num_tokens]
  Sequences sequences;
  int64_t sliding_window;      // as in AttentionCall, and what follows
  const uint64_t* tree_masks;
  float scale;  // of the scores
  float* out;   // [num_tokens, num_heads * value_dim]
};
void latent_attention(const Isa& isa, const LatentAttentionCall& call);

// Weights and norms of a router, a shared expert and the chosen ones that stand beside each other. Each gets the
// normalized input times its weights, [hidden]. The experts' output is normalized before both are added.
struct NormedExperts {
  const float *router_weights, *shared_weights, *chosen_weights;  // null: it is not so
  float router_scale;  // of what the router gets, besides
  Norm shared_norm, chosen_norm;
};

// The part of a layer of experts after attention, in one call: out = h (+ shared(norm(h))) + experts(norm(h)), where h
// = hidden + attended @ o_proj.T (+ o_bias) and `routing` defines the router's choice.
struct MoEStageCall {
  Matrix o_proj;  // [hidden, attended]
  Matrix router;  // [num_experts, hidden]; without data: all tokens go to the one expert, as in a dense layer
  ExpertLayer layer;
  Routing routing;
  const float* o_bias;  // or null
  Norm norm;
  const float* attended;  // [num_tokens, o_proj.cols]
  const float* hidden;    // [num_tokens, o_proj.rows]
  int64_t num_tokens;
  float* out;  // as hidden, and may be it
  // Where what experts get and are asked for goes; null: it is of no interest.
  float* normed = nullptr;        // [num_tokens, hidden]
  int64_t* topk_ids = nullptr;    // [num_tokens, top_k]
  float* topk_weights = nullptr;  // [num_tokens, top_k]
  const float* router_bias = nullptr;  // [num_experts]; or null
  ExpertLayer shared{};  // one expert that all tokens go to, or none
  Matrix shared_gate{};  // [1, hidden]: it weighs the sigmoid of that; without data: 1
  // Of what attention's projection and the experts return, before it is added; without weights: none. A shared expert
  // goes into the second only if `normed_experts` defines the sum of both.
  Norm attention_norm{}, experts_norm{};
  NormedExperts normed_experts{};    // with a shared expert, not gated
  float* beside = nullptr;           // [num_tokens, hidden], where the shared one's result then goes
  const float* out_scale = nullptr;  // that `out` is multiplied by in the end; or null
  ExpertCapacity capacity{};         // of the chosen experts
  int64_t* routed_ns = nullptr;      // where the time goes at which experts are chosen; or null
};
// What a router says of each expert, [num_tokens, num_experts].
void router_logits(const Isa& isa, const MoEStageCall& call, const float* normed, int64_t num_tokens, float* logits);
void moe_stage(const Isa& isa, const MoEStageCall& call);
// All of it but experts: `out` is h, and `normed` and what follows it is not null.
void route_stage(const Isa& isa, const MoEStageCall& call);
// Adds the shared expert of `normed` to `out`, if there is one; or with `normed_experts` puts it into `beside`.
void shared_stage(const Isa& isa, const MoEStageCall& call);
// The work of the chosen experts, which is added to `out`; or by itself where it has yet to be normalised.
ExpertsCall chosen_experts(const Isa& isa, const MoEStageCall& call);
// All that follows them: with norms `out` from h and `chosen`, what that work gave, which is changed.
void finish_stage(const Isa& isa, const MoEStageCall& call, float* chosen);

// Attention of a layer over its projections: queries, keys and values of a token in one row, or the layout of `latent`.
struct AttentionLayer {
  int64_t num_heads;
  const float *q_norm, *k_norm, *v_norm;  // as in AttentionInputCall
  bool norm_all_heads;
  float clip;
  int64_t sliding_window;  // 0: none
  float scale;             // as in AttentionCall, and the next two
  float soft_cap;
  const float* sinks;
  int64_t rotary;       // which of the pass's tables it rotates by; -1: it does not
  bool norms_last;      // as in AttentionInputCall, and the next one
  bool is_interleaved;
  // The result is multiplied by the sigmoids of gates, as many, which follow queries, keys and values. Without `latent`.
  bool is_gated;
  const LatentProjections* latent;  // or null
  bool has_keys = true;  // as in AttentionInputCall; else its cache is an earlier layer's
};

// What a layer makes of an input of its own for each token, of `size` values: hidden += norm(projection * units), where
// units = function(gate * hidden) * input; and then hidden *= scale.
struct LayerInput {
  Matrix gate;        // [size, hidden]; without data: there is none
  Matrix projection;  // [hidden, size]
  Norm norm;
  Nonlinearity function;
  const float* scale;  // or null: 1

  int64_t size() const { return gate.rows; }
};

struct LayerInputCall {
  LayerInput layer;
  const float* inputs;  // [num_tokens, size], rows `inputs_stride` floats apart
  int64_t inputs_stride;
  int64_t num_tokens;
  float* hidden;  // [num_tokens, hidden]; changed
};
void layer_input(const Isa& isa, const LayerInputCall& call);

// Neighbours among a token's values.
struct ValueRange {
  int64_t first, count;
};

// A layer: norm, projection, what mixes its tokens, and what MoEStageCall says. All norms of a model share `eps`.
struct DecoderLayer {
  std::vector<Matrix> in_proj;  // one or more stacked matrices: to the mixer's inputs
  const float* in_bias;         // or null
  Norm input_norm;
  std::vector<ValueRange> order;  // places of the mixer's values in the projection; empty: all of it
  AttentionLayer attention;
  RecurrentMixer recurrent;  // in the place of attention, if it has channels
  MoEStageCall stage;        // its weights; the rest is filled in
  LayerInput input{};        // the last network, if there is one; only with all of its experts

  bool attends() const { return recurrent.conv.num_channels == 0; }
  int64_t hidden() const { return in_proj.front().cols; }
  int64_t projected() const {
    int64_t rows = 0;
    for (const Matrix& part : in_proj) rows += part.rows;
    return rows;
  }
  int64_t mixed() const {  // values of a token that the mixer takes
    int64_t values = 0;
    for (const ValueRange& range : order) values += range.count;
    return order.empty() ? projected() : values;
  }
};

// What `ExpertLayer::slots` says of an expert without a slot.
constexpr int32_t kAbsent = -1;
constexpr int32_t kLoading = -2;  // on its way from disk

class ExpertFetcher;  // expert_fetcher.h

// The times at which a pass comes to the parts of a layer, in nanoseconds of the steady clock.
struct LayerTimes {
  int64_t begun_ns;   // the layer's norm and mixer begin, as the layer before ends
  int64_t mixed_ns;   // the mixer is done; its output projection and the router follow
  int64_t routed_ns;  // experts are chosen
  int64_t ended_ns;   // the layer is done; not written where the pass stops
};

// A pass through layers, from the one after another. With slots, it stops at a layer that needs, or is predicted to
// need, an absent expert, unless the fetcher can read it. The caller reads it, computes the layer's experts, and calls
// again for the rest.
struct DecoderCall {
  const DecoderLayer* const* layers;
  const KVCache* const* caches;  // one a layer that attends; of others null
  int64_t num_layers, first_layer;
  float* hidden;  // [num_tokens, hidden]; goes in and comes out
  int64_t num_tokens;
  const RotaryTable* rotary;  // one for each kind of rotary positions that layers have
  const int64_t* slots;
  Sequences sequences;
  const uint64_t* tree_masks;  // [num_tokens], or null
  // Of layers that keep states: one a layer, of others null, and where the pass's are.
  float* const* states;
  int64_t slot_floats;
  StateSequences state_sequences;
  // What layers get for each token besides, [num_tokens, num_layers, their size], rows `inputs_stride` floats apart.
  const float* layer_inputs = nullptr;
  int64_t inputs_stride = 0;
  // The choices of each layer's router: [layers with routers, num_tokens, top_k]; or null.
  int64_t* topk_ids = nullptr;
  // Inputs of experts, [num_tokens, hidden]: of the layer where the pass stops, or with `keeps_inputs` of each layer,
  // one after another. And the weights of the layer where it stops, [num_tokens, top_k]. Null if all layers have all
  // experts, and inputs are not requested.
  float* normed = nullptr;
  float* topk_weights = nullptr;
  bool keeps_inputs = false;
  // Predictions for later layers with routers. Either the choice of the router this many layers ahead (at the first
  // one, of all up to there; 0: none), or nonzero entries of the next layer's row of `predicted`, [layers with routers,
  // num_experts].
  int64_t routers_ahead = 0;
  const uint8_t* predicted = nullptr;
  ExpertFetcher* fetcher = nullptr;  // or null; does not prefetch predicted experts
  // The normalized output of the last layer; null: not needed. Also where no layer is left to be run.
  float* out = nullptr;  // [num_tokens, hidden]
  Norm out_norm{};
  LayerTimes* times = nullptr;  // [num_layers]; or null. They change no result
};
// Returns the layer that the pass stopped at, with `hidden` as it goes into the sum of the chosen experts, the shared
// one included; or num_layers.
int64_t decoder(const Isa& isa, const DecoderCall& call);

// Each token's choice of experts, best first. Logits that are not numbers give NaN weights, and still valid ids.
struct RouteCall {
  Routing routing;
  const float* logits;  // [num_rows, num_experts]
  int64_t num_rows, num_experts;
  int64_t* topk_ids;    // [num_rows, top_k]
  float* topk_weights;  // [num_rows, top_k]
};
void route(const Isa& isa, const RouteCall& call);

// The weights of a pass's choices after drops.
struct LimitCall {
  ExpertCapacity capacity;
  const int64_t* topk_ids;  // [num_tokens, top_k], each below num_experts
  int64_t num_tokens, top_k, num_experts;
  float* topk_weights;  // likewise, changed
};
void limit_choices(const Isa& isa, const LimitCall& call);

// How one token is to be sampled from a row of logits.
struct RowSampling {
  int64_t row;
  float temperature;  // 0: the likeliest token, of equals the first, whatever else is asked
  int64_t top_k;      // 0: all
  double top_p;       // 1: all
  float min_p;        // tokens less likely than this times the likeliest are not sampled
  double number;      // in [0, 1): where in the cumulative distribution the token lies
};

// tokens[i] = the first token whose cumulative weight exceeds `number` times that of all that may be sampled: in the
// order of the vocabulary, or under top_k or top_p likeliest first, of equals the lower number. Tokens less likely
// than 1.3e-38 times the likeliest are never sampled. -1 if the row's maximum is not a finite number, or it has a NaN.
struct SampleCall {
  const float* x;  // [num_rows, size]
  int64_t num_rows, size;
  const RowSampling* samplings;
  int64_t num_samplings;
  int64_t* tokens;  // [num_samplings]
};
void sample(const Isa& isa, const SampleCall& call);

// Pack rows of `cols` values, one behind the other, as the rows numbered `rows` of the matrix at `out`; in the
// calling thread, so that loaders can call it from several. Lanes that no call brings stay as they are: the
// memory begins as zeros. Where the format can keep groups as they lie (formats.h), no value changes; everything else
// goes through float, rounded to the nearest step.
void pack_rows(Format format, SourceType type, const void* source, int64_t cols, const int64_t* rows, int64_t num_rows,
               uint8_t* out);

// Some rows of a packed matrix, as the rows 0, 1, ... of the matrix at `out`; the lanes beyond them stay as they are.
void copy_rows(const Matrix& from, const int64_t* rows, int64_t num_rows, uint8_t* out);

// The exact values of some rows (null: of the first `num_rows`): out[num_rows, cols].
void unpack_rows(const Matrix& matrix, const int64_t* rows, int64_t num_rows, float* out);

}  // namespace moeflow
