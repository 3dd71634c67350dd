// Vector operations of NEON on ARM. simd_plain.h documents each of them.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd_plain.h"
#include "simd/simd_types.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// ---- to and from other types ----

template <typename V>
FORCE_INLINE V load_as(const uint16_t* p) {
  if constexpr (sizeof(V) == 16) return (V)vshll_n_u16(vld1_u16(p), 16);
  return plain::load_as<V>(p);
}
template <typename V>
FORCE_INLINE V load_as(const int8_t* p) {
  if constexpr (sizeof(V) == 16) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    const int16x8_t shorts = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return (V)vcvtq_f32_s32(vmovl_s16(vget_low_s16(shorts)));
  }
  return plain::load_as<V>(p);
}

FORCE_INLINE FloatLanes load_halves(const uint16_t* p) {
  return (FloatLanes)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

FORCE_INLINE IntLanes load_shorts(const uint16_t* p) { return (IntLanes)vmovl_u16(vld1_u16(p)); }

FORCE_INLINE IntLanes byte_of_shorts(const uint16_t* p, int half) { return load_shorts(p) >> (half * 8) & 255; }
FORCE_INLINE IntLanes raised_byte_of_shorts(const uint16_t* p, int half) { return load_shorts(p) >> (half * 8) << 24; }

FORCE_INLINE IntLanes to_nearest(FloatLanes x) { return (IntLanes)vcvtnq_s32_f32((float32x4_t)x); }

FORCE_INLINE void store_bytes(int8_t* p, const IntLanes (&values)[kGroup / kLanes]) {
  int16x8_t shorts[4];
  for (int i = 0; i < 4; ++i) {
    shorts[i] = vcombine_s16(vmovn_s32((int32x4_t)values[2 * i]), vmovn_s32((int32x4_t)values[2 * i + 1]));
  }
  for (int i = 0; i < 2; ++i) {
    vst1q_s8(p + 16 * i, vcombine_s8(vmovn_s16(shorts[2 * i]), vmovn_s16(shorts[2 * i + 1])));
  }
}

FORCE_INLINE void to_doubles(FloatLanes v, DoubleLanes (&halves)[2]) {
  halves[0] = (DoubleLanes)vcvt_f64_f32(vget_low_f32((float32x4_t)v));
  halves[1] = (DoubleLanes)vcvt_high_f64_f32((float32x4_t)v);
}

// ---- across lanes ----

FORCE_INLINE int32_t max_lane(IntLanes v) { return vmaxvq_s32((int32x4_t)v); }
FORCE_INLINE int32_t sum_lanes(IntLanes v) { return vaddvq_s32((int32x4_t)v); }

FORCE_INLINE uint32_t bits_at_least(FloatLanes v, FloatLanes bound) {
  const uint32x4_t bit_of_lane = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcgeq_f32((float32x4_t)v, (float32x4_t)bound), bit_of_lane));
}

// ---- lane by lane ----

FORCE_INLINE FloatLanes larger(FloatLanes a, FloatLanes b) { return plain::larger(a, b); }

FORCE_INLINE BitLanes look_up(const uint8_t* table, BitLanes places) {
  return (BitLanes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
}

FORCE_INLINE BitLanes look_up_halves(const EightHalves& table, BitLanes places) {
  return look_up(table.bytes, plain::places_of_bytes(places));
}

FORCE_INLINE FloatLanes rounded(FloatLanes product) {
  asm("" : "+w"(product));
  return product;
}

// 32 bits that an instruction multiplies all lanes by: they are loaded into a register's first lane and stay there.
FORCE_INLINE int32x2_t first_of_two(int32_t bits) { return int32x2_t{bits, 0}; }

#if HAS_BF16_DOT
// acc += w * x over the two bfloat16 halves of each lane; x the same in every lane.
FORCE_INLINE FloatLanes dot_bf16(FloatLanes acc, BitLanes w, int32_t x2) {
  return (FloatLanes)vbfdotq_lane_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x4_t)first_of_two(x2), 0);
}
#endif

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
