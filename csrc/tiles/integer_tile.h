// Tiles of weights that are integers with scales (integer_steps.h): which loop is inside which.
#pragma once

#include <cstdint>

#include "tiles/integer_steps.h"
#include "simd/isa_unit.h"
#include "tiles/many_rows.h"
#include "formats/matrix.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"

#if HAS_MATRIX_DOT
#include "tiles/pair_tile_neon.h"
#endif

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// Sums that registers hold beside weights and a row.
constexpr int kTileSums = IS_NEON ? 16 : 8;

// What a step of some vectors of outputs adds to R rows, whose results begin at `out`; `rows[r]` is a `RowStep`.
template <typename S, int R, int V, typename Weights, typename Rows>
FORCE_INLINE void add_step(const Weights (&weights)[V], const Rows& rows, int step, float* out) {
  constexpr bool kBeginsLast = S::Sums::kBeginsLast, kSharesX = V > R;
  IntLanes acc[R][V];
  BitLanes pairs[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = kBeginsLast ? IntLanes{} : S::begin(rows[r], weights[v].offset());
#pragma GCC unroll kUnrolledQuads
  for (int i = 0; i < S::kQuads; ++i)
#pragma GCC unroll 2
    for (int f = 0; f < S::kFactors; ++f)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const BitLanes w = weights[v].factor(step * S::kQuads + i, f);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const int at = i * S::kFactors + f;
          S::Sums::template add<kSharesX>(acc[r][v], pairs[r][v], w, rows[r].x[at], at);
        }
      }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const FloatLanes scale = weights[v].scale(step), least = weights[v].least(step);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      IntLanes sum = acc[r][v];
      if constexpr (kBeginsLast) {
        sum = S::Sums::with_begin(sum, pairs[r][v], S::begin(rows[r], weights[v].offset()));
      }
      S::add_sum(out + r * kTileStride + v * kLanes, sum, scale, least, rows[r]);
    }
  }
}

// How often the processor is asked again for a line (`Ahead`): where lines are so little work that its queues fill up.
template <int R, typename F>
constexpr int times_again() {
  constexpr bool kAreBytes = F::kStretchWords >= 8;  // least work a line
  if (kAreBytes) return R == 1 || kLanes > 8 ? 2 : 0;  // with many lanes other rows add little
  if (R > 1) return 0;
  return kLanes > 8 ? 2 : 1;
}

// R rows: each quad of two bands is unpacked and multiplied with all of them; of one band after the other if these were
// too many sums. All bands are read side by side, as memory is fastest with several streams.
template <int R, typename F, bool kIsWide>
TILE void tile_few_rows(const Tile& t) {
  using S = Steps<F, kIsWide>;
  using Weights = typename WeightsInGroups<F, kIsWide>::Weights;
  constexpr int kVectors = R * 2 * kParts <= kTileSums ? 2 * kParts : kParts;
  const S steps{t};
  WeightsInGroups<F, kIsWide> groups(steps);
  clear_out(t, R);
  for (int64_t s = 0; s < steps.stretches; ++s) {
    groups.reach(s);
    RowStep rows[S::kSteps][R];
#pragma GCC unroll 2
    for (int step = 0; step < S::kSteps; ++step)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) rows[step][r] = steps.row_step(r, s, step);
    for (int band = 0; band < t.num_bands; band += 2) {
      steps.template fetch<times_again<R, F>()>(s, band);
#pragma GCC unroll 2
      for (int first = 0; first < 2 * kParts; first += kVectors) {
        Weights weights[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          weights[v] = groups.weights(s, band + (first + v) / kParts, (first + v) % kParts);
        }
#pragma GCC unroll 2
        for (int step = 0; step < S::kSteps; ++step) {
          add_step<S, R>(weights, rows[step], step, t.out + band * kBand + first * kLanes);
        }
      }
    }
  }
}

// Fewer than four rows after the others. Where registers are few, one after another, as more code in the same loops has
// GCC find worse ones for all rows.
template <typename S, int V, typename Weights, typename Rows>
FORCE_INLINE void add_rest(const Weights (&weights)[V], const Rows& rows, int row, int count, int step, float* out) {
  if constexpr (kLanes <= 8) {
#pragma GCC unroll 1
    for (int r = row; r < row + count; ++r) add_step<S, 1>(weights, rows.step(r, step), step, out + r * kTileStride);
  } else {
    out += row * kTileStride;
    if (count == 3) add_step<S, 3>(weights, rows.step(row, step), step, out);
    if (count == 2) add_step<S, 2>(weights, rows.step(row, step), step, out);
    if (count == 1) add_step<S, 1>(weights, rows.step(row, step), step, out);
  }
}

// Any number of rows: the weights of a stretch are unpacked once into the first cache, and multiplied with kRows rows
// after another.
template <typename F>
TILE void tile_many_rows(const Tile& t) {
  using S = ManyRowSteps<F>;
  constexpr int kVectors = 2, kRows = 4;
  const Steps<F, false> steps{t};
  WeightsInGroups<F, false> groups(steps);
  ManyRows<S> rows(t, steps.k);
  Stretch<S, kVectors> stretch;
  typename Stretch<S, kVectors>::Part parts[kVectors];
  for (int v = 0; v < kVectors; ++v) parts[v] = {&stretch, v};
  const int num_rows = t.num_rows;
  clear_out(t, num_rows);
  for (int64_t s = 0; s < steps.stretches; ++s) {
    groups.reach(s);
    rows.reach(s);
    for (int band = 0; band < t.num_bands; band += 2) {
      steps.fetch(s, band);
#pragma GCC unroll 1
      for (int first = 0; first < 2 * kParts; first += kVectors) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          stretch.take_apart(groups.weights(s, band + (first + v) / kParts, (first + v) % kParts), v);
        }
        stretch.settle();
        float* const out = t.out + band * kBand + first * kLanes;
#pragma GCC unroll 2
        for (int step = 0; step < S::kSteps; ++step) {
          int r = 0;
#pragma GCC unroll 1
          for (; r + kRows <= num_rows; r += kRows) {
            add_step<S, kRows>(parts, rows.step(r, step), step, out + r * kTileStride);
          }
          add_rest<S>(parts, rows, r, num_rows - r, step, out);
        }
      }
    }
  }
}

// From so many rows on it pays to keep unpacked weights: later with few registers, except for codes with bits in two
// words. Rows of 16 bits are taken few at a time, however many.
template <typename F>
constexpr int min_many_rows() {
  constexpr bool kIsSplit = (F::kStretchWords & (F::kStretchWords - 1)) != 0;
  return kLanes > 8 || kIsSplit ? 5 : 8;
}

// How many rows `tile_few_rows` takes at most; one where more took long to compile, for hardly anybody.
constexpr int kMostFewRows = kLanes >= 8 ? 4 : MOEFLOW_UNIT == MOEFLOW_GENERIC ? 1 : 2;

template <typename F, bool kIsWide>
void tile_int(const Tile& whole) {
  int row = 0;
  if constexpr (!kIsWide) {
#if HAS_MATRIX_DOT
    if (whole.num_rows > 1) row = tile_pairs<F>(whole);
#else
    if (whole.num_rows >= min_many_rows<F>()) return tile_many_rows<F>(whole);
#endif
  }
  while (row < whole.num_rows) {
    Tile part = whole;
    part.rows = whole.rows + row;
    part.out = whole.out + row * kTileStride;
    if (row > 0) part.fetch = Fetch::kNothing;
    const int left = whole.num_rows - row, wanted = left < 4 ? left : 4;
    const int few = wanted < kMostFewRows ? wanted : kMostFewRows;
    if constexpr (kMostFewRows >= 4) {
      if (few == 4) tile_few_rows<4, F, kIsWide>(part);
      if (few == 3) tile_few_rows<3, F, kIsWide>(part);
    }
    if constexpr (kMostFewRows >= 2) {
      if (few == 2) tile_few_rows<2, F, kIsWide>(part);
    }
    if (few == 1) tile_few_rows<1, F, kIsWide>(part);
    row += few;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
