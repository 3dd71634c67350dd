// What each instruction set offers, as one table of functions filled in its own translation unit.
//
// Those units are compiled with special flags. So they include only declarations such as these, and headers with
// internal linkage (see isa_unit.h).
#pragma once

#include <cstdint>

#include "ops/kv_cache.h"
#include "formats/matrix.h"
#include "ops/recurrent.h"
#include "ops/routing.h"

namespace moeflow {

// Positions that are attended to in one go. Ranges begin at multiples of this, whatever the pass.
constexpr int kRangePositions = 256;
constexpr int kKeyPositions = 64;  // with keys that are transposed at once, where the cache has rows

// Scores of attention are computed times this: weights are then powers of two, which take fewer operations.
constexpr float kLog2E = 1.44269504f;

// What one head of one token sees: positions [lo, hi), and beyond hi those with a bit in tree_bits.
struct AttentionRow {
  int64_t lo, hi;
  int64_t stop;        // one past the last position seen
  int64_t tree_begin;  // position of bit 0
  uint64_t tree_bits;
  int64_t tree_place;  // the position of the first of these tokens if the row's branch is kept
  // Added to scores by how far a key lies behind the row's position, from -bias_reach to bias_reach; null: nothing.
  const float* bias = nullptr;
  int64_t bias_reach = 0;
  int64_t position = 0;
};

// Some rows of one sequence that share a KV head, against one range of its positions.
struct AttentionRange {
  const KVCache* cache;
  const int32_t* block_table;  // of the sequence
  int64_t head;                // of K and V
  int64_t begin, end;          // begin is a multiple of kRangePositions, end at most kRangePositions further
  int64_t following_end;       // end of the range that will be attended to next: only to have it fetched
  int num_rows;
  const AttentionRow* rows;
  const float* q;  // [num_rows, stride], times the scale of the scores and kLog2E
  int64_t stride;  // head_dim or more
  float* keys;     // [head_dim, kKeyPositions]: for some keys, where the cache has them as rows; else null
  float soft_cap = 0;  // c times kLog2E: scores become c * tanh(score / c); 0: they stay
  float* scores;   // [num_rows, kRangePositions], for the weights on the way
  // Results, not yet divided by the sum: per row the largest score m, sum of 2^(score - m), and that times V.
  float *max, *sum;  // [num_rows]; sum is 0 where a row sees nothing of the range
  float* out;        // [num_rows, stride], value_dim of each
};

// What an expert makes of its hidden units: x * sigmoid(x); x * Phi(x), exactly or by the usual tanh; max(x, 0). The last
// is for gated ones alone: (up + 1) * gate * sigmoid(alpha * gate), with gates of at most `limit` and ups within it.
enum class Nonlinearity : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kClampedSwiglu = 4 };

// From a tile's results to hidden units, 16 a band: function(up); gated, 16 a pair of bands (gate, up, gate, up, ...):
// function(gate) * up.
struct HiddenUnits {
  Nonlinearity function;
  float alpha, limit;  // of kClampedSwiglu
  bool is_gated;
  const float* tile_out;             // [num_rows, kTileStride]
  const float *gate_bias, *up_bias;  // [num_units], or null
  int64_t num_units;                 // from the tile's first on; the last band may be filled up
  int num_rows, num_bands;
  float* h;  // [num_rows, h_stride]
  int64_t h_stride;
};

struct Argmax {
  float value;    // the maximum of a row, NaN if there is one
  int64_t index;  // of the first such value
};

// What a logit of a row weighs: exp((x - max_logit) / temperature), and nothing below `least`.
struct Weighing {
  float max_logit, inverse_temperature, least;
};

// Values [first, first + count) of a row of `cols`: whole groups; the row's last may be padded with zeros.
struct RowPart {
  int64_t first, count, cols;
};

struct Isa {
  const char* name;
  // The form of activations for weights.
  Activation (*activation)(const Matrix& weight);
  // Prepare part of a row in that form, `x` being its first value. `out` is where the row begins.
  void (*prepare_part)(Activation kind, const float* x, const RowPart& part, void* out);
  // Multiply any number of rows up to kMaxTileRows with up to kMaxTileBands bands of a matrix.
  void (*tile)(const Matrix& weight, const Tile& tile);
  void (*activate)(const HiddenUnits& units);
  void (*attend)(const AttentionRange& range);
  // Operations on one row of `size` floats; `out` may be the row itself.
  float (*inverse_rms)(const float* x, int64_t size, float eps);  // 1 / sqrt(mean(x^2) + eps)
  void (*scale_row)(const float* x, float scale, const float* weight, int64_t size, float* out);  // x * scale * weight
  // (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight (+ bias)
  void (*layer_norm_row)(const float* x, float eps, const float* weight, const float* bias, int64_t size, float* out);
  // x, plus a bias and a residual if given.
  void (*add_row)(const float* x, const float* bias, const float* residual, int64_t size, float* out);
  // sum += weight * (x + bias), the product rounded before it is added; `bias` may be null.
  void (*add_weighted_row)(const float* x, const float* bias, float weight, int64_t size, float* sum);
  void (*clip_row)(const float* x, float limit, int64_t size, float* out);
  // out[i] = x[i] * cos[i] + x[(i + size / 2) % size] * sin[i]
  void (*rotate_row)(const float* x, const float* cos, const float* sin, int64_t size, float* out);
  void (*route_row)(const Routing& routing, const float* logits, int64_t num_experts, int64_t* ids, float* weights);
  Argmax (*argmax_row)(const float* x, int64_t size);
  // Steps of sampling a token. The sum is in double. The maxima [kBand] are over every kBand-th value. The ascending
  // places are of values of at least `bound`; their number is returned.
  double (*sum_weights)(const float* x, int64_t count, const Weighing& weighing);
  void (*store_weights)(const float* x, int64_t count, const Weighing& weighing, float* out);
  void (*lane_maxima)(const float* x, int64_t count, float* out);
  int64_t (*places_at_least)(const float* x, int64_t size, float bound, int32_t* places);
  // Up to kBand channels of a convolution, or of the values of a recurrence's head, from the `first` on.
  void (*conv_band)(const ShortConvCall& call, int64_t first);
  void (*recurrence_band)(const RecurrenceCall& call, const RecurrenceGates& gates, int64_t head, int64_t first);
  void (*gate_row)(const float* x, const float* gate, bool is_silu, int64_t size, float* out);
};

#if defined(__aarch64__)
const Isa& neon_isa();
const Isa& neon_dotprod_isa();
const Isa& neon_i8mm_isa();  // and products of bfloat16
#else
const Isa& generic_isa();
#endif
#if defined(__x86_64__)
const Isa& avx2_isa();
const Isa& avx2_vnni_isa();
const Isa& avx512_isa();
const Isa& avx512_vnni_isa();
const Isa& avx512_bf16_isa();
const Isa& amx_isa();
#endif

// Prepares a whole row of activations.
static inline void prepare_row(const Isa& isa, Activation kind, const float* x, int64_t cols, void* out) {
  isa.prepare_part(kind, x, RowPart{0, cols, cols}, out);
}

// What the i-th instruction set of this architecture is called, from the simplest on; null after the last. Each holds
// those before it, but for AVX-VNNI, which not every processor with AVX-512 has.
const char* isa_name(int i);

// The best table that this processor and its operating system support, at most `cap`; empty: no cap. Null if the cap is
// not one of those names.
const Isa* choose_isa(const char* cap);

}  // namespace moeflow
