// Parts of all tiles: the places of results, prefetches, and rows of integers.
#pragma once

#include <cstdint>

#include "simd/int_dot.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// Where results go: each row's outputs lie side by side, kTileStride floats from a row to the next.
//
//                band 0        band 1           band B-1
//   out row 0    [ 0 .. 15 ]   [16 .. 31]  ..   [  ..  ]      one lane an output, kParts registers a band
//       row 1    [ 0 .. 15 ]   [16 .. 31]  ..   [  ..  ]
//       row R-1  [ 0 .. 15 ]   [16 .. 31]  ..   [  ..  ]
template <int R, int B>
FORCE_INLINE void store_tile(const Tile& t, const FloatLanes (&acc)[R][B][kParts]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        *reinterpret_cast<FloatLanesInMemory*>(t.out + r * kTileStride + b * kBand + p * kLanes) = acc[r][b][p];
      }
}

// Prefetches into the second cache. In the first, so many lines at once would occupy its few buffers, which the lines
// being multiplied need (Zen 4, one row: 23 GB/s of int8 weights instead of 29).
FORCE_INLINE void fetch_line(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// Prefetches later lines while others are multiplied.
//
// With several rows, or with halves to unpack, a line is so much work that the processor does not prefetch the next ones
// by itself (Zen 5, 6 rows: 28 GB/s of int8 weights instead of 18).
//
// One row goes through weights so fast that the processor's queues fill up and drop prefetches. So each is repeated
// (Zen 4: 28 to 29 GB/s of int4, int8 and K-quants instead of 22 to 24): twice, or once for lines with many operations.
template <int B>
class Ahead {
 public:
  static constexpr int64_t kLinesAhead = 32;
  static constexpr int64_t kHeadAhead = 256;  // bytes, when a head is asked for again

  // Each band has `num_lines` lines after `head` bytes, multiplied `lines_at_once` at a time. No line is omitted where
  // one group of bands ends and the next begins.
  Ahead(const Tile& t, int64_t head, int64_t num_lines, int64_t lines_at_once = 1)
      : own_head_(t.bands), stride_(t.band_stride) {
    if (t.fetch == Fetch::kNothing) return;
    const int64_t lines_ahead = kLinesAhead / lines_at_once * lines_at_once;
    const int64_t lines = t.fetch == Fetch::kOwn && lines_ahead < num_lines ? lines_ahead : num_lines;
    turn_ = num_lines - lines;
    own_ = t.bands + head + lines * 64;
    if (t.following == nullptr) return;
    following_ = t.following + head - turn_ * 64;
    following_head_ = t.following;
  }

  // While line `line` is multiplied.
  void fetch(int64_t line) const {
    const uint8_t* const from = line < turn_ ? own_ : following_;
    if (from == nullptr) return;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) fetch_line(from + b * stride_ + line * 64);
  }

  // While lines from `line` on of two bands are multiplied, of the tile's the first being `band`.
  template <int kLines, int kTimesAgain = 0>
  FORCE_INLINE_MEMBER void fetch_of_two(int64_t band, int64_t line) const {
    const uint8_t* from = line < turn_ ? own_ : following_;
    if (from == nullptr) return;
    from += band * stride_ + line * 64;
    fetch_lines<kLines, kTimesAgain>(from);
    fetch_lines<kLines, kTimesAgain>(from + stride_);
  }

  // While the part of the head at `offset` is used.
  void fetch_head(int64_t offset) const {
    if (following_head_ == nullptr) return;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) fetch_line(following_head_ + b * stride_ + offset);
  }

  template <bool kAsksAgain = false>
  FORCE_INLINE_MEMBER void fetch_head_of_two(int64_t band, int64_t offset, int64_t bytes) const {
    const int64_t at = band * stride_ + offset;
    if constexpr (kAsksAgain) fetch_numbers(own_head_ + at + kHeadAhead, bytes);
    if (following_head_ != nullptr) fetch_numbers(following_head_ + at, bytes);
  }

 private:
  // Again when they are half as far ahead, and a quarter. Where one group of bands ends and the next begins, some lines
  // are omitted.
  template <int kLines, int kTimesAgain>
  FORCE_INLINE_MEMBER static void fetch_lines(const uint8_t* from) {
    static_assert(kTimesAgain <= 2);
    int64_t distance = kLinesAhead;
#pragma GCC unroll 3
    for (int time = 0; time <= kTimesAgain; ++time, distance /= 2) {
      const uint8_t* const line = from - (kLinesAhead - distance) * 64;
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i) fetch_line(line + i * 64);
    }
  }

  // Of two bands.
  FORCE_INLINE_MEMBER void fetch_numbers(const uint8_t* from, int64_t bytes) const {
    for (int64_t i = 0; i < bytes; i += 64) {
      fetch_line(from + i);
      fetch_line(from + stride_ + i);
    }
  }

  const uint8_t* own_head_;
  int64_t stride_, turn_ = 0;
  const uint8_t *own_ = nullptr, *following_ = nullptr, *following_head_ = nullptr;
};

// Where part `part` of the 64-byte line at `offset` in band `band` begins.
FORCE_INLINE const uint8_t* line_part(const Tile& t, int band, int64_t offset, int part) {
  return t.bands + band * t.band_stride + offset + part * kLanes * 4;
}

// Some rows of a tile by some of its bands, from `row` and `band` on. The last of an odd number of bands stands for two.
FORCE_INLINE Tile part_of(const Tile& whole, int row, int band, int bands) {
  Tile part = whole;
  part.bands = whole.bands + band * whole.band_stride;
  if (whole.num_bands - band < bands) part.band_stride = 0;
  part.rows = whole.rows + row;
  part.out = whole.out + row * kTileStride + band * kBand;
  if (row > 0) {
    part.fetch = Fetch::kNothing;
  } else if (whole.fetch == Fetch::kFollowing) {
    if (whole.following != nullptr) part.following = whole.following + band * whole.band_stride;
  } else if (band + bands < whole.num_bands) {
    part.following = part.bands + bands * whole.band_stride;
  }
  return part;
}

// A tile is a function of its own: inlined into the choice among all of them, GCC finds worse registers for it.
#define TILE __attribute__((noinline))

// One prepared row of integers, unpacked.
struct IntegerRow {
  const Int32InMemory* quads;  // four values each, of 16 bits two
  const float* scales;
  const int32_t* sums;
  const int32_t* first_sums;  // of the first half of each group

  IntegerRow(const void* row, int64_t k, int64_t value_bytes)
      : quads(static_cast<const Int32InMemory*>(row)),
        scales(reinterpret_cast<const float*>(static_cast<const int8_t*>(row) + k * value_bytes)),
        sums(reinterpret_cast<const int32_t*>(scales + k / kGroup)),
        first_sums(sums + k / kGroup) {}
  IntegerRow() = default;

  // The sum of the values that meet step `step` of group `g`: where a group is one step, all of them.
  template <int kSteps>
  FORCE_INLINE_MEMBER int32_t sum_of(int64_t g, int step) const {
    if constexpr (kSteps == 1) return sums[g];
    return step == 0 ? first_sums[g] : sums[g] - first_sums[g];
  }
};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
