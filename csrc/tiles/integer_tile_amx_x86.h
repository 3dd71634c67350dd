// Tiles of integer weights (integer_steps.h) where an instruction multiplies matrices of bytes (AMX).
//
// A step, whose values share a scale, is one instruction for 16 rows by a band. Its exact sums go to memory, from where
// they are scaled and added up, each row's total in a register of its own:
//
//   registers   C0 = x * w    C1 = x * w    C2 = x * w    C3 = x * w    C0 = x * w    ..     step after step
//   sums                                    C0 -> [0]     C1 -> [1]     C2 -> [2]            stored two steps later
//   total[r]                                += [0] * ..   += [1] * ..   += [2] * ..          scaled at once
//
// Scaling takes longest: while there is something in these registers, the processor (Sapphire Rapids) has one unit for
// floats of 512 bits instead of two.
//
// Rows are taken kStretchesACopy stretches at a time: copied side by side, with their scales. Weights of one band are
// unpacked to bytes, with theirs. Integers are exact, so that rows get the bits that other tiles give them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "tiles/integer_steps.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"
#include "tiles/tile_registers_x86.h"

#if HAS_AMX

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

constexpr int kStretchesACopy = 16;

template <typename F>
class IntegerTileAmx {
  using S = Steps<F, false>;
  static_assert(S::kSteps == 1, "steps of 16 values take as long to scale, for half of the products");
  static constexpr int kStepBytes = kGroup * kBand;  // of weights
  // Whether weights are multiplied as signed bytes, after subtracting their offset; else as unsigned ones.
  static constexpr bool kAreSigned = S::kHasOneOffset || F::kMost < 128;
  // Whether they lie in the band as such bytes.
  static constexpr bool kAreBytes = F::kStretchWords == kGroup / 4;
  static_assert(!kAreBytes || !kAreSigned || F::kOffset == 128, "bytes are raised when they are read");
  static_assert(kAreSigned || !F::kHasMin);
  static constexpr bool kHasRowSums = F::kHasMin || !kAreSigned;
  using RowSum = std::conditional_t<kAreSigned, float, int32_t>;  // floats: times the row's scale, as minima meet them

 public:
  explicit IntegerTileAmx(const Tile& t) : t_(t), steps_{t} {}

  void compute() {
    const TileRegisterShape c{kTileRows, 64}, x{kTileRows, kGroup}, w{kGroup / 4, 64};
    const TileRegisters registers({c, c, c, c, x, x, w, w});
    __builtin_memset(row_scales_, 0, sizeof(row_scales_));  // of rows that are not there, too: subnormal ones are slow
    if constexpr (kHasRowSums) __builtin_memset(row_sums_, 0, sizeof(row_sums_));
    for (int64_t first = 0; first < steps_.stretches; first += kStretchesACopy) {
      const int64_t left = steps_.stretches - first;
      if (left >= kStretchesACopy) {
        add_stretches(first, std::integral_constant<int, kStretchesACopy>());
      } else {
        add_stretches(first, static_cast<int>(left));
      }
    }
  }

 private:
  // Mostly as many as there can be, which compilers then know.
  template <typename Count>
  FORCE_INLINE_MEMBER void add_stretches(int64_t first, Count count) {
    for (int r = 0; r < t_.num_rows; ++r) copy_row(r, first, count);
    for (int band = 0; band < t_.num_bands; ++band) {
      const uint8_t* const weights = take_weights(band, first, count);
      for (int row = 0; row < t_.num_rows; row += kTileRows) {
        const int rows = t_.num_rows - row;
        const auto add = rows <= 8    ? &IntegerTileAmx::add_steps<8>
                         : rows <= 12 ? &IntegerTileAmx::add_steps<12>
                                      : &IntegerTileAmx::add_steps<16>;
        (this->*add)(weights, row, band, count, first == 0);
      }
    }
  }

  template <typename Count>
  FORCE_INLINE_MEMBER void copy_row(int r, int64_t first, Count count) {
    const IntegerRow row(t_.rows[r], steps_.k, 1);
    __builtin_memcpy(rows_[r], row.quads + first * (kGroup / 4), count * kGroup);
    __builtin_memcpy(row_scales_[r], row.scales + first, count * sizeof(float));
    if constexpr (kHasRowSums) {
      for (int i = 0; i < count; ++i) {
        if constexpr (kAreSigned) {
          row_sums_[r][i] = row.scales[first + i] * static_cast<float>(row.sums[first + i]);
        } else {
          row_sums_[r][i] = row.sums[first + i];
        }
      }
    }
  }

  // Returns a band's bytes, and keeps what else there is of each stretch.
  FORCE_INLINE_MEMBER const uint8_t* take_weights(int band, int64_t first, int count) {
    for (int i = 0; i < count; ++i) {
      if (band % 2 == 0) steps_.fetch(first + i, band);
      const auto weights = steps_.weights(first + i, band, 0);
      store_lanes(scales_[i], weights.scale(0));
      if constexpr (F::kHasMin) store_lanes(least_[i], weights.least(0));
      if constexpr (!kAreSigned) offsets_[i] = weights.offset();
      if constexpr (!kAreBytes) {
        const __m512i raised_by = S::kHasOneOffset ? _mm512_set1_epi8(static_cast<char>(F::kOffset))
                                                   : (__m512i)(weights.offset() * 0x01010101);
#pragma GCC unroll 8
        for (int quad = 0; quad < kGroup / 4; ++quad) {
          _mm512_store_si512(bytes_[i][quad], _mm512_sub_epi8((__m512i)weights.factor(quad, 0), raised_by));
        }
      }
    }
    return kAreBytes ? steps_.weights(first, band, 0).words : bytes_[0][0];
  }

  // Rows from `row` on, up to kRows, by a band.
  template <int kRows>
  TILE void add_steps(const uint8_t* weights, int row, int band, int count, bool is_first) {
    constexpr auto kEach = std::make_integer_sequence<int, kRows>();
    const int rows_left = t_.num_rows - row;
    float* const out = t_.out + row * kTileStride + band * kBand;
    FloatLanes total[kRows];
    load_totals(kEach, total, out, is_first ? 0 : rows_left);
    const auto turn = [&](auto place, int step) __attribute__((always_inline)) {
      constexpr int kC = decltype(place)::value, kStored = (kC + 2) % 4, kX = 4 + kC % 2, kW = 6 + kC % 2;
      if (step < count) {
        load_tile<kX>(rows_[row] + step * kGroup, sizeof(rows_[0]));
        load_tile<kW>(weights + step * kStepBytes, 64);
        zero_tile<kC>();
        if constexpr (kAreSigned) {
          multiply_signed_tiles<kC, kX, kW>();
        } else {
          multiply_unsigned_tiles<kC, kX, kW>();
        }
      }
      const int done = step - 2;
      if (done < 0 || done >= count) return;
      store_tile_register<kStored>(sums_[kStored], 64);
      add_sums(kEach, total, sums_[kStored], row, done);
    };
    for (int step = 0; step < count + 2; step += 4) {
      turn(std::integral_constant<int, 0>(), step);
      turn(std::integral_constant<int, 1>(), step + 1);
      turn(std::integral_constant<int, 2>(), step + 2);
      turn(std::integral_constant<int, 3>(), step + 3);
    }
    store_totals(kEach, total, out, rows_left);
  }

  // Totals stay in registers only if no loop counts them.
  template <int... r>
  FORCE_INLINE_MEMBER static void load_totals(std::integer_sequence<int, r...>, FloatLanes (&total)[sizeof...(r)],
                                              const float* out, int count) {
    ((total[r] = r < count ? load_lanes(out + r * kTileStride) : FloatLanes{}), ...);
  }
  template <int... r>
  FORCE_INLINE_MEMBER static void store_totals(std::integer_sequence<int, r...>, const FloatLanes (&total)[sizeof...(r)],
                                               float* out, int count) {
    ((r < count ? store_lanes(out + r * kTileStride, total[r]) : void()), ...);
  }
  template <int... r>
  FORCE_INLINE_MEMBER void add_sums(std::integer_sequence<int, r...>, FloatLanes (&total)[sizeof...(r)],
                                    const int32_t (*sums)[kLanes], int row, int step) const {
    const FloatLanes scale = load_lanes(scales_[step]), least = load_lanes(least_[F::kHasMin ? step : 0]);
    ((total[r] = S::with_sum(total[r], sum_of(sums[r], row + r, step), scale, least, row_scales_[row + r][step],
                             kHasRowSums ? static_cast<float>(row_sums_[row + r][step]) : 0)),
     ...);
  }
  FORCE_INLINE_MEMBER IntLanes sum_of(const int32_t (&lanes)[kLanes], [[maybe_unused]] int row,
                                      [[maybe_unused]] int step) const {
    const IntLanes sum = (IntLanes)load_bits(lanes);
    if constexpr (!kAreSigned) return sum - offsets_[step] * row_sums_[row][step];
    return sum;
  }

  const Tile& t_;
  const S steps_;
  alignas(64) uint8_t rows_[kMaxTileRows][kStretchesACopy * kGroup];
  float row_scales_[kMaxTileRows][kStretchesACopy];
  RowSum row_sums_[kHasRowSums ? kMaxTileRows : 1][kStretchesACopy];
  alignas(64) uint8_t bytes_[kAreBytes ? 1 : kStretchesACopy][kGroup / 4][64];
  alignas(64) float scales_[kStretchesACopy][kLanes], least_[F::kHasMin ? kStretchesACopy : 1][kLanes];
  alignas(64) IntLanes offsets_[kAreSigned ? 1 : kStretchesACopy];
  alignas(64) int32_t sums_[4][kTileRows][kLanes];
};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

#endif
