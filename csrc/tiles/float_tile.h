// Tiles of weights that are floats or bfloat16.
#pragma once

#include <cstdint>

#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// Float weights. A step is one k: a line of each band, and one number of each row, which all lanes are multiplied by.
//
//                       band 0 (16 outputs)          band 1
//   memory, line k      w0[k]  w1[k] .. w15[k]       w16[k] .. w31[k]     64 bytes each
//                         x      x       x             x         x
//   row r: x[r][k]      acc[r][0], a lane an output   acc[r][1]           acc += w * x, k = 0, 1, 2, ..
template <int R, int B>
TILE void tile_f32(const Tile& t) {
  FloatLanes acc[R][B][kParts] = {};
  const Ahead<B> ahead(t, 0, padded_cols(t.cols));
  for (int64_t k = 0; k < t.cols; ++k) {
    ahead.fetch(k);
    FloatLanes w[B][kParts];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) w[b][p] = load_lanes(line_part(t, b, k * 64, p));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const FloatLanes x = splat_lanes(static_cast<const float*>(t.rows[r])[k]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) acc[r][b][p] += w[b][p] * x;
    }
  }
  store_tile<R, B>(t, acc);
}

// bfloat16 weights. A step is a pair of k: a line holds of each output two neighbours, the second in the upper half of
// the lane's 32 bits.
//
//   lane (output)        0                   1                   ..   15
//   memory, line k / 2   w0[k]   w0[k+1]     w1[k]   w1[k+1]     ..   w15[k]  w15[k+1]      64 bytes
//   row r                x[r][k] x[r][k+1]   x[r][k] x[r][k+1]   ..   the same in all lanes
//
// With instructions for bfloat16 rows come rounded to it too, and one of them multiplies and adds both. Else weights
// become floats, which is a shift or a mask, rows stay floats, and acc += w[k] * x[k], then acc += w[k+1] * x[k+1].
template <int R, int B>
TILE void tile_bf16(const Tile& t) {
  FloatLanes acc[R][B][kParts] = {};
  const int64_t pairs = padded_cols(t.cols) / 2;
  const Ahead<B> ahead(t, 0, pairs);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    ahead.fetch(pair);
    BitLanes w[B][kParts];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) w[b][p] = load_bits(line_part(t, b, pair * 64, p));
#if HAS_BF16_DOT
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int32_t x = static_cast<const Int32InMemory*>(t.rows[r])[pair];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) acc[r][b][p] = dot_bf16(acc[r][b][p], w[b][p], x);
    }
#else
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {  // alternately, because registers are few
      FloatLanes floats[B][kParts];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          floats[b][p] = (FloatLanes)(half == 0 ? w[b][p] << 16 : w[b][p] & 0xffff0000u);
        }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const FloatLanes x = splat_lanes(static_cast<const float*>(t.rows[r])[2 * pair + half]);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
          for (int p = 0; p < kParts; ++p) acc[r][b][p] += floats[b][p] * x;
      }
    }
#endif
  }
  store_tile<R, B>(t, acc);
}

// Which tiles fit the registers: up to `rows` beside two bands, or `bands` if these are more; and tall ones, of more rows
// and fewer bands.
struct TileShapes {
  int rows, bands, tall_rows, tall_bands;

  constexpr bool has(int num_rows, int num_bands) const {
    if (num_rows > rows) return num_rows <= tall_rows && num_bands == tall_bands;
    return num_bands == 2 || num_bands == bands;
  }
};

#if MOEFLOW_LANES == 16
constexpr TileShapes kTileShapes = {6, 4, 12, 2};
#elif MOEFLOW_LANES == 8
// 12 sums, so that multiply-adds need not wait for each other.
constexpr TileShapes kTileShapes = {3, 2, 6, 1};
#else
constexpr TileShapes kTileShapes = {2, 2, 0, 0};
#endif

template <int R, int B, TileKind kKind>
void tile_of(const Tile& t) {
  if constexpr (kTileShapes.has(R, B)) (kKind == TileKind::kF32 ? tile_f32<R, B> : tile_bf16<R, B>)(t);
}

// Compute any tile of floats from the sizes that fit this instruction set's registers.
//
//   with AVX-512, 4 bands        with AVX-512, 4 bands          with AVX2, 4 bands
//   and 6 rows: one tile         and 8 rows: two tall tiles     and 8 rows: four tall tiles, and two
//
//           0   1   2   3                0   1   2   3                  0   1   2   3
//   row 0  +---------------+     row 0  +-------+-------+       row 0  +---+---+---+---+
//     ..   |     6 x 4     |       ..   | 8 x 2 | 8 x 2 |         ..   |6x1|6x1|6x1|6x1|
//     5    +---------------+       7    +-------+-------+           6  | 2 x 2 | 2 x 2 |
//                                                                   7  +-------+-------+
//
// More rows than make a tile of usual shape take a tall one: two tiles, of six rows and of one or two, would take
// longer and have memory idle while the second reads the bands from the cache. The last band of an odd number stands
// for two, which costs less than tiles for it would take to compile.
template <TileKind kKind>
void tile_floats(const Tile& whole) {
  for (int row = 0; row < whole.num_rows;) {
    const int rows_left = whole.num_rows - row;
    const bool is_tall = rows_left > kTileShapes.rows && kTileShapes.tall_rows > 0;
    const int most = is_tall ? kTileShapes.tall_rows : kTileShapes.rows, rows = rows_left < most ? rows_left : most;
    for (int band = 0; band < whole.num_bands;) {
      const int left = whole.num_bands - band;
      const int bands = is_tall ? kTileShapes.tall_bands : left >= kTileShapes.bands ? kTileShapes.bands : 2;
      const Tile part = part_of(whole, row, band, bands);
      switch (rows * 8 + bands) {
#define MOEFLOW_TILE(R, B) \
  case R * 8 + B: tile_of<R, B, kKind>(part); break;
        MOEFLOW_TILE(1, 2)
        MOEFLOW_TILE(2, 2)
        MOEFLOW_TILE(3, 2)
        MOEFLOW_TILE(4, 2)
        MOEFLOW_TILE(5, 2)
        MOEFLOW_TILE(6, 2)
        MOEFLOW_TILE(7, 2)
        MOEFLOW_TILE(8, 2)
        MOEFLOW_TILE(9, 2)
        MOEFLOW_TILE(10, 2)
        MOEFLOW_TILE(11, 2)
        MOEFLOW_TILE(12, 2)
        MOEFLOW_TILE(1, 4)
        MOEFLOW_TILE(2, 4)
        MOEFLOW_TILE(3, 4)
        MOEFLOW_TILE(4, 4)
        MOEFLOW_TILE(5, 4)
        MOEFLOW_TILE(6, 4)
        MOEFLOW_TILE(4, 1)
        MOEFLOW_TILE(5, 1)
        MOEFLOW_TILE(6, 1)
#undef MOEFLOW_TILE
      }
      band += bands;
    }
    row += rows;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
