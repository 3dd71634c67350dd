// Scales, minima and zero points of packed weights, for as many outputs as the lanes of a vector.
#pragma once

#include <cstdint>

#include "formats/convert.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// Those of one group; each number is a line of 16.
struct NumbersOfLanes {
  const uint8_t* first;

  const uint16_t* at(int i) const { return reinterpret_cast<const uint16_t*>(first + i * kBand * 2); }
  FORCE_INLINE_MEMBER FloatLanes half(int i) const { return load_halves(at(i)); }
  FORCE_INLINE_MEMBER FloatLanes bf16(int i) const { return to_bits_of_floats(bits(i) << 16); }
  FORCE_INLINE_MEMBER IntLanes bits(int i) const { return load_shorts(at(i)); }
  FORCE_INLINE_MEMBER IntLanes low_byte(int i) const { return byte_of_shorts(at(i), 0); }
  FORCE_INLINE_MEMBER IntLanes high_byte(int i) const { return byte_of_shorts(at(i), 1); }
  FORCE_INLINE_MEMBER IntLanes raised_byte(int i, int half) const { return raised_byte_of_shorts(at(i), half); }
  template <typename Format>
  FORCE_INLINE_MEMBER FloatLanes common(int i) const {
    return Format::common_of(*this, i);
  }
  FORCE_INLINE_MEMBER static FloatLanes to_floats(IntLanes numbers) {
    return __builtin_convertvector(numbers, FloatLanes);
  }
  FORCE_INLINE_MEMBER static FloatLanes to_bits_of_floats(IntLanes bits) { return (FloatLanes)bits; }
  FORCE_INLINE_MEMBER static FloatLanes half_exponents(IntLanes exponents) {
    return half_exponents_to_floats<FloatLanes>(exponents);
  }
  FORCE_INLINE_MEMBER static FloatLanes half_nvfp4(IntLanes code, FloatLanes factor) {
    return half_nvfp4_scale(code, factor);
  }
};

// The same where common factors have been made before.
struct NumbersWithCommon : NumbersOfLanes {
  const FloatLanes* factors;

  template <typename>
  FORCE_INLINE_MEMBER FloatLanes common(int i) const {
    return factors[i];
  }
};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
