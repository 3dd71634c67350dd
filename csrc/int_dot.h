// Products of small integers, added up within each lane: what tiles of integer weights are made of.
#pragma once

#include <cstdint>

#include "isa_unit.h"
#include "simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// acc += w * x over the 4 bytes of each lane; w unsigned, x signed and the same in every lane. Exact.
//
//   lane        |        0        |        1        | ..
//   w           | w0  w1  w2  w3  | w0' w1' w2' w3' |       four neighbouring k of one output
//   x4          | x0  x1  x2  x3  | x0  x1  x2  x3  |       the same four k of one row
//   acc +=      w0 x0 + .. + w3 x3        likewise
FORCE_INLINE IntLanes dot_unsigned(IntLanes acc, BitLanes w, int32_t x4) {
#if MOEFLOW_UNIT >= MOEFLOW_AVX512_VNNI
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x4));
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x4));
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x4));
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  int8_t x[4];
  __builtin_memcpy(x, &x4, 4);
  const BitLanes byte = BitLanes{} + 255u;
  return acc + (IntLanes)(w & byte) * x[0] + (IntLanes)((w >> 8) & byte) * x[1] + (IntLanes)((w >> 16) & byte) * x[2] +
         (IntLanes)(w >> 24) * x[3];
#endif
}

// The same with signed w. VNNI has no such product: there w is offset by 128, which the caller undoes.
#if MOEFLOW_UNIT >= MOEFLOW_AVX512_VNNI
constexpr int32_t kInt8Offset = 128;
FORCE_INLINE IntLanes dot_int8(IntLanes acc, BitLanes w, int32_t x4) { return dot_unsigned(acc, w ^ 0x80808080u, x4); }
#else
constexpr int32_t kInt8Offset = 0;
FORCE_INLINE IntLanes dot_int8(IntLanes acc, BitLanes w, int32_t x4) {
#if defined(__AVX512BW__)
  const __m512i x = _mm512_set1_epi32(x4), ws = (__m512i)w;
  const __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(ws), _mm512_setzero_si512(), x);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(ws), signed_x);
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  const __m256i x = _mm256_set1_epi32(x4), ws = (__m256i)w;
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(ws), _mm256_sign_epi8(x, ws));
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  int8_t x[4];
  __builtin_memcpy(x, &x4, 4);
  const IntLanes s = (IntLanes)w;
  return acc + (s << 24 >> 24) * x[0] + (s << 16 >> 24) * x[1] + (s << 8 >> 24) * x[2] + (s >> 24) * x[3];
#endif
}
#endif

// acc += w * x over the two 16-bit halves of each lane, both signed; x the same in every lane. Exact.
FORCE_INLINE IntLanes dot_pairs(IntLanes acc, BitLanes w, int32_t x2) {
#if MOEFLOW_UNIT >= MOEFLOW_AVX512_VNNI
  return (IntLanes)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x2));
#elif defined(__AVX512BW__)
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x2)));
#elif defined(__AVX2__)
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x2)));
#elif defined(__SSE2__)
  return (IntLanes)_mm_add_epi32((__m128i)acc, _mm_madd_epi16((__m128i)w, _mm_set1_epi32(x2)));
#else
  const IntLanes s = (IntLanes)w;
  return acc + (s << 16 >> 16) * static_cast<int16_t>(x2 & 0xffff) + (s >> 16) * (x2 >> 16);
#endif
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
