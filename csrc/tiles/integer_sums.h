// Sums of many products of small integers (int_dot.h), as tiles make them.
#pragma once

#include <cstdint>

#include "simd/int_dot.h"
#include "simd/isa_unit.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// Keeps compilers from adding up all products of a sum in the end, for which these would have to wait in memory.
template <typename V>
FORCE_INLINE void pin([[maybe_unused]] V& sum) {
#if defined(__x86_64__)
  asm("" : "+v"(sum));
#elif defined(__aarch64__)
  asm("" : "+w"(sum));
#endif
}

// Where products of bytes come as sums of two in 16 bits, how many of these fit into as many bits: they are widened but
// once. 0: not even one does, or bytes are taken for signed ones whatever they are, so that they are made such.
//
//   lane                 |       0       |       1       | ..
//   a product of quads   | p0+p1 | p2+p3 |  likewise             16 bits each, at most 2 * 127 * `most`
//   pairs                sum of up to `quads_in_pairs` such products
//   total                += both halves of a lane's pairs        32 bits
constexpr int quads_in_pairs([[maybe_unused]] int most) {
#if HAS_PAIRED_PRODUCTS
  const int fit = 32767 / (2 * 127 * most);
  return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : fit;
#elif IS_NEON
  return most < 128 ? 8 : 0;  // sums of four, of signed bytes
#else
  return 8;  // sums of four: nothing to choose
#endif
}

// What such sums take off each byte when they are multiplied as signed ones; the caller adds it again.
constexpr int32_t offset_of_bytes(int most, int32_t offset) {
  return quads_in_pairs(most) == 0 ? offset - 128 + kInt8Offset : offset;
}

#if HAS_PAIRED_PRODUCTS
FORCE_INLINE void add_to_pairs(BitLanes& pairs, BitLanes w, int32_t x4, bool is_first) {
  const BitLanes products = paired_products(w, x4);
  if (!is_first) return add_halves_to(pairs, products);
  pairs = products;
  pin(pairs);
}
#endif

// Sums of kQuads products of four bytes that are at most `most` with four signed ones, quads_in_pairs(most) being
// kInPairs; where that is 0, the bytes come less by 128, as signed ones, of which with kLackLeast none is -128.
template <int kInPairs, int kQuads, bool kLackLeast>
struct ByteSums {
  static constexpr int kWidenEvery = kInPairs < kQuads ? kInPairs : kQuads;
  // Whether the initial value of a sum is better added at the end: until then it would take a register.
  static constexpr bool kBeginsLast = HAS_PAIRED_PRODUCTS && kInPairs > 0;

  FORCE_INLINE_MEMBER static IntLanes with_begin(IntLanes total, BitLanes, IntLanes begin) { return total + begin; }

  // Adds the products of quad `quad`, which counts up from 0 to kQuads - 1. `pairs` is for sums on their way: a variable
  // of its own, as GCC keeps structs of vectors in memory. `kSharesX`: whether more `w` meet an x than x meet a w.
  template <bool kSharesX>
  FORCE_INLINE_MEMBER static void add(IntLanes& total, [[maybe_unused]] BitLanes& pairs, BitLanes w, int32_t x4,
                                      [[maybe_unused]] int quad) {
    if constexpr (kInPairs == 0) {
      total = dot_signed<kSharesX>(total, w, x4);
      pin(total);
    } else {
#if HAS_PAIRED_PRODUCTS
      add_to_pairs(pairs, w, x4, quad % kWidenEvery == 0);
      if (quad % kWidenEvery != kWidenEvery - 1) return;
      total += sum_of_halves(pairs);
      pin(total);
#else
      total = dot_unsigned(total, w, x4);
      pin(total);
#endif
    }
  }

 private:
  template <bool kSharesX>
  FORCE_INLINE_MEMBER static IntLanes dot_signed(IntLanes total, BitLanes w, int32_t x4) {
#if HAS_PAIRED_PRODUCTS
    if constexpr (kLackLeast && kSharesX) return dot_int8_without_least(total, w, x4);
#endif
    return dot_int8(total, w, x4);
  }
};

#if HAS_PAIRED_PRODUCTS
// Whether `quads` products fit into 16 bits after subtracting the weights' `offset`.
constexpr bool fit_without_offset(int most, int offset, int quads) {
  const int farthest = offset > most - offset ? offset : most - offset;
  return quads_in_pairs(most) > 0 && 2 * 127 * farthest * quads <= 32767;
}

// Sums of products that fit into 16 bits without their offset, and are widened once. On the way sums may pass these
// bounds and come back, as additions wrap around; each product alone does fit. `begin` is -offset times the sum of the
// row's values, in halves as products are.
struct WrappedSums {
  static constexpr bool kBeginsLast = true;

  template <bool>
  FORCE_INLINE_MEMBER static void add(IntLanes&, BitLanes& pairs, BitLanes w, int32_t x4, int quad) {
    add_to_pairs(pairs, w, x4, quad == 0);
  }
  FORCE_INLINE_MEMBER static IntLanes with_begin(IntLanes, BitLanes pairs, IntLanes begin) {
    add_halves_to(pairs, (BitLanes)begin);
    return sum_of_halves(pairs);
  }
};
#endif

// Sums of products of pairs of 16 bits; `add` adds the `pair`-th. Where product and sum are two instructions,
// the first product is a sum already.
struct PairSums {
  static constexpr bool kBeginsLast = HAS_PAIRED_PRODUCTS;

  FORCE_INLINE_MEMBER static IntLanes with_begin(IntLanes total, BitLanes, IntLanes begin) { return total + begin; }

  template <bool>
  FORCE_INLINE_MEMBER static void add(IntLanes& total, BitLanes&, BitLanes w, int32_t x2, [[maybe_unused]] int pair) {
#if HAS_PAIRED_PRODUCTS
    if (pair > 0) return add_to(total, dot_pairs(IntLanes{}, w, x2));
#endif
    total = dot_pairs(total, w, x2);
    pin(total);
  }
};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
