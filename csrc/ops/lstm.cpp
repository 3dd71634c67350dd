// One layer of an LSTM over steps of some texts, in the calling thread: each step needs the previous one, and is too
// small to share. The state's weights are in a packed format, so that bfloat16 ones stay in the second cache between
// steps. The products of inputs were computed before, all steps at once.
#include <algorithm>

#include "ops/ops.h"
#include "ops/scratch.h"

namespace moeflow {
namespace {

struct Scratch {
  Buffer<uint8_t> prepared;  // the states of some texts
  Buffer<float> gates;       // of these
};

// gates[text] = inputs[text] + the weights times state[text]
void add_state(const Isa& isa, const Matrix& weights, const float* inputs, const void* const* rows, int num_texts,
               float* gates) {
  alignas(64) float tile_out[kMaxTileRows * kTileStride];
  const int64_t size = weights.rows;
  for (int64_t band = 0; band < num_bands(size); band += kMaxTileBands) {
    Tile tile{};
    tile.bands = weights.band(band);
    tile.band_stride = band_bytes(weights.format, weights.cols);
    tile.num_bands = static_cast<int>(std::min<int64_t>(num_bands(size) - band, kMaxTileBands));
    tile.rows = rows;
    tile.num_rows = num_texts;
    tile.cols = weights.cols;
    tile.out = tile_out;
    tile.fetch = Fetch::kNothing;  // they are in a cache
    isa.tile(weights, tile);
    const int64_t first = band * kBand, count = std::min<int64_t>(size - first, tile.num_bands * kBand);
    for (int text = 0; text < num_texts; ++text) {
      isa.add_row(tile_out + text * kTileStride, nullptr, inputs + text * size + first, count,
                  gates + text * size + first);
    }
  }
}

// Gates lie one behind the other, each of all units: input, forget, cell, output; they are overwritten. The logistic
// function is 1 / (1 + e) of e = exp(-x), the hyperbolic tangent (1 - e) / (1 + e) of e = exp(-2 x); exponentials are
// what logits weigh, which every instruction set computes many at once.
void step_row(const Isa& isa, float* gates, int64_t hidden, float* state, float* cell) {
  const Weighing once{0, -1, 0}, twice{0, -2, 0};
  float *const in = gates, *const forget = in + hidden, *const fresh = forget + hidden, *const out = fresh + hidden;
  isa.store_weights(in, 2 * hidden, once, in);
  isa.store_weights(fresh, hidden, twice, fresh);
  isa.store_weights(out, hidden, once, out);
  for (int64_t i = 0; i < hidden; ++i) {
    cell[i] = cell[i] / (1 + forget[i]) + (1 - fresh[i]) / (1 + fresh[i]) / (1 + in[i]);
  }
  isa.store_weights(cell, hidden, twice, state);
  for (int64_t i = 0; i < hidden; ++i) state[i] = (1 - state[i]) / (1 + state[i]) / (1 + out[i]);
}

}  // namespace

void lstm(const Isa& isa, const LstmCall& call) {
  static thread_local Scratch scratch;
  const int64_t hidden = call.weights.cols, size = call.weights.rows;
  const Activation kind = isa.activation(call.weights);
  const int64_t row_bytes = activation_bytes(kind, hidden);
  // The memory of a vector begins at 16 bytes, and prepared rows at 64.
  uint8_t* const room = scratch.prepared.at_least(kMaxTileRows * row_bytes + 64);
  uint8_t* const prepared = room + (64 - reinterpret_cast<uintptr_t>(room) % 64) % 64;
  float* const gates = scratch.gates.at_least(kMaxTileRows * size);
  for (int64_t first = 0; first < call.num_texts; first += kMaxTileRows) {
    const int count = static_cast<int>(std::min<int64_t>(call.num_texts - first, kMaxTileRows));
    for (int64_t step = 0; step < call.num_steps; ++step) {
      const void* rows[kMaxTileRows];
      for (int text = 0; text < count; ++text) {
        rows[text] = prepared + text * row_bytes;
        prepare_row(isa, kind, call.state + (first + text) * hidden, hidden, prepared + text * row_bytes);
      }
      const int64_t at = step * call.num_texts + first;
      add_state(isa, call.weights, call.inputs + at * size, rows, count, gates);
      for (int text = 0; text < count; ++text) {
        float* const state = call.state + (first + text) * hidden;
        step_row(isa, gates + text * size, hidden, state, call.cell + (first + text) * hidden);
        std::copy_n(state, hidden, call.out + (at + text) * hidden);
      }
    }
  }
}

}  // namespace moeflow
