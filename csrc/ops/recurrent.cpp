// Layers that keep a state: channels, or heads and their values, are shared among threads; each goes through the tokens
// of a pass in order.
#include "ops/recurrent.h"

#include <algorithm>
#include <cmath>

#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/scratch.h"

namespace moeflow {
namespace {

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

float inverse_length(const float* x, int64_t size, float eps) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  return 1 / std::sqrt(sum + eps);
}

struct Gates {
  float *decays, *step_rates, *query_scales, *key_scales;
};

void set_gates(const RecurrenceCall& call, int64_t row, const Gates& gates) {
  const float* const steps = call.steps + row * call.gate_stride;
  for (int64_t head = 0; head < call.num_heads; ++head) {
    const float step = std::clamp(softplus(steps[head] + call.step_bias[head]), call.least_step, call.most_step);
    const int64_t at = row * call.num_heads + head;
    gates.decays[at] = std::exp(-std::exp(call.log_decay[head]) * step);
    gates.step_rates[at] =
        call.rates == nullptr ? step : 1 / (1 + std::exp(-call.rates[row * call.gate_stride + head]));
  }
  for (int64_t head = 0; head < call.num_key_heads; ++head) {
    const int64_t at = row * call.num_key_heads + head, from = row * call.row_stride + head * call.key_dim;
    const bool is_normed = call.norm_eps >= 0;
    gates.query_scales[at] =
        (is_normed ? inverse_length(call.queries + from, call.key_dim, call.norm_eps) : 1) * call.query_scale;
    gates.key_scales[at] = is_normed ? inverse_length(call.keys + from, call.key_dim, call.norm_eps) : 1;
  }
}

int64_t num_rows(const StateSequences& sequences) {
  int64_t sum = 0;
  for (int64_t i = 0; i < sequences.count; ++i) sum += sequences.counts[i];
  return sum;
}

}  // namespace

void short_conv(const Isa& isa, const ShortConvCall& call) {
  const int64_t floats = num_rows(call.sequences) * (call.num_taps + 2) * kBand;
  for_each_row(num_bands(call.num_channels), floats, [&](int64_t band) { isa.conv_band(call, band * kBand); });
}

void recurrence(const Isa& isa, const RecurrenceCall& call) {
  static thread_local Buffer<float> scratch;
  const int64_t of_heads = call.num_tokens * call.num_heads, of_keys = call.num_tokens * call.num_key_heads;
  float* const room = scratch.at_least(2 * (of_heads + of_keys));
  const Gates gates{room, room + of_heads, room + 2 * of_heads, room + 2 * of_heads + of_keys};
  for_each_row(call.num_tokens, 32 * call.num_heads, [&](int64_t row) { set_gates(call, row, gates); });
  const RecurrenceGates ready{gates.decays, gates.step_rates, gates.query_scales, gates.key_scales};
  const int64_t bands = num_bands(call.value_dim);
  for_each_row(call.num_heads * bands, 2 * call.num_tokens * call.key_dim * kBand, [&](int64_t item) {
    isa.recurrence_band(call, ready, item / bands, item % bands * kBand);
  });
}

void gated_norm(const Isa& isa, const GatedNormCall& call) {
  for_each_row(call.num_rows, 8 * call.size, [&](int64_t row) {
    const float* const gate = call.gate + row / call.rows_per_gate * call.gate_stride + row % call.rows_per_gate * call.size;
    const float* const weight = call.weight + row % call.num_weights * call.size;
    const float* x = call.x + row * call.size;
    float* const out = call.out + row * call.size;
    if (call.is_gated_first) {
      isa.gate_row(x, gate, true, call.size, out);
      x = out;
    }
    isa.scale_row(x, isa.inverse_rms(x, call.size, call.eps), weight, call.size, out);
    if (!call.is_gated_first) isa.gate_row(out, gate, true, call.size, out);
  });
}

void sigmoid_gate(const Isa& isa, const SigmoidGateCall& call) {
  for_each_row(call.num_rows, 8 * call.size, [&](int64_t row) {
    const int64_t at = row * call.size;
    isa.gate_row(call.x + at, call.gate + row * call.gate_stride, false, call.size, call.out + at);
  });
}

namespace {

// The values at a place of each row; null: none.
const float* place(const float* rows, int64_t at) { return at < 0 ? nullptr : rows + at; }

// What heads find in their states, normalised and gated.
void mix_heads(const Isa& isa, const RecurrentMixerCall& call, const float* convolved) {
  const RecurrentMixer& mixer = call.mixer;
  RecurrenceCall heads = mixer.recurrence;
  heads.queries = convolved + mixer.queries_at;
  heads.keys = convolved + mixer.keys_at;
  heads.values = convolved + mixer.values_at;
  heads.row_stride = mixer.conv.num_channels;
  heads.steps = call.projected + mixer.steps_at;
  heads.rates = place(call.projected, mixer.rates_at);
  heads.gate_stride = call.row_floats;
  heads.num_tokens = call.num_tokens;
  heads.states = call.states;
  heads.states.offset += (mixer.conv.num_taps - 1) * mixer.conv.num_channels;
  heads.sequences = call.sequences;
  heads.out = call.out;
  recurrence(isa, heads);
  GatedNormCall norm = mixer.norm;
  norm.x = norm.out = call.out;
  norm.gate = call.projected + mixer.norm_gates_at;
  norm.rows_per_gate = heads.num_heads * heads.value_dim / norm.size;
  norm.gate_stride = call.row_floats;
  norm.num_rows = call.num_tokens * norm.rows_per_gate;
  gated_norm(isa, norm);
}

}  // namespace

void recurrent_mixer(const Isa& isa, const RecurrentMixerCall& call) {
  static thread_local Buffer<float> convolved;
  const RecurrentMixer& mixer = call.mixer;
  const bool has_heads = mixer.recurrence.num_heads > 0;
  ShortConvCall conv = mixer.conv;
  conv.x = call.projected + mixer.conv_at;
  conv.in_gate = place(call.projected, mixer.in_gate_at);
  conv.out_gate = place(call.projected, mixer.out_gate_at);
  conv.x_stride = call.row_floats;
  conv.states = call.states;
  conv.sequences = call.sequences;
  conv.out = has_heads ? convolved.at_least(call.num_tokens * conv.num_channels) : call.out;
  short_conv(isa, conv);
  if (has_heads) mix_heads(isa, call, conv.out);
}

}  // namespace moeflow
