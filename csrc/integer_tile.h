// Tiles of weights that are integers with scales (integer_steps.h): which loop is inside which.
#pragma once

#include <cstdint>

#include "integer_steps.h"
#include "isa_unit.h"
#include "matrix.h"
#include "simd.h"
#include "tile_parts.h"

#if HAS_MATRIX_DOT
#include "pair_tile_neon.h"
#endif

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// R rows: each quad of two bands is taken apart and multiplied with all of them. All bands are read side by side, as
// memory is fastest with several streams.
template <int R, typename F, bool kIsWide>
TILE void tile_few_rows(const Tile& t) {
  using S = Steps<F, kIsWide>;
  constexpr int kVectors = 2 * kParts;
  const S steps{t};
  clear_out(t, R);
  for (int64_t s = 0; s < steps.stretches; ++s) {
    RowStep rows[S::kSteps][R];
#pragma GCC unroll 2
    for (int step = 0; step < S::kSteps; ++step)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) rows[step][r] = steps.row_step(r, s, step);
    for (int band = 0; band < t.num_bands; band += 2) {
      steps.fetch(s, band);
      typename S::Weights weights[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) weights[v] = steps.weights(s, band + v / kParts, v % kParts);
#pragma GCC unroll 2
      for (int step = 0; step < S::kSteps; ++step) {
        IntLanes acc[R][kVectors];
        BitLanes pairs[R][kVectors];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) acc[r][v] = S::begin(rows[step][r], weights[v].offset());
#pragma GCC unroll 8
        for (int i = 0; i < S::kQuads; ++i)
#pragma GCC unroll 2
          for (int f = 0; f < S::kFactors; ++f)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              const BitLanes w = weights[v].factor(step * S::kQuads + i, f);
#pragma GCC unroll 4
              for (int r = 0; r < R; ++r) {
                S::Sums::add(acc[r][v], pairs[r][v], w, rows[step][r].x[i * S::kFactors + f], i);
                pin(acc[r][v]);
              }
            }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const FloatLanes scale = weights[v].scale(step), least = weights[v].least(step);
          float* const out = t.out + band * kBand + v * kLanes;
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            S::add_sum(out + r * kTileStride, acc[r][v], scale, least, rows[step][r]);
          }
        }
      }
    }
  }
}

// Any number of rows: the weights of a step are taken apart once, into registers, and meet one row after another.
template <typename F>
TILE void tile_many_rows(const Tile& t) {
  using S = Steps<F, false>;
  constexpr int kVectors = MOEFLOW_LANES == 16 ? 2 : 1;  // 8 registers each
  const S steps{t};
  RowStep rows[S::kSteps][kMaxTileRows];
  const int num_rows = t.num_rows;
  clear_out(t, num_rows);
  for (int64_t s = 0; s < steps.stretches; ++s) {
    for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 2
      for (int step = 0; step < S::kSteps; ++step) rows[step][r] = steps.row_step(r, s, step);
    for (int band = 0; band < t.num_bands; band += 2) {
      steps.fetch(s, band);
#pragma GCC unroll 1
      for (int first = 0; first < 2 * kParts; first += kVectors) {
#pragma GCC unroll 2
        for (int step = 0; step < S::kSteps; ++step) {
          BitLanes bytes[kVectors][S::kQuads];
          FloatLanes scale[kVectors], least[kVectors];
          IntLanes offset[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            const auto weights = steps.weights(s, band + (first + v) / kParts, (first + v) % kParts);
#pragma GCC unroll 8
            for (int i = 0; i < S::kQuads; ++i) bytes[v][i] = weights.factor(step * S::kQuads + i, 0);
            scale[v] = weights.scale(step);
            least[v] = weights.least(step);
            offset[v] = weights.offset();
          }
          float* out = t.out + band * kBand + first * kLanes;
#pragma GCC unroll 1
          for (int r = 0; r < num_rows; ++r, out += kTileStride) {
            const RowStep& row = rows[step][r];
            IntLanes acc[kVectors];
            BitLanes pairs[kVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) acc[v] = S::begin(row, offset[v]);
#pragma GCC unroll 8
            for (int i = 0; i < S::kQuads; ++i)
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) S::Sums::add(acc[v], pairs[v], bytes[v][i], row.x[i], i);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) S::add_sum(out + v * kLanes, acc[v], scale[v], least[v], row);
          }
        }
      }
    }
  }
}

// From so many rows on it pays to keep weights in registers; the later, the less it takes to take them apart. Not where
// they are pairs of 16 bits: these are too many.
template <typename F>
constexpr int kManyRows = MOEFLOW_LANES == 16                                       ? 6
                          : F::kStretchWords == 8                                   ? kMaxTileRows + 1
                          : F::kStretchWords == 4 && F::kTable == nullptr           ? 12
                                                                                    : 4;

template <typename F, bool kIsWide>
void tile_int(const Tile& whole) {
  int row = 0;
  if constexpr (!kIsWide) {
#if HAS_MATRIX_DOT
    if (whole.num_rows > 1) row = tile_pairs<F>(whole);
#else
    if (whole.num_rows >= kManyRows<F>) return tile_many_rows<F>(whole);
#endif
  }
  while (row < whole.num_rows) {
    Tile part = whole;
    part.rows = whole.rows + row;
    part.out = whole.out + row * kTileStride;
    if (row > 0) part.fetch = Fetch::kNothing;
    [[maybe_unused]] const int left = whole.num_rows - row;
#if MOEFLOW_LANES == 16
    if (left >= 4) {
      tile_few_rows<4, F, kIsWide>(part);
      row += 4;
      continue;
    }
#endif
#if MOEFLOW_UNIT != MOEFLOW_GENERIC  // where these took long to compile, for hardly anybody
    if (left >= 2) {
      tile_few_rows<2, F, kIsWide>(part);
      row += 2;
      continue;
    }
#endif
    tile_few_rows<1, F, kIsWide>(part);
    row += 1;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
