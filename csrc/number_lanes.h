// The numbers beside packed weights - scales, minima, zero points - of as many outputs as a vector has lanes.
#pragma once

#include <cstdint>

#include "convert.h"
#include "isa_unit.h"
#include "matrix.h"
#include "simd.h"

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

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
