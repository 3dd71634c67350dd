// What all tiles of weights that are integers with scales are made of, in all formats: exact integer sums of as many
// values as share a scale, then one multiply-add in floats (two, where there is a minimum).
#pragma once

#include <cstdint>
#include <type_traits>

#include "tiles/integer_sums.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/number_lanes.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// What rows bring to a step, whatever the outputs.
struct RowStep {
  const Int32InMemory* x;  // quads of bytes, or pairs of 16 bits
  float scale;
  int32_t from;  // what sums of products begin with, as weights are raised; where outputs differ in that, the row's sum
  float sum;     // of the row's values, times `scale`: what minima are multiplied by
};

// How many quads of a step are code of their own: all, or one where more took long to compile, for hardly anybody.
constexpr int kUnrolledQuads = MOEFLOW_UNIT == MOEFLOW_GENERIC ? 1 : 8;

// Whether outputs differ in what their weights have been raised by.
template <typename F>
constexpr bool has_zero_points() {
  if constexpr (F::kTile == TileKind::kBlocks) {
    return !std::is_same_v<decltype(F::offset(NumbersOfLanes{nullptr}, 0)), int32_t>;
  }
  return false;
}

// A format's table, less by 128.
template <typename F>
constexpr RaisedTable signed_table() {
  RaisedTable table{};
  for (int i = 0; i < 16; ++i) table.values[i] = F::kTable[i] ^ 0x80;
  return table;
}
template <typename F>
constexpr RaisedTable kSignedTable = signed_table<F>();

// Whether there is a table without -128, which has no opposite in a byte.
template <typename F>
constexpr bool lacks_least() {
  if (F::kTable == nullptr) return false;
  for (int i = 0; i < 16; ++i) {
    if (F::kTable[i] == 0) return false;
  }
  return true;
}

// Where a band of a tile begins. The last one stands for one that would follow it, too.
FORCE_INLINE const uint8_t* begin_of(const Tile& tile, int band) {
  const int64_t last = tile.num_bands - 1;
  return tile.bands + (band < last ? band : last) * tile.band_stride;
}

// Where all of them do; made only where that is looked up (`Steps::weights`).
struct BandBegins {
  const uint8_t* at[kMaxTileBands];

  explicit BandBegins(const Tile& tile) {
    for (int band = 0; kParts > 1 && band < kMaxTileBands; ++band) at[band] = begin_of(tile, band);
  }
};

// How a format's weights are multiplied. A step is what shares a scale, `kSub` values: a stretch of 32, or half of one.
//
//   a band in memory     numbers of all groups, 16 x 16 bits each | group 0 | group 1 | ..
//   a group              stretches of 32 k
//   a stretch            kStretchWords lines of 64 bytes, each with a word a lane
//   row r                x[r], four k at a time (of 16 bits: two), the same in all lanes
//
//   in a step            sum = over its k, w * x                                       integers, a lane an output
//   after a step         total[r] += sum * (weight's scale * row's scale)              in floats, step after step
//                        total[r] += minimum * (row's scale * row's sum)               where there is a minimum
template <typename F, bool kIsWide>
struct Steps {
  static constexpr int kSteps = kGroup / F::kSub, kQuads = F::kSub / 4;  // of a stretch, of a step
  static constexpr int kFactors = kIsWide ? 2 : 1;                       // of a quad
  static constexpr int64_t kNumberBytes = F::kNumbers * kBand * 2;       // of a group
  // The offset added to weights in addition to the format's, by the kind of product; and whether all have one offset.
  static constexpr int32_t kRaisedBy = kIsWide ? 0 : offset_of_bytes(F::kMost, 0);
  static constexpr bool kHasOneOffset = !has_zero_points<F>();
  static constexpr int32_t kOffset = F::kOffset;
  static constexpr bool kSumsWrap = false;  // in 16 bits, so that rows bring their initial values in halves
  static constexpr bool kAreSigned = !kIsWide && quads_in_pairs(F::kMost) == 0;  // when they are multiplied
  static_assert(kGroup == 32 && F::kGroup % kGroup == 0, "rows have a scale and sums for each stretch of weights");

  // What adds up products.
  using Sums = std::conditional_t<kIsWide, PairSums, ByteSums<quads_in_pairs(F::kMost), kQuads, lacks_least<F>()>>;

  const Tile& tile;
  const int64_t k = padded_cols(tile.cols), stretches = k / kGroup;
  const int64_t head = scale_bytes<F>(num_groups<F>(tile.cols));
  const BandBegins begins{tile};
  const Ahead<1> ahead{tile, head, num_groups<F>(tile.cols) * F::kStretches * F::kStretchWords, F::kStretchWords};

  RowStep row_step(int r, int64_t s, int step) const {
    const IntegerRow row(tile.rows[r], k, kFactors);
    const int32_t sum = row.sum_of<kSteps>(s, step);
    return {row.quads + (s * kSteps + step) * kQuads * kFactors, row.scales[s], from_sum(sum),
            row.scales[s] * static_cast<float>(sum)};
  }
  // The form of a row's sum in `RowStep::from`; of one row, or of one row per lane.
  template <typename Sum>
  static Sum from_sum(Sum sum) {
    if constexpr (kHasOneOffset) return sum * -(F::kOffset + kRaisedBy);
    return sum;
  }

  // A stretch of one output per lane, from part `part` of a band on.
  template <typename Numbers>
  struct WeightsWith {
    const uint8_t* words;
    Numbers numbers;
    int stretch;

    // The operand of quad `quad` of the stretch: all of its bytes, raised or signed. Wide: 0 the first and the third, 1
    // the second and the fourth.
    FORCE_INLINE_MEMBER BitLanes factor(int quad, [[maybe_unused]] int f) const {
      const auto word = [&](int i) __attribute__((always_inline)) { return load_bits(words + i * 64); };
      BitLanes bytes = F::quad(word, quad);
      if constexpr (F::kTable != nullptr && kAreSigned) return look_up(kSignedTable<F>.values, bytes);
      if constexpr (F::kTable != nullptr) bytes = look_up(F::kTable, bytes);
      if constexpr (kAreSigned) return bytes ^ 0x80808080u;
      if constexpr (kIsWide) return f == 0 ? bytes & 0x00ff00ffu : (BitLanes)((HalfBitLanes)bytes >> 8);
      return bytes;
    }
    // The correction of its products with a row that sums to 1; unused if all outputs have one offset.
    FORCE_INLINE_MEMBER IntLanes offset() const {
      if constexpr (!kHasOneOffset) return F::offset(numbers, stretch) + kRaisedBy;
      return IntLanes{};
    }
    FORCE_INLINE_MEMBER FloatLanes scale(int step) const { return F::scale(numbers, stretch, step); }
    FORCE_INLINE_MEMBER FloatLanes least(int step) const {
      if constexpr (F::kHasMin) return F::least(numbers, stretch, step);
      return FloatLanes{};
    }
  };

  using Weights = WeightsWith<NumbersOfLanes>;

  FORCE_INLINE_MEMBER Weights weights(int64_t s, int band, int part) const {
    // Where several registers make a band, there are none to spare for computing this each time (AVX2, one row: 4 to
    // 7%), nor for each part's distance from the band, which GCC would keep.
    const uint8_t* const from = kParts > 1 ? begins.at[band] : begin_of(tile, band);
    const uint8_t* words = from + head + s * F::kStretchWords * 64;
    if constexpr (kParts > 1) asm("" : "+r"(words));
    return {words + part * kLanes * 4, {from + s / F::kStretches * kNumberBytes + part * kLanes * 2},
            static_cast<int>(s % F::kStretches)};
  }

  // Prefetches lines after this stretch of two bands.
  template <int kTimesAgain = 0>
  FORCE_INLINE_MEMBER void fetch(int64_t s, int band) const {
    ahead.template fetch_of_two<F::kStretchWords, kTimesAgain>(band, s * F::kStretchWords);
    if (s % F::kStretches != 0) return;
    ahead.template fetch_head_of_two<(kTimesAgain > 0)>(band, s / F::kStretches * kNumberBytes, kNumberBytes);
  }

  FORCE_INLINE_MEMBER static IntLanes begin(const RowStep& row, [[maybe_unused]] IntLanes offset) {
    if constexpr (!kHasOneOffset) return IntLanes{} - offset * row.from;
    if constexpr (F::kOffset + kRaisedBy == 0) return IntLanes{};
    return IntLanes{} + row.from;
  }

  // A row's total, and what a step adds to it.
  FORCE_INLINE_MEMBER static FloatLanes with_sum(FloatLanes total, IntLanes sum, FloatLanes scale, FloatLanes least,
                                                 float row_scale, float row_sum) {
    total += __builtin_convertvector(sum, FloatLanes) * (scale * splat_lanes(row_scale));
    if constexpr (F::kHasMin) total += least * splat_lanes(row_sum);
    return total;
  }
  FORCE_INLINE_MEMBER static void add_sum(float* out, IntLanes sum, FloatLanes scale, FloatLanes least,
                                          const RowStep& row) {
    store_lanes(out, with_sum(load_lanes(out), sum, scale, least, row.scale, row.sum));
  }
};

// Weights of all outputs of a tile, with what scales and minima of a group have in common: made once for its stretches.
template <typename F, bool kIsWide>
class WeightsInGroups {
  using S = Steps<F, kIsWide>;
  static constexpr bool kHasCommon = F::kCommon > 0;

 public:
  using Weights =
      std::conditional_t<kHasCommon, typename S::template WeightsWith<NumbersWithCommon>, typename S::Weights>;

  explicit WeightsInGroups(const S& steps) : steps_(steps) {}

  // Before those of stretch `s` are asked for; stretches come in order.
  FORCE_INLINE_MEMBER void reach([[maybe_unused]] int64_t s) {
    if constexpr (kHasCommon) {
      if (s % F::kStretches != 0) return;
      const int vectors = static_cast<int>(round_up(steps_.tile.num_bands, 2)) * kParts;
      for (int v = 0; v < vectors; ++v) {
        const NumbersOfLanes numbers = steps_.weights(s, v / kParts, v % kParts).numbers;
#pragma GCC unroll 2
        for (int i = 0; i < F::kCommon; ++i) factors_[v][i] = F::common_of(numbers, i);
      }
    }
  }

  // As `Steps::weights`.
  FORCE_INLINE_MEMBER Weights weights(int64_t s, int band, int part) const {
    const typename S::Weights weights = steps_.weights(s, band, part);
    if constexpr (kHasCommon) {
      return {weights.words, {weights.numbers, factors_[band * kParts + part]}, weights.stretch};
    } else {
      return weights;
    }
  }

 private:
  const S& steps_;
  FloatLanes factors_[kHasCommon ? kMaxTileBands * kParts : 1][kHasCommon ? F::kCommon : 1];
};

// Outputs of a tile are added up where they go. A band that the last one stands for has its place, too.
FORCE_INLINE void clear_out(const Tile& t, int num_rows) {
  const int width = static_cast<int>(round_up(t.num_bands, 2)) * kBand;
  for (int r = 0; r < num_rows; ++r) {
    for (int i = 0; i < width; i += kLanes) store_lanes(t.out + r * kTileStride + i, FloatLanes{});
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
