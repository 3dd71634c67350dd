// Products of small integers (int_dot.h) as the compiler makes them.
#pragma once

#include <cstdint>

#include "simd/isa_unit.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {
namespace plain {

constexpr int32_t kInt8Offset = 0;

FORCE_INLINE IntLanes dot_unsigned(IntLanes acc, BitLanes w, int32_t x4) {
  int8_t x[4];
  __builtin_memcpy(x, &x4, 4);
  const BitLanes byte = BitLanes{} + 255u;
  return acc + (IntLanes)(w & byte) * x[0] + (IntLanes)((w >> 8) & byte) * x[1] + (IntLanes)((w >> 16) & byte) * x[2] +
         (IntLanes)(w >> 24) * x[3];
}

FORCE_INLINE IntLanes dot_int8(IntLanes acc, BitLanes w, int32_t x4) {
  int8_t x[4];
  __builtin_memcpy(x, &x4, 4);
  const IntLanes s = (IntLanes)w;
  return acc + (s << 24 >> 24) * x[0] + (s << 16 >> 24) * x[1] + (s << 8 >> 24) * x[2] + (s >> 24) * x[3];
}

FORCE_INLINE IntLanes dot_pairs(IntLanes acc, BitLanes w, int32_t x2) {
  const IntLanes s = (IntLanes)w;
  return acc + (s << 16 >> 16) * static_cast<int16_t>(x2 & 0xffff) + (s >> 16) * (x2 >> 16);
}

}  // namespace plain
}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
