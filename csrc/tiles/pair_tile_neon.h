// Tiles of integer weights where an instruction multiplies matrices of bytes (I8MM): two rows by two outputs, eight k.
//
//   two quads of a band's part, each a word a lane    | a0-3 | b0-3 | c0-3 | d0-3 |   | a4-7 | b4-7 | c4-7 | d4-7 |
//   side by side: all eight k of two outputs          | a0-7        | b0-7        |   | c0-7        | d0-7        |
//   rows r and s                                      | r0-7        | s0-7        |
//   products, added up                                | ra | rb | sa | sb |           | rc | rd | sc | sd |
//   after a step                                      | ra | rb | rc | rd |           | sa | sb | sc | sd |
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "tiles/integer_steps.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"

#if HAS_MATRIX_DOT

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// All rows but the last of an odd number; returns how many. The weights of a step are unpacked once into registers, and
// multiplied with one pair of rows after another. Integers are exact, so that rows get the bits that they get alone.
template <typename F>
TILE int tile_pairs(const Tile& t) {
  using S = Steps<F, false>;
  constexpr int kOctets = S::kQuads / 2;
  const S steps{t};
  RowStep rows[S::kSteps][kMaxTileRows];
  const int num_rows = t.num_rows & ~1;
  clear_out(t, num_rows);
  for (int64_t s = 0; s < steps.stretches; ++s) {
    for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 2
      for (int step = 0; step < S::kSteps; ++step) rows[step][r] = steps.row_step(r, s, step);
    for (int band = 0; band < t.num_bands; band += 2) {
      steps.fetch(s, band);
#pragma GCC unroll 1
      for (int part = 0; part < 2 * kParts; ++part) {
        const auto weights = steps.weights(s, band + part / kParts, part % kParts);
#pragma GCC unroll 2
        for (int step = 0; step < S::kSteps; ++step) {
          int8x16_t octets[kOctets][2];  // of the first two outputs, of the others
#pragma GCC unroll 4
          for (int i = 0; i < kOctets; ++i) {
            const int quad = step * S::kQuads + 2 * i;
            const int32x4_t first = (int32x4_t)weights.factor(quad, 0);
            const int32x4_t second = (int32x4_t)weights.factor(quad + 1, 0);
            octets[i][0] = (int8x16_t)vzip1q_s32(first, second);
            octets[i][1] = (int8x16_t)vzip2q_s32(first, second);
          }
          const FloatLanes scale = weights.scale(step), least = weights.least(step);
          const IntLanes offset = weights.offset();
          float* out = t.out + band * kBand + part * kLanes;
#pragma GCC unroll 1
          for (int r = 0; r < num_rows; r += 2, out += 2 * kTileStride) {
            const RowStep &row = rows[step][r], &next = rows[step][r + 1];
            int32x4_t acc[2] = {};
#pragma GCC unroll 4
            for (int i = 0; i < kOctets; ++i) {
              const int8x16_t x = (int8x16_t)vcombine_s32(vld1_s32(row.x + 2 * i), vld1_s32(next.x + 2 * i));
              acc[0] = vmmlaq_s32(acc[0], x, octets[i][0]);
              acc[1] = vmmlaq_s32(acc[1], x, octets[i][1]);
            }
            const int64x2_t low = (int64x2_t)acc[0], high = (int64x2_t)acc[1];
            S::add_sum(out, S::begin(row, offset) + (IntLanes)vzip1q_s64(low, high), scale, least, row);
            S::add_sum(out + kTileStride, S::begin(next, offset) + (IntLanes)vzip2q_s64(low, high), scale, least, next);
          }
        }
      }
    }
  }
  return num_rows;
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

#endif
