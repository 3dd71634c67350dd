// Tiles of float8 weights: these become bfloat16, which holds each of their values, and meet activations as that does.
#pragma once

#include <cstdint>

#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/number_lanes.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

typedef int16_t ShortLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));

// What 0 to 7 times 2^-9 are as bfloat16.
constexpr EightHalves kSmall = {{0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60},
                                {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60,  //
                                 0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c}};

// The e4m3 numbers in the upper bytes of halves, as bfloat16. Not for NaN, which readers refuse.
//
//   e4m3       s eeee mmm                    a number is 2^(e - 7) * 1.m, and where e is 0, m * 2^-9
//   bfloat16   s 0000eeee mmm0000            its exponent counts from 2^-127: 120 more
FORCE_INLINE BitLanes e4m3_to_bf16(BitLanes upper_bytes) {
  const BitLanes aligned = (BitLanes)((ShortLanes)upper_bytes >> 4);
  const BitLanes magnitude = aligned & 0x07f007f0u;
  const BitLanes normal = magnitude + 0x3c003c00u, small = look_up_halves(kSmall, magnitude >> 4);
  const ShortLanes is_small = (ShortLanes)magnitude < static_cast<int16_t>(0x0080);
  return (aligned & 0x80008000u) | (BitLanes)(is_small ? (ShortLanes)small : (ShortLanes)normal);
}

// acc[r] += the products of two neighbouring k; see `tile_bf16`.
template <int R>
FORCE_INLINE void add_pair(FloatLanes (&acc)[R], BitLanes w, const Tile& t, int64_t pair) {
#if HAS_BF16_DOT
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r] = dot_bf16(acc[r], w, static_cast<const Int32InMemory*>(t.rows[r])[pair]);
#else
  const FloatLanes even = (FloatLanes)(w << 16), odd = (FloatLanes)(w & 0xffff0000u);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const float* const row = static_cast<const float*>(t.rows[r]) + 2 * pair;
    acc[r] += even * splat_lanes(row[0]);
    acc[r] += odd * splat_lanes(row[1]);
  }
#endif
}

//   a band in memory     numbers of all groups, 16 x 16 bits each | group 0 | group 1 | ..
//   a group              128 k that share a scale: 32 lines of 64 bytes, with four k a lane
//
//   in a group           acc[b][r] = sum over its k of w * x                  in floats, pair after pair
//   after a group        total[r][b] += acc * scale
template <int R, int B, typename F>
TILE void tile_float8(const Tile& t) {
  const int64_t groups = num_groups<F>(t.cols), head = scale_bytes<F>(groups);
  constexpr int64_t kNumberBytes = F::kNumbers * kBand * 2;
  FloatLanes total[R][B][kParts] = {};
  const Ahead<B> ahead(t, head, groups * F::kWords);
  for (int64_t g = 0; g < groups; ++g) {
    ahead.fetch_head(g * kNumberBytes);
    for (int p = 0; p < kParts; ++p) {
      FloatLanes acc[B][R] = {};
      for (int64_t line = g * F::kWords; line < (g + 1) * F::kWords; ++line) {
        if (p == 0) ahead.fetch(line);
#pragma GCC unroll 2
        for (int b = 0; b < B; ++b) {
          const BitLanes w = load_bits(line_part(t, b, head + line * 64, p));
          add_pair(acc[b], e4m3_to_bf16(w), t, line * 2);
          add_pair(acc[b], e4m3_to_bf16(w << 8), t, line * 2 + 1);
        }
      }
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const NumbersOfLanes numbers{t.bands + b * t.band_stride + g * kNumberBytes + p * kLanes * 2};
        const FloatLanes scale = F::scale(numbers);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) total[r][b][p] += acc[b][r] * scale;
      }
    }
  }
  store_tile<R, B>(t, total);
}

// Taking bytes apart is most of the work: few rows beside two bands.
template <typename F>
void tile_float8s(const Tile& whole) {
  for (int row = 0; row < whole.num_rows;) {
    const int left = whole.num_rows - row, rows = left >= 4 && kLanes == 16 ? 4 : left >= 2 ? 2 : 1;
    for (int band = 0; band < whole.num_bands; band += 2) {
      const Tile part = part_of(whole, row, band, 2);
      if constexpr (kLanes == 16) {
        if (rows == 4) tile_float8<4, 2, F>(part);
      }
      if (rows == 2) tile_float8<2, 2, F>(part);
      if (rows == 1) tile_float8<1, 2, F>(part);
    }
    row += rows;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
