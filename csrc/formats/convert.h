// One number at a time between float, bfloat16, half precision (fp16) and integers: the same bits in every unit.
// Without branches where loops over many numbers use it, so that compilers vectorise them.
//
// Included by the instruction sets' units, so its functions are static: as shared symbols, the linker might choose
// a copy with instructions that the processor lacks.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace moeflow {

template <typename To, typename From>
static inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

static inline float bf16_to_float(uint16_t x) { return bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Nearest, halves to even; NaN stays NaN.
static inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 64 : rounded);
}

// Halves, each in 32 bits, as floats: one, or a vector of them. No intermediate float is subnormal, so that subnormal
// halves are exact even if the processor flushes subnormal floats to zero.
template <typename Floats, typename Ints>
static inline Floats halves_to_floats(Ints halves) {
  const Ints magnitude = (halves & 0x7fff) << 13;
  const Ints subnormal = bit_cast<Ints>(bit_cast<Floats>(magnitude + (113 << 23)) - 0x1p-14f);
  const Ints finite = magnitude < 0x00800000 ? subnormal : magnitude + (112 << 23);
  const Ints bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite;  // infinity, or NaN
  return bit_cast<Floats>(bits | (halves & 0x8000) << 16);
}

static inline float half_to_float(uint16_t half) { return halves_to_floats<float>(static_cast<int32_t>(half)); }

// Nearest, halves to even; NaN becomes infinity.
static inline uint16_t float_to_half(float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float magnitude = __builtin_fabsf(x);
  if (!(magnitude < 65520.0f)) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(__builtin_nearbyintf(magnitude * 0x1p24f));
  bits &= 0x7fffffff;
  bits += 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((bits - (112u << 23)) >> 13);
}

// Half of 2^(exponent - 127), the scale of OCP's microscaling formats (E8M0) for values that are stored doubled: one
// exponent, or a vector of them.
template <typename Floats, typename Ints>
static inline Floats half_exponents_to_floats(Ints exponents) {
  const Ints subnormal = (exponents + 1) << 21, normal = (exponents - 1) * (1 << 23);  // 0 and 1: subnormal floats
  return bit_cast<Floats>(exponents < 2 ? subnormal : normal);
}

static inline float half_exponent_to_float(uint8_t exponent) {
  return half_exponents_to_floats<float>(static_cast<int32_t>(exponent));
}

// OCP's 8-bit float e4m3: 2^(e - 7) * 1.m; no infinity, one NaN.
static inline float e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7f, sign = static_cast<uint32_t>(bits >> 7) << 31;
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t finite = magnitude < 8 ? bit_cast<uint32_t>(subnormal) : normal;
  return bit_cast<float>((magnitude == 0x7f ? 0x7fc00000u : finite) | sign);
}

// Half of an e4m3 number that has no sign, for values that are stored doubled: one, or a vector of them. No float on the
// way is subnormal.
template <typename Floats, typename Ints>
static inline Floats half_e4m3_to_floats(Ints codes) {
  const Ints bits = codes << 20;
  const Ints subnormal = bit_cast<Ints>(bit_cast<Floats>(bits + (120 << 23)) - 0x1p-7f);
  return bit_cast<Floats>(codes < 8 ? subnormal : bits + (119 << 23));
}

// A group's scale in NVFP4, halved: its e4m3 number times the tensor's factor, or by the tensor's divisor, which has a
// minus to tell. Each is how files' makers compute it, and rounded once.
template <typename Floats, typename Ints>
static inline Floats half_nvfp4_scale(Ints code, Floats factor) {
  const Floats scale = half_e4m3_to_floats<Floats>(code);
  return factor < 0.0f ? scale / -factor : scale * factor;
}

// To the nearest integer, halves to even. One operation, where adding a half could be fused with a product before it.
static inline int32_t to_nearest(float x) {
#if defined(__x86_64__)
  return _mm_cvtss_si32(_mm_set_ss(x));
#else
  return static_cast<int32_t>(__builtin_rintf(x));
#endif
}

}  // namespace moeflow
