// Vector operations in plain C++. Architectures override them (simd_x86.h, simd_neon.h) where they have a better
// instruction.
#pragma once

#include <cstdint>

#include "formats/convert.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd_types.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {
namespace plain {

// ---- to and from other types ----

// Neighbouring numbers for all lanes of a V, as floats: from bfloat16 or int8.
template <typename V>
FORCE_INLINE V load_as(const uint16_t* p) {
  using Types = Narrow<sizeof(V) / 4>;
  const typename Types::Halves halves = *reinterpret_cast<const typename Types::Halves*>(p);
  return (V)(__builtin_convertvector(halves, typename Types::Bits) << 16);
}
template <typename V>
FORCE_INLINE V load_as(const int8_t* p) {
  using Types = Narrow<sizeof(V) / 4>;
  const typename Types::Bytes bytes = *reinterpret_cast<const typename Types::Bytes*>(p);
  return __builtin_convertvector(__builtin_convertvector(bytes, typename Types::Ints), V);
}

// Numbers in half precision as floats.
FORCE_INLINE FloatLanes load_halves(const uint16_t* p) {
  const auto halves = *reinterpret_cast<const Narrow<kLanes>::Halves*>(p);
  return halves_to_floats<FloatLanes>(__builtin_convertvector(halves, IntLanes));
}

// Numbers of 16 bits as integers.
FORCE_INLINE IntLanes load_shorts(const uint16_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const Narrow<kLanes>::Halves*>(p), IntLanes);
}

// Of numbers of 16 bits one byte, the lower one (half 0) or the upper one (1): as integers, and as their highest byte.
FORCE_INLINE IntLanes byte_of_shorts(const uint16_t* p, int half) { return load_shorts(p) >> (half * 8) & 255; }
FORCE_INLINE IntLanes raised_byte_of_shorts(const uint16_t* p, int half) { return load_shorts(p) >> (half * 8) << 24; }

// To the nearest integer, halves to even. Asked for as one operation, because an addition in floats could be fused
// with the multiplication before it and so round differently in one instruction set than in another.
FORCE_INLINE IntLanes to_nearest(FloatLanes x) {
  IntLanes rounded = {};
  for (int i = 0; i < kLanes; ++i) rounded[i] = moeflow::to_nearest(x[i]);
  return rounded;
}

// Integers that fit into bytes, as bytes side by side.
FORCE_INLINE void store_bytes(int8_t* p, const IntLanes (&values)[kGroup / kLanes]) {
  for (int i = 0; i < kGroup; ++i) p[i] = static_cast<int8_t>(values[i / kLanes][i % kLanes]);
}

// The lower and the upper half of the lanes.
FORCE_INLINE void to_doubles(FloatLanes v, DoubleLanes (&halves)[2]) {
  for (int i = 0; i < kLanes; ++i) halves[i / (kLanes / 2)][i % (kLanes / 2)] = v[i];
}

// ---- across lanes ----

FORCE_INLINE int32_t max_lane(IntLanes v) {
  int32_t largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

FORCE_INLINE int32_t sum_lanes(IntLanes v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// A bit for each lane that is at least `bound`; none for NaN.
FORCE_INLINE uint32_t bits_at_least(FloatLanes v, FloatLanes bound) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(v[i] >= bound[i]) << i;
  return bits;
}

// ---- lane by lane ----

// The larger ones; the second where one of them is NaN.
FORCE_INLINE FloatLanes larger(FloatLanes a, FloatLanes b) { return a > b ? a : b; }

// Looks up each byte in a table of 16.
FORCE_INLINE BitLanes look_up(const uint8_t* table, BitLanes places) {
  uint8_t bytes[sizeof(places)];
  __builtin_memcpy(bytes, &places, sizeof(places));
  for (uint8_t& byte : bytes) byte = table[byte];
  __builtin_memcpy(&places, bytes, sizeof(places));
  return places;
}

// Places in a table of eight halves, one a half, as those of its bytes.
FORCE_INLINE BitLanes places_of_bytes(BitLanes places) { return (places | places << 8 | 0x08000800u) & 0x0f0f0f0fu; }

// Looks up each half in a table of eight; undefined for other places.
FORCE_INLINE BitLanes look_up_halves(const EightHalves& table, BitLanes places) {
  return look_up(table.bytes, places_of_bytes(places));
}

// Keeps compilers from fusing the product with an addition, so that all instruction sets round alike.
FORCE_INLINE FloatLanes rounded(FloatLanes product) {
  asm("" : "+m"(product));
  return product;
}

}  // namespace plain
}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
