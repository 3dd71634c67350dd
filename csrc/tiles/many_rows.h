// Data that tiles of many rows keep in the first cache: a stretch of unpacked weights, and the rows' operands for it
// (integer_steps.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd/int_dot.h"
#include "tiles/integer_steps.h"
#include "tiles/integer_sums.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// Whether many rows multiply a format's bytes as pairs of 16 bits, for which these are widened beforehand: two products
// and two additions for four bytes of eight outputs. As bytes, AVX2 takes a change of signs and two products, all three
// of which share two of a Zen 4's four pipes, and an addition. AVX-512 changes signs under a mask, in any pipe, and
// gains nothing.
template <typename F>
constexpr bool widens_for_many_rows() {
  return MOEFLOW_UNIT == MOEFLOW_AVX2 && quads_in_pairs(F::kMost) == 0;
}

// How widened bytes are multiplied.
template <typename F>
struct WidenedSteps : Steps<F, false> {
  static constexpr int kFactors = 2;
  using Sums = PairSums;
};

#if HAS_PAIRED_PRODUCTS
// Whether sums of a format's products are widened but once, which takes sums of the row's pairs: for many outputs.
template <typename F>
constexpr bool wraps_for_many_rows() {
  constexpr int kQuads = F::kSub / 4;
  if (has_zero_points<F>() || quads_in_pairs(F::kMost) >= kQuads) return false;
  return fit_without_offset(F::kMost, F::kOffset, kQuads);
}

template <typename F>
struct WrappedSteps : Steps<F, false> {
  static constexpr bool kSumsWrap = true;
  using Sums = WrappedSums;
};

template <typename F>
using ManyRowSteps = std::conditional_t<
    widens_for_many_rows<F>(), WidenedSteps<F>,
    std::conditional_t<wraps_for_many_rows<F>(), WrappedSteps<F>, Steps<F, false>>>;
#else
template <typename F>
using ManyRowSteps = Steps<F, false>;
#endif

// Of signed bytes as 16 bits: 0 the first and the third of each four, 1 the second and the fourth.
FORCE_INLINE BitLanes widened(BitLanes bytes, int f) {
  typedef int16_t HalfLanes __attribute__((vector_size(kLanes * 4)));
  const HalfLanes halves = (HalfLanes)bytes;
  return (BitLanes)((f == 0 ? halves << 8 : halves) >> 8);
}

// Takes a row's values of a stretch over, kInOne of them in 32 bits: as they are, or widened likewise.
template <int kInOne>
FORCE_INLINE void take_values(const int8_t* values, Int32InMemory (&x)[kGroup / kInOne]) {
  if constexpr (kInOne == 4) {
    __builtin_memcpy(x, values, sizeof(x));
  } else {
    static_assert(kInOne == 2 && kLanes * 4 <= kGroup);
    IntLanes first_half = {}, second_half = {};  // of two vectors, interleaved by lane
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      first_half[i] = i / 2 + i % 2 * kLanes;
      second_half[i] = first_half[i] + kLanes / 2;
    }
#pragma GCC unroll 2
    for (int i = 0; i < kGroup / 4; i += kLanes) {
      BitLanes bytes;
      __builtin_memcpy(&bytes, values + i * 4, sizeof(bytes));
      const BitLanes even = widened(bytes, 0), odd = widened(bytes, 1);
      *reinterpret_cast<BitLanesInMemory*>(x + i * 2) = __builtin_shuffle(even, odd, first_half);
      *reinterpret_cast<BitLanesInMemory*>(x + i * 2 + kLanes) = __builtin_shuffle(even, odd, second_half);
    }
  }
}

// A stretch of kVectors vectors of outputs, unpacked; `Part` is one of them, to be used as `Steps::Weights` are.
template <typename S, int kVectors>
struct Stretch {
  static constexpr int kStretchQuads = S::kSteps * S::kQuads;
  BitLanes factors[kStretchQuads][S::kFactors][kVectors];
  FloatLanes scales[S::kSteps][kVectors], leasts[S::kSteps][kVectors];
  IntLanes offsets[kVectors];

  struct Part {
    const Stretch* of;
    int v;

    FORCE_INLINE_MEMBER BitLanes factor(int quad, int f) const { return of->factors[quad][f][v]; }
    FORCE_INLINE_MEMBER FloatLanes scale(int step) const { return of->scales[step][v]; }
    FORCE_INLINE_MEMBER FloatLanes least(int step) const { return of->leasts[step][v]; }
    FORCE_INLINE_MEMBER IntLanes offset() const { return of->offsets[v]; }
  };

  template <typename Weights>
  FORCE_INLINE_MEMBER void take_apart(const Weights& weights, int v) {
#pragma GCC unroll kUnrolledQuads
    for (int quad = 0; quad < kStretchQuads; ++quad) {
      const BitLanes bytes = weights.factor(quad, 0);
#pragma GCC unroll 2
      for (int f = 0; f < S::kFactors; ++f) factors[quad][f][v] = S::kFactors == 1 ? bytes : widened(bytes, f);
    }
#pragma GCC unroll 2
    for (int step = 0; step < S::kSteps; ++step) {
      scales[step][v] = weights.scale(step);
      leasts[step][v] = weights.least(step);
    }
    offsets[v] = weights.offset();
  }

  // Where 16 registers cannot hold it anyway, GCC is not to move it from one place in memory to another.
  FORCE_INLINE_MEMBER void settle() {
#if MOEFLOW_LANES == 8
    asm("" : "+m"(*this));
#endif
  }
};

// What rows bring to the steps of a stretch: their values, side by side, and their numbers, which are made for as many
// stretches at once as a vector has lanes.
template <typename S>
class ManyRows {
  static constexpr int kInOne = 4 / S::kFactors;  // values in 32 bits

  struct Numbers {
    float scales[kLanes];
    int32_t from[S::kSteps][kLanes];
    float sums[S::kSteps][kLanes];
  };

 public:
  ManyRows(const Tile& t, int64_t k) : rows_(t.rows), num_rows_(t.num_rows), k_(k) {}

  // Before steps of stretch `s` are asked for; stretches come in order.
  FORCE_INLINE_MEMBER void reach(int64_t s) {
    const void* const* const rows = rows_;  // else the written data might alias this
    const int num_rows = num_rows_;
    stretch_ = static_cast<int>(s % kLanes);
    if (stretch_ == 0) {
      for (int r = 0; r < num_rows; ++r) make_numbers(IntegerRow(rows[r], k_, 1), s, numbers_[r]);
    }
    for (int r = 0; r < num_rows; ++r) {
      const int8_t* const values = static_cast<const int8_t*>(rows[r]) + s * kGroup;
      take_values<kInOne>(values, x_[r]);
      if constexpr (S::kSumsWrap) sums_of_offsets(values, S::kOffset, wrapped_from_[r]);
    }
  }

  // As a pointer to `RowStep` is used.
  struct Step {
    const ManyRows& of;
    int first_row, step;

    FORCE_INLINE_MEMBER RowStep operator[](int r) const {
      const int row = first_row + r;
      const Numbers& numbers = of.numbers_[row];
      int32_t from = numbers.from[step][of.stretch_];
      if constexpr (S::kSumsWrap) from = of.wrapped_from_[row][step];
      return {of.x_[row] + step * S::kQuads * S::kFactors, numbers.scales[of.stretch_], from,
              numbers.sums[step][of.stretch_]};
    }
  };
  FORCE_INLINE_MEMBER Step step(int first_row, int step) const { return {*this, first_row, step}; }

 private:
  FORCE_INLINE_MEMBER void make_numbers(const IntegerRow& row, int64_t s, Numbers& numbers) {
    const int64_t count = k_ / kGroup - s;
    const FloatLanes scales = load_some(row.scales + s, count);
    store_unaligned(numbers.scales, scales);
    const IntLanes whole = load_ints(row.sums + s, count);
    IntLanes sums[S::kSteps] = {whole};
    if constexpr (S::kSteps == 2) {
      sums[0] = load_ints(row.first_sums + s, count);
      sums[1] = whole - sums[0];
    }
#pragma GCC unroll 2
    for (int step = 0; step < S::kSteps; ++step) {
      store_unaligned(reinterpret_cast<float*>(numbers.from[step]), (FloatLanes)S::from_sum(sums[step]));
      store_unaligned(numbers.sums[step], scales * __builtin_convertvector(sums[step], FloatLanes));
    }
  }

  FORCE_INLINE_MEMBER static IntLanes load_ints(const int32_t* from, int64_t count) {
    return (IntLanes)load_some(reinterpret_cast<const float*>(from), count);
  }

  const void* const* rows_;
  int num_rows_, stretch_ = 0;
  int64_t k_;
  Numbers numbers_[kMaxTileRows];
  int32_t wrapped_from_[S::kSumsWrap ? kMaxTileRows : 1][S::kSteps];
  alignas(64) Int32InMemory x_[kMaxTileRows][kGroup / kInOne];
};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
