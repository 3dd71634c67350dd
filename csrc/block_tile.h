// Tiles of weights in the blocks that files have (block_formats.h): exact integer sums of as many values as share a
// scale, then one multiply-add in floats (two, where there is a minimum).
#pragma once

#include <cstdint>

#include "int_dot.h"
#include "isa_unit.h"
#include "matrix.h"
#include "simd.h"
#include "tile_parts.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// The numbers of one group, of as many outputs as a vector has lanes; each number is a line of 16.
struct NumbersOfLanes {
  const uint8_t* first;

  const uint16_t* at(int i) const { return reinterpret_cast<const uint16_t*>(first + i * kBand * 2); }
  FORCE_INLINE_MEMBER FloatLanes half(int i) const { return load_halves(at(i)); }
  FORCE_INLINE_MEMBER IntLanes bits(int i) const { return load_shorts(at(i)); }
  FORCE_INLINE_MEMBER static FloatLanes to_floats(IntLanes numbers) {
    return __builtin_convertvector(numbers, FloatLanes);
  }
  FORCE_INLINE_MEMBER static FloatLanes half_exponents(IntLanes exponents) {
    return half_exponents_to_floats<FloatLanes>(exponents);
  }
};

// What a quad's codes stand for, raised by the format's offset, as pairs of 16 bits: first and third, second and fourth.
template <typename F>
struct QuadPairs {
  BitLanes pairs[2];

  FORCE_INLINE_MEMBER explicit QuadPairs(BitLanes codes) {
    if constexpr (F::kTable != nullptr) codes = look_up(F::kTable, codes);
    pairs[0] = codes & 0x00ff00ffu;
    pairs[1] = codes >> 8 & 0x00ff00ffu;
  }
};

// The sum of a row's values that meet half `half` of stretch `s`: all, where values of a stretch share a scale.
template <typename F>
FORCE_INLINE int32_t sum_of(const IntegerRow& row, int64_t s, int half) {
  if constexpr (F::kSub == kGroup) return row.sums[s];
  return half == 0 ? row.first_sums[s] : row.sums[s] - row.first_sums[s];
}

// A step is what shares a scale, `kSub` values: a stretch of 32, or half of one.
//
//   a band in memory     numbers of all groups, 16 x 16 bits each | group 0 | group 1 | ..
//   a group              stretches of 32 k
//   a stretch            kStretchWords lines of 64 bytes, each with a word a lane: low bits of codes, then high bits
//   row r                x[r], two k of 16 bits at a time, the same in all lanes
//
//   in a step            acc[r][b] = sum over its k of w * x               integers, a lane an output
//   after a step         total[r][b] += acc * (weight's scale * row's scale)           in floats, step after step
//                        total[r][b] += minimum * (row's scale * row's sum)            where there is a minimum
template <int R, int B, typename F>
TILE void tile_blocks(const Tile& t) {
  static_assert(source::kStretch == kGroup, "rows have a scale for each stretch of weights");
  const int64_t k = padded_cols(t.cols), stretches = k / kGroup, groups = num_groups<F>(t.cols);
  const int64_t head = scale_bytes<F>(groups);
  constexpr int kSteps = kGroup / F::kSub, kQuads = F::kSub / 4, kLines = F::kStretchWords;
  constexpr int64_t kNumberBytes = F::kNumbers * kBand * 2;
  IntegerRow rows[R];
  for (int r = 0; r < R; ++r) rows[r] = IntegerRow(t.rows[r], k, 2);
  FloatLanes total[R][B][kParts] = {};
  const Ahead<B> ahead(t, head, groups * F::kStretches * kLines);
  for (int64_t s = 0; s < stretches; ++s) {
    const int64_t group = s / F::kStretches, line = s * kLines;
    const int stretch = static_cast<int>(s % F::kStretches);
    if (stretch == 0) {
      for (int64_t offset = 0; offset < kNumberBytes; offset += 64) ahead.fetch_head(group * kNumberBytes + offset);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) ahead.fetch(line + i);
#pragma GCC unroll 2
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        IntLanes acc[R][B];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) acc[r][b] = IntLanes{} - F::kOffset * sum_of<F>(rows[r], s, step);
#pragma GCC unroll 8
        for (int i = 0; i < kQuads; ++i) {
          const int quad = step * kQuads + i;
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) {
            const auto word = [&](int w) __attribute__((always_inline)) {
              return load_bits(line_part(t, b, head + (line + w) * 64, p));
            };
            const QuadPairs<F> parts(F::quad(word, quad));
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
              for (int pair = 0; pair < 2; ++pair) {
                acc[r][b] = dot_pairs(acc[r][b], parts.pairs[pair], rows[r].quads[(s * 8 + quad) * 2 + pair]);
              }
          }
        }
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          const NumbersOfLanes numbers{t.bands + b * t.band_stride + group * kNumberBytes + p * kLanes * 2};
          const FloatLanes scale = F::scale(numbers, stretch, step);
          FloatLanes least = {};
          if constexpr (F::kHasMin) least = F::least(numbers, stretch, step);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const FloatLanes sum = __builtin_convertvector(acc[r][b], FloatLanes);
            total[r][b][p] += sum * (scale * splat_lanes(rows[r].scales[s]));
            if constexpr (F::kHasMin) {
              total[r][b][p] += least * splat_lanes(rows[r].scales[s] * static_cast<float>(sum_of<F>(rows[r], s, step)));
            }
          }
        }
      }
    }
  }
  store_tile<R, B>(t, total);
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
