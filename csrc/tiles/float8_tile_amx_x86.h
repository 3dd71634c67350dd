// Tiles of float8 weights (float8_tile.h) where an instruction multiplies matrices of bfloat16 (AMX): for each group, a
// band's weights are widened to bfloat16, and the group's sums are scaled before they are added.
//
// As with bfloat16 weights, one or two rows are multiplied in floats, in the same order (bf16_rows_amx_x86.h).
#pragma once

#include <cstdint>

#include "tiles/bf16_rows_amx_x86.h"
#include "tiles/bf16_tile_amx_x86.h"
#include "tiles/float8_tile.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/number_lanes.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"
#include "tiles/tile_registers_x86.h"

#if HAS_AMX

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// The steps of a group, as lines of pairs of bfloat16.
template <typename F>
struct WidenedGroup {
  static constexpr int kSteps = F::kGroup / kGroup;
  alignas(64) uint8_t lines[kSteps * kStepLines][64];

  FORCE_INLINE_MEMBER void widen(const uint8_t* from) {
    for (int i = 0; i < F::kWords; ++i) {
      const BitLanes w = load_bits(from + i * 64);
      *reinterpret_cast<BitLanesInMemory*>(lines[2 * i]) = e4m3_to_bf16(w);
      *reinterpret_cast<BitLanesInMemory*>(lines[2 * i + 1]) = e4m3_to_bf16(w << 8);
    }
  }
};

// Sums of a group: of interleaved rows, by the widened weights.
template <int kSums, int kX, typename F>
FORCE_INLINE void sum_group(const uint8_t* x, int64_t x_step, const WidenedGroup<F>& w, float* sums) {
  zero_tile<kSums>();
#pragma GCC unroll 4
  for (int s = 0; s < w.kSteps; ++s) {
    load_tile<kX>(x + s * x_step, kTileRowBytes);
    load_tile<6>(w.lines[s * kStepLines], 64);
    multiply_bf16_tiles<kSums, kX, 6>();
  }
  store_tile_register<kSums>(sums, kBand * sizeof(float));
}

template <int R, int B, typename F>
TILE void tile_float8_rows(const Tile& t) {
  constexpr int64_t kNumberBytes = F::kNumbers * kBand * 2;
  constexpr int kSteps = F::kGroup / kGroup, kLinesAStep = F::kWords / kSteps;
  const int64_t groups = num_groups<F>(t.cols), head = scale_bytes<F>(groups);
  const Ahead<B> ahead(t, head, groups * F::kWords);
  FloatLanes total[R][B][kParts] = {};
  for (int64_t g = 0; g < groups; ++g) {
    ahead.fetch_head(g * kNumberBytes);
    FloatLanes sum[B][R] = {};
    for (int s = 0; s < kSteps; ++s) {
      const StepFloats<R> x(t, g * kSteps + s);
      FloatLanes even[B][R] = {}, odd[B][R] = {};
#pragma GCC unroll 2
      for (int i = 0; i < kLinesAStep; ++i) {
        const int64_t line = g * F::kWords + s * kLinesAStep + i;
        ahead.fetch(line);
#pragma GCC unroll 2
        for (int b = 0; b < B; ++b) {
          const BitLanes w = load_bits(line_part(t, b, head + line * 64, 0));
          add_pair(even[b], odd[b], e4m3_to_bf16(w), x, 2 * i);
          add_pair(even[b], odd[b], e4m3_to_bf16(w << 8), x, 2 * i + 1);
        }
      }
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) sum[b][r] += even[b][r] + odd[b][r];
    }
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) {
      const FloatLanes scale = F::scale(NumbersOfLanes{t.bands + b * t.band_stride + g * kNumberBytes});
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) total[r][b][0] += sum[b][r] * scale;
    }
  }
  store_tile<R, B>(t, total);
}

template <typename F>
void tile_float8_few(const Tile& whole) {
  for (int band = 0; band < whole.num_bands; band += 2) {
    (whole.num_rows == 1 ? tile_float8_rows<1, 2, F> : tile_float8_rows<2, 2, F>)(part_of(whole, 0, band, 2));
  }
}

template <typename F>
TILE void tile_float8_amx(const Tile& t) {
  const WithoutSubnormals mode;  // where sums are scaled: the same for all numbers of rows
  if (t.num_rows <= 2) return tile_float8_few<F>(t);
  static_assert(WidenedGroup<F>::kSteps == kStepsACopy && kMaxTileRows <= 2 * kTileRows);
  constexpr int64_t kNumberBytes = F::kNumbers * kBand * 2;
  const int rest = t.num_rows > kTileRows ? t.num_rows - kTileRows : 0;
  const TileRegisterShape first{t.num_rows - rest, kTileRowBytes}, second{rest > 0 ? rest : 1, kTileRowBytes};
  const TileRegisters registers({first, second, {}, {}, first, second, {kStepLines, 64}, {}});
  const int64_t groups = num_groups<F>(t.cols), head = scale_bytes<F>(groups);
  const Ahead<1> ahead(t, head, groups * F::kWords);
  CopiedSteps<2 * kTileRows> x;
  WidenedGroup<F> w;
  alignas(64) float sums[2 * kTileRows][kBand];
  for (int64_t g = 0; g < groups; ++g) {
    x.copy(t, g * kStepsACopy, kStepsACopy);
    for (int band = 0; band < t.num_bands; ++band) {
      if (band % 2 == 0) {
        ahead.template fetch_of_two<F::kWords>(band, g * F::kWords);
        ahead.fetch_head_of_two(band, g * kNumberBytes, kNumberBytes);
      }
      const uint8_t* const weights = t.bands + band * t.band_stride;
      w.widen(weights + head + g * F::kWords * 64);
      sum_group<0, 4>(x.rows[0][0], sizeof(x.rows[0]), w, sums[0]);
      if (rest > 0) sum_group<1, 5>(x.rows[0][kTileRows], sizeof(x.rows[0]), w, sums[kTileRows]);
      const FloatLanes scale = F::scale(NumbersOfLanes{weights + g * kNumberBytes});
      float* out = t.out + band * kBand;
      for (int r = 0; r < t.num_rows; ++r, out += kTileStride) {
        const FloatLanes total = g == 0 ? FloatLanes{} : load_lanes(out);
        store_lanes(out, total + load_lanes(sums[r]) * scale);
      }
    }
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

#endif
