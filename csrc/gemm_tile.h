// Tiles of matrix products: R rows of activations by B bands of weights.
#pragma once

#include <cstdint>
#include <utility>

#include "block_tile.h"
#include "int_dot.h"
#include "isa_unit.h"
#include "matrix.h"
#include "simd.h"
#include "tile_parts.h"

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
#if MOEFLOW_UNIT >= MOEFLOW_AVX512_BF16
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<const Int32InMemory*>(t.rows[r])[pair]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        acc[r][b][0] = (FloatLanes)_mm512_dpbf16_ps((__m512)acc[r][b][0], (__m512bh)w[b][0], x);
      }
    }
#else
    FloatLanes even[B][kParts], odd[B][kParts];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        even[b][p] = (FloatLanes)(w[b][p] << 16);
        odd[b][p] = (FloatLanes)(w[b][p] & 0xffff0000u);
      }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* row = static_cast<const float*>(t.rows[r]) + 2 * pair;
      const FloatLanes x0 = splat_lanes(row[0]), x1 = splat_lanes(row[1]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          acc[r][b][p] += even[b][p] * x0;
          acc[r][b][p] += odd[b][p] * x1;
        }
    }
#endif
  }
  store_tile<R, B>(t, acc);
}

// A line of integer weights as pairs of 16 bits. Rows lie in the same order: x0, x2, x1, x3, x4, x6, x5, x7, ..
template <typename F>
struct WidePairs {
  static constexpr int kCount = F::kGroup / F::kWords / 2;
  typedef int16_t ShortLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
  BitLanes pairs[kCount];

  explicit WidePairs(BitLanes w) : WidePairs(w, std::make_integer_sequence<int, kCount>()) {}

 private:
  template <int... kPart>
  WidePairs(BitLanes w, std::integer_sequence<int, kPart...>) : pairs{F::template pairs<kPart, ShortLanes>(w)...} {}
};

// What is taken off each weight as it is multiplied: the sums of activations put it right.
template <typename F, bool kIsWide>
constexpr int32_t kWeightOffset = F::kIsSigned && !kIsWide ? kInt8Offset : F::kOffset;

// acc += w * x over all neighbours in a word, four at a time as bytes.
template <typename F, int... kPart>
FORCE_INLINE IntLanes dot_word(IntLanes acc, BitLanes w, const int32_t* x, std::integer_sequence<int, kPart...>) {
  const auto dot = [](IntLanes sum, BitLanes bytes, int32_t x4) __attribute__((always_inline)) {
    return F::kIsSigned ? dot_int8(sum, bytes, x4) : dot_unsigned(sum, bytes, x4);
  };
  ((acc = dot(acc, F::template bytes<kPart>(w), x[kPart])), ...);
  return acc;
}

// All integer formats: exact integer sums within a group, then one multiply-add a group in floats (two, where there is
// a minimum).
//
//   a band in memory     scales (and minima) of all groups, 16 x fp16 each | group 0 | group 1 | ..
//   a group              kLines lines of 64 bytes, each with a word a lane
//
//   lane (output)        0                       1                       ..   15
//   int8, line i         w0[4i .. 4i+3]          w1[4i .. 4i+3]          ..   w15[4i .. 4i+3]
//   four bits, line i    w0[8i .. 8i+7]          w1[8i .. 8i+7]          ..   w15[8i .. 8i+7]
//                        byte j: k = 8i + j in the low half, 8i + 4 + j in the high half
//   row r                x[r], four k (of 16 bits: two) at a time, the same in all lanes
//
//   in a group           acc[r][b] = sum over its k of w * x               integers, a lane an output
//   after a group        total[r][b] += acc * (weight's scale * row's scale)           in floats, group after group
//                        total[r][b] += minimum * (row's scale * row's sum)            where there is a minimum
template <int R, int B, typename F, bool kIsWide>
TILE void tile_int(const Tile& t) {
  static_assert(F::kGroup == kGroup, "rows have a scale and a sum for each group of weights");
  const int64_t k = padded_cols(t.cols), groups = k / kGroup;
  const int64_t head = scale_bytes<F>(groups);
  constexpr int kLines = F::kWords;                  // of 64 bytes, in a group
  constexpr int kQuads = F::kGroup / F::kWords / 4;  // of neighbours, in a lane's word
  constexpr int64_t kNumberBytes = F::kNumbers * kBand * 2;
  IntegerRow rows[R];
  for (int r = 0; r < R; ++r) rows[r] = IntegerRow(t.rows[r], k, kIsWide ? 2 : 1);
  FloatLanes total[R][B][kParts] = {};
  const Ahead<B> ahead(t, head, groups * kLines);
  for (int64_t g = 0; g < groups; ++g) {
    if (g % (64 / kNumberBytes) == 0) ahead.fetch_head(g * kNumberBytes);
    IntLanes acc[R][B][kParts];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) acc[r][b][p] = IntLanes{} - kWeightOffset<F, kIsWide> * rows[r].sums[g];
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) {
      const int64_t at = head + (g * kLines + line) * 64;
      ahead.fetch(g * kLines + line);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        BitLanes w[B];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) w[b] = load_bits(line_part(t, b, at, p));
        if constexpr (kIsWide) {
          constexpr int kCount = WidePairs<F>::kCount;
          const int64_t first = (g * kLines + line) * kCount;
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) {
            const WidePairs<F> parts(w[b]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
              for (int i = 0; i < kCount; ++i) {
                acc[r][b][p] = dot_pairs(acc[r][b][p], parts.pairs[i], rows[r].quads[first + i]);
              }
          }
        } else {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            int32_t x[kQuads];
#pragma GCC unroll 4
            for (int i = 0; i < kQuads; ++i) x[i] = rows[r].quads[(g * kLines + line) * kQuads + i];
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b) {
              acc[r][b][p] = dot_word<F>(acc[r][b][p], w[b], x, std::make_integer_sequence<int, kQuads>());
            }
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const uint8_t* const numbers = t.bands + b * t.band_stride + g * kNumberBytes + p * kLanes * 2;
        const FloatLanes scale = load_halves(reinterpret_cast<const uint16_t*>(numbers));
        FloatLanes least = {};
        if constexpr (F::kHasMin) least = load_halves(reinterpret_cast<const uint16_t*>(numbers + kBand * 2));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const FloatLanes sum = __builtin_convertvector(acc[r][b][p], FloatLanes);
          total[r][b][p] += sum * (scale * splat_lanes(rows[r].scales[g]));
          if constexpr (F::kHasMin) {
            total[r][b][p] += least * splat_lanes(rows[r].scales[g] * static_cast<float>(rows[r].sums[g]));
          }
        }
      }
  }
  store_tile<R, B>(t, total);
}

// Tiles of blocks are few and small: taking codes apart is most of the work, and others would take long to compile.
template <int R, int B>
constexpr bool kFitsBlocks = R <= ROW_TILE && (R == 1 || R == 2 || R == 4) && B <= 2;

inline int rows_of_blocks(int rows_left) {
  if (rows_left >= 4 && ROW_TILE >= 4) return 4;
  return rows_left >= 2 && ROW_TILE >= 2 ? 2 : 1;
}

template <int R, int B>
void tile_of(const Matrix& weight, const Tile& t) {
  with_format(weight.format, [&](auto it) {
    using F = decltype(it);
    if constexpr (F::kTile == TileKind::kF32) {
      tile_f32<R, B>(t);
    } else if constexpr (F::kTile == TileKind::kBF16) {
      tile_bf16<R, B>(t);
    } else if constexpr (F::kTile == TileKind::kBlocks) {
      if constexpr (kFitsBlocks<R, B>) tile_blocks<R, B, F>(t);
    } else if constexpr (F::activation(false) == Activation::kInt16) {
      tile_int<R, B, F, true>(t);
    } else if (weight.is_wide) {
      tile_int<R, B, F, true>(t);
    } else {
      tile_int<R, B, F, false>(t);
    }
  });
}

// Compute any tile from the sizes that fit this instruction set's registers.
//
//   with AVX-512, 4 bands        with AVX-512, 4 bands          else, 4 bands
//   and 6 rows: one tile         and 8 rows: two tall tiles     and 3 rows: four tiles
//
//           0   1   2   3                0   1   2   3                  0   1   2   3
//   row 0  +---------------+     row 0  +-------+-------+       row 0  +-------+-------+
//     ..   |     6 x 4     |       ..   | 8 x 2 | 8 x 2 |           1  | 2 x 2 | 2 x 2 |
//     5    +---------------+       7    +-------+-------+           2  | 1 x 2 | 1 x 2 |
//                                                                      +-------+-------+
//
// More rows than make a tile of usual shape take a tall one of two bands: two tiles, of six rows and of one or two,
// would take longer and have memory idle while the second reads the bands from the cache.
void tile(const Matrix& weight, const Tile& whole) {
  const bool has_blocks = with_format(weight.format, [](auto it) { return it.kTile == TileKind::kBlocks; });
  for (int row = 0; row < whole.num_rows;) {
    const int rows_left = whole.num_rows - row;
    const bool is_tall = rows_left > ROW_TILE && ROW_TILE_OF_TWO > ROW_TILE && whole.num_bands % 2 == 0 && !has_blocks;
    const int most = is_tall ? ROW_TILE_OF_TWO : ROW_TILE;
    const int rows = has_blocks ? rows_of_blocks(rows_left) : rows_left < most ? rows_left : most;
    for (int band = 0; band < whole.num_bands;) {
      const int left = whole.num_bands - band;
      const int bands = left >= 4 && BAND_TILE >= 4 && !is_tall && !has_blocks ? 4 : left >= 2 ? 2 : 1;
      Tile part = whole;
      part.bands = whole.bands + band * whole.band_stride;
      part.rows = whole.rows + row;
      part.out = whole.out + row * kTileStride + band * kBand;
      if (row > 0) {
        part.fetch = Fetch::kNothing;
      } else if (whole.fetch == Fetch::kFollowing) {
        if (whole.following != nullptr) part.following = whole.following + band * whole.band_stride;
      } else if (band + bands < whole.num_bands) {
        part.following = part.bands + bands * whole.band_stride;
      }
      switch (rows * 8 + bands) {
#define MOEFLOW_TILE(R, B) \
  case R * 8 + B: tile_of<R, B>(weight, part); break;
#define MOEFLOW_TILES(R) MOEFLOW_TILE(R, 1) MOEFLOW_TILE(R, 2)
        MOEFLOW_TILES(1)
        MOEFLOW_TILES(2)
#if ROW_TILE >= 6
        MOEFLOW_TILES(3)
        MOEFLOW_TILES(4)
        MOEFLOW_TILES(5)
        MOEFLOW_TILES(6)
#endif
#if BAND_TILE >= 4
        MOEFLOW_TILE(1, 4)
        MOEFLOW_TILE(2, 4)
        MOEFLOW_TILE(3, 4)
        MOEFLOW_TILE(4, 4)
        MOEFLOW_TILE(5, 4)
        MOEFLOW_TILE(6, 4)
#endif
#if ROW_TILE_OF_TWO >= 12
        MOEFLOW_TILE(7, 2)
        MOEFLOW_TILE(8, 2)
        MOEFLOW_TILE(9, 2)
        MOEFLOW_TILE(10, 2)
        MOEFLOW_TILE(11, 2)
        MOEFLOW_TILE(12, 2)
#endif
      }
      band += bands;
    }
    row += rows;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
