// What a layer makes of an input of its own for each token, behind its network (Gemma 4).
#include <algorithm>

#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/scratch.h"

namespace moeflow {
namespace {

// out = function(gates) * input of one token, a band of units at a time.
void gate_row(const Isa& isa, Nonlinearity function, const float* gates, const float* input, int64_t size, float* out) {
  alignas(64) float pair[kTileStride] = {};  // a band of gates, and one of gated inputs
  for (int64_t unit = 0; unit < size; unit += kBand) {
    const int64_t count = std::min<int64_t>(kBand, size - unit);
    std::copy_n(gates + unit, count, pair);
    std::copy_n(input + unit, count, pair + kBand);
    alignas(64) float units[kBand];
    isa.activate({function, 0, 0, true, pair, nullptr, nullptr, kBand, 1, 2, units, kBand});
    std::copy_n(units, count, out + unit);
  }
}

}  // namespace

void layer_input(const Isa& isa, const LayerInputCall& call) {
  static thread_local Buffer<float> gated, projected;
  const LayerInput& layer = call.layer;
  const int64_t tokens = call.num_tokens, size = layer.size(), hidden = layer.gate.cols;
  float* const gates = gated.at_least(tokens * size);
  float* const added = projected.at_least(tokens * hidden);
  linear(isa, LinearCall{layer.gate, call.hidden, tokens, hidden, nullptr, nullptr, gates});
  for_each_row(tokens, 4 * size, [&](int64_t row) {
    float* const at = gates + row * size;
    gate_row(isa, layer.function, at, call.inputs + row * call.inputs_stride, size, at);
  });
  linear(isa, LinearCall{layer.projection, gates, tokens, size, nullptr, nullptr, added});
  for_each_row(tokens, 3 * hidden, [&](int64_t row) {
    float* const from = added + row * hidden;
    float* const to = call.hidden + row * hidden;
    normalise_row(isa, layer.norm, from, hidden, from);
    isa.add_row(from, nullptr, to, hidden, to);
    if (layer.scale == nullptr) return;
    for (int64_t i = 0; i < hidden; ++i) to[i] *= *layer.scale;
  });
}

}  // namespace moeflow
