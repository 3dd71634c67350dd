// Products of small integers (int_dot.h) on ARM with NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "simd/isa_unit.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

constexpr int32_t kInt8Offset = 0;

FORCE_INLINE IntLanes dot_int8(IntLanes acc, BitLanes w, int32_t x4) {
  const int8x16_t ws = (int8x16_t)w;
#if defined(__ARM_FEATURE_DOTPROD)
  return (IntLanes)vdotq_lane_s32((int32x4_t)acc, ws, (int8x8_t)first_of_two(x4), 0);
#else
  const int8x16_t x = (int8x16_t)vdupq_n_s32(x4);
  // Two products of bytes fit into 16 bits.
  const int16x8_t low = vmull_s8(vget_low_s8(ws), vget_low_s8(x)), high = vmull_high_s8(ws, x);
  return (IntLanes)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
#endif
}

// Unsigned weights are below 128 here (`quads_in_pairs`), so that they are signed ones too.
FORCE_INLINE IntLanes dot_unsigned(IntLanes acc, BitLanes w, int32_t x4) { return dot_int8(acc, w, x4); }

FORCE_INLINE IntLanes dot_pairs(IntLanes acc, BitLanes w, int32_t x2) {
  // Weights of several rows are unpacked once; then an instruction multiplies, widens and adds up.
  const int16x4_t first = vmovn_s32((int32x4_t)w), second = vshrn_n_s32((int32x4_t)w, 16);
  const int16x4_t x = (int16x4_t)first_of_two(x2);
  return (IntLanes)vmlal_lane_s16(vmlal_lane_s16((int32x4_t)acc, first, x, 0), second, x, 1);
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
