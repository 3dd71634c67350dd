// Layers that keep a state of each sequence, as large whatever its length: what their operations take.
//
// A token's bits depend on its sequence's tokens alone: they are processed one after another, for any split into passes
// and any other requests.
#pragma once

#include <cstdint>

namespace moeflow {

// The sequences of a pass in their order, and where their states are in memory of slots. A state may be read that an
// earlier sequence of the same pass writes.
struct StateSequences {
  int64_t count;
  const int32_t* first_rows;  // [count]: index in the pass of each sequence's first token,
  const int32_t* counts;      // how many tokens of the pass are the sequence's,
  const int32_t* sources;     // the slot of the state before them; negative: that is zero,
  const int32_t* targets;     // the slot of the state after them,
  const int32_t* save_ends;   // and one past its last save; its first one follows those of the sequence before
  const int32_t* save_counts;  // of each save: after how many of the sequence's tokens in the pass,
  const int32_t* save_slots;   // and where the state is kept
};

// Slots of one layer: the part of a state that an operation has begins `offset` floats behind a slot's beginning.
struct StateMemory {
  float* slots;
  int64_t slot_floats, offset;
};

constexpr int64_t kMaxTaps = 16;      // of a short convolution
constexpr int64_t kMaxKeyDim = 256;   // of a linear recurrence

// Each channel's convolution over its last `num_taps` inputs: out = function(bias + sum of weight * input), before and
// behind which it may be gated: multiplied by further inputs. The state is [num_taps - 1, num_channels], oldest first.
struct ShortConvCall {
  const float* x;  // [T, num_channels], rows x_stride floats apart, as the gates' are
  const float *in_gate, *out_gate;  // or null
  int64_t x_stride;
  const float* weight;  // [num_channels, num_taps], that of the newest input last
  const float* bias;    // [num_channels], or null
  int64_t num_channels, num_taps;
  bool has_silu;
  StateMemory states;
  StateSequences sequences;
  float* out;  // [T, num_channels]
};

// Linear attention with decay. Each head has a matrix S [key_dim, value_dim]; for each token
//
//   S = decay * S;   v' = rate * (v - S^T k) with the delta rule, else rate * v;   S += k v'^T;   out = S^T q (+ skip * v)
//
// with step = softplus(steps + step_bias) between the limits and decay = exp(-exp(log_decay) * step). The rate is
// sigmoid(rates), or the step itself where these are null. Heads share keys and queries in groups of neighbours, or by
// turns: then each group has one of the first heads, one of the next ones, and so on.
struct RecurrenceCall {
  const float *queries, *keys, *values;  // [T, key heads, key_dim], the same, [T, heads, value_dim]
  int64_t row_stride;                    // floats from a token's to the next's, of all three
  const float *steps, *rates;            // [T, heads], or null
  int64_t gate_stride;                   // floats from a token's to the next's
  const float *step_bias, *log_decay;    // [heads]
  const float* skip;                     // [heads], or null
  float least_step, most_step;
  int64_t num_heads, num_key_heads, key_dim, value_dim, num_tokens;
  bool is_delta;
  bool takes_turns;  // of key heads: head h has the key of h % num_key_heads, else of h / (num_heads / num_key_heads)
  float norm_eps;     // queries and keys are divided by sqrt(sum of squares + norm_eps); negative: they are not
  float query_scale;  // of queries then
  StateMemory states;
  StateSequences sequences;
  float* out;  // [T, heads, value_dim]
};

// What each token of a recurrence has for a head, computed once.
struct RecurrenceGates {
  const float *decays, *step_rates;          // [T, heads]
  const float *query_scales, *key_scales;  // [T, key heads]
};

// out[r] = norm(x[r]) * weight * silu(gate[r]); or gated first, norm(x[r] * silu(gate[r])) * weight.
struct GatedNormCall {
  const float* x;     // [num_rows, size]
  const float* gate;  // of row r: at r / rows_per_gate * gate_stride + r % rows_per_gate * size
  int64_t rows_per_gate, gate_stride;
  const float* weight;  // of row r: [size] at r % num_weights * size
  int64_t num_weights;
  float eps;
  int64_t num_rows, size;
  bool is_gated_first;
  float* out;  // may be x
};

// out[r] = x[r] * sigmoid(gate[r])
struct SigmoidGateCall {
  const float* x;     // [num_rows, size]
  const float* gate;  // rows gate_stride floats apart
  int64_t gate_stride, num_rows, size;
  float* out;  // may be x
};

// The mixer of a layer with a state: a short convolution of a part of the projection. With heads, a recurrence over its
// results follows, normalized and gated. Places are in a token's
// row; negative: it has none such. Of the calls weights, sizes and functions count; the rest is filled in.
struct RecurrentMixer {
  ShortConvCall conv;  // without channels there is no mixer
  int64_t conv_at, in_gate_at, out_gate_at;  // of the projection
  RecurrenceCall recurrence;
  int64_t queries_at, keys_at, values_at;  // of the convolved part
  int64_t steps_at, rates_at;              // of the projection
  GatedNormCall norm;                      // a row for each group of values
  int64_t norm_gates_at;                   // of the projection
};

// The state of the convolution comes first, then that of the heads.
struct RecurrentMixerCall {
  const RecurrentMixer& mixer;
  const float* projected;  // [num_tokens, row_floats]
  int64_t row_floats, num_tokens;
  StateMemory states;
  StateSequences sequences;
  float* out;  // [num_tokens, channels], or with heads [num_tokens, heads * value_dim]
};

}  // namespace moeflow
