// Tiles of bfloat16 weights where an instruction multiplies matrices of them (AMX): a band's lines are the second matrix
// as they are. A step is 32 k, one instruction for 16 rows by a band.
//
//                      band 0              band 1               rows are copied side by side first, kStepsACopy steps
//   step, 16 lines     w[k], w[k+1] ..     ..                   at a time: they lie anywhere, often a power of two
//   rows 0 to 15       C0 += x * w         C1 += x * w          apart, where the cache has no room for many
//   rows 16 to 31      C2 += x * w         C3 += x * w
//
// This instruction adds up in an order of its own, in which bf16_rows_amx_x86.h multiplies a few rows.
#pragma once

#include <cstdint>

#include "tiles/bf16_rows_amx_x86.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"
#include "tiles/tile_registers_x86.h"

#if HAS_AMX

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

constexpr int kStepBytes = kStepLines * 64;  // of a band
constexpr int kStepsACopy = 4;

// Some steps of rows side by side, as registers take them.
template <int kRows>
struct CopiedSteps {
  alignas(64) uint8_t rows[kStepsACopy][kRows][kTileRowBytes];

  FORCE_INLINE_MEMBER void copy(const Tile& t, int64_t first_step, int num_steps) {
    for (int r = 0; r < t.num_rows; ++r) {
      const uint8_t* const from = static_cast<const uint8_t*>(t.rows[r]) + first_step * kTileRowBytes;
      for (int s = 0; s < num_steps; ++s) {
        *reinterpret_cast<BitLanesInMemory*>(rows[s][r]) = load_bits(from + s * kTileRowBytes);
      }
    }
  }
};

FORCE_INLINE const uint8_t* band_or_last(const Tile& t, int band) {
  return t.bands + (band < t.num_bands ? band : t.num_bands - 1) * t.band_stride;
}

// Up to 16 rows by up to kBands bands; the last one stands for missing ones.
template <int kBands>
TILE void tile_bf16_short(const Tile& t) {
  static_assert(kBands == 2 || kBands == 4);
  const TileRegisterShape few{t.num_rows, kTileRowBytes}, all{kTileRows, kTileRowBytes};
  const TileRegisters registers({few, few, few, few, few, all, all, all});
  const uint8_t* bands[kBands];
  for (int b = 0; b < kBands; ++b) bands[b] = band_or_last(t, b);
  const int64_t steps = padded_cols(t.cols) / kGroup;
  const Ahead<1> ahead(t, 0, steps * kStepLines);
  CopiedSteps<kTileRows> x;
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int64_t first = 0; first < steps; first += kStepsACopy) {
    const int count = static_cast<int>(steps - first < kStepsACopy ? steps - first : kStepsACopy);
    x.copy(t, first, count);
    for (int s = 0; s < count; ++s) {
      const int64_t line = (first + s) * kStepLines, at = (first + s) * kStepBytes;
      load_tile<4>(x.rows[s], kTileRowBytes);
      load_tile<5>(bands[0] + at, 64);
      multiply_bf16_tiles<0, 4, 5>();
      ahead.fetch_of_two<kStepLines>(0, line);
      load_tile<6>(bands[1] + at, 64);
      multiply_bf16_tiles<1, 4, 6>();
      if constexpr (kBands == 4) {
        load_tile<7>(bands[2] + at, 64);
        multiply_bf16_tiles<2, 4, 7>();
        ahead.fetch_of_two<kStepLines>(2, line);
        load_tile<5>(bands[3] + at, 64);
        multiply_bf16_tiles<3, 4, 5>();
      }
    }
  }
  store_tile_register<0>(t.out, kTileStride * 4);
  store_tile_register<1>(t.out + kBand, kTileStride * 4);
  if constexpr (kBands == 4) {
    store_tile_register<2>(t.out + 2 * kBand, kTileStride * 4);
    store_tile_register<3>(t.out + 3 * kBand, kTileStride * 4);
  }
}

// 17 to 32 rows, by two bands at a time, whose sums wait in the results while the others are multiplied.
TILE void tile_bf16_tall(const Tile& t) {
  constexpr int64_t kStride = kTileStride * 4;
  const TileRegisterShape all{kTileRows, kTileRowBytes}, rest{t.num_rows - kTileRows, kTileRowBytes};
  const TileRegisters registers({all, all, rest, rest, all, rest, all, all});
  const int64_t steps = padded_cols(t.cols) / kGroup;
  const Ahead<1> ahead(t, 0, steps * kStepLines);
  CopiedSteps<2 * kTileRows> x;
  for (int64_t first = 0; first < steps; first += kStepsACopy) {
    const int count = static_cast<int>(steps - first < kStepsACopy ? steps - first : kStepsACopy);
    x.copy(t, first, count);
    for (int band = 0; band < t.num_bands; band += 2) {
      const uint8_t *left = band_or_last(t, band), *right = band_or_last(t, band + 1);
      float *const out = t.out + band * kBand, *const out_of_rest = out + kTileRows * kTileStride;
      if (first == 0) {
        zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
      } else {
        load_tile<0>(out, kStride), load_tile<1>(out + kBand, kStride);
        load_tile<2>(out_of_rest, kStride), load_tile<3>(out_of_rest + kBand, kStride);
      }
      for (int s = 0; s < count; ++s) {
        const int64_t at = (first + s) * kStepBytes;
        load_tile<4>(x.rows[s], kTileRowBytes);
        load_tile<6>(left + at, 64);
        multiply_bf16_tiles<0, 4, 6>();
        load_tile<7>(right + at, 64);
        multiply_bf16_tiles<1, 4, 7>();
        load_tile<5>(x.rows[s][kTileRows], kTileRowBytes);
        multiply_bf16_tiles<2, 5, 6>();
        ahead.fetch_of_two<kStepLines>(band, (first + s) * kStepLines);
        multiply_bf16_tiles<3, 5, 7>();
      }
      store_tile_register<0>(out, kStride), store_tile_register<1>(out + kBand, kStride);
      store_tile_register<2>(out_of_rest, kStride), store_tile_register<3>(out_of_rest + kBand, kStride);
    }
  }
}

void tile_bf16_amx(const Tile& t) {
  static_assert(kMaxTileRows <= 2 * kTileRows);
  if (t.num_rows <= kFewRows) return tile_bf16_few(t);
  if (t.num_rows > kTileRows) return tile_bf16_tall(t);
  (t.num_bands > 2 ? tile_bf16_short<4> : tile_bf16_short<2>)(t);
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

#endif
