// Products of small integers (int_dot.h) on x86.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/int_dot_plain.h"
#include "simd/isa_unit.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

#if MOEFLOW_UNIT == MOEFLOW_AVX2_VNNI
// The same instructions of 256 bits exist in AVX-VNNI and in AVX-512. The latter tests this unit on processors without
// the former.
#if defined(MOEFLOW_AVX512_FOR_AVX2_VNNI)
FORCE_INLINE __m256i dot_bytes_256(__m256i acc, __m256i w, __m256i x) {
  asm("%{evex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}
FORCE_INLINE __m256i dot_pairs_256(__m256i acc, __m256i w, __m256i x) {
  asm("%{evex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}
#else
FORCE_INLINE __m256i dot_bytes_256(__m256i acc, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
FORCE_INLINE __m256i dot_pairs_256(__m256i acc, __m256i w, __m256i x) { return _mm256_dpwssd_avx_epi32(acc, w, x); }
#endif
#endif

FORCE_INLINE IntLanes dot_unsigned(IntLanes acc, BitLanes w, int32_t x4) {
#if MOEFLOW_UNIT >= MOEFLOW_AVX512_VNNI
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x4));
#elif MOEFLOW_UNIT == MOEFLOW_AVX2_VNNI
  return (IntLanes)dot_bytes_256((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x4));
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x4));
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x4));
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  return plain::dot_unsigned(acc, w, x4);
#endif
}

// VNNI has no such product: there w is offset by 128.
#if HAS_VNNI
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
  return plain::dot_int8(acc, w, x4);
#endif
}
#endif

FORCE_INLINE IntLanes dot_pairs(IntLanes acc, BitLanes w, int32_t x2) {
#if MOEFLOW_UNIT >= MOEFLOW_AVX512_VNNI
  return (IntLanes)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x2));
#elif MOEFLOW_UNIT == MOEFLOW_AVX2_VNNI
  return (IntLanes)dot_pairs_256((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x2));
#elif defined(__AVX512BW__)
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x2)));
#elif defined(__AVX2__)
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x2)));
#else
  return (IntLanes)_mm_add_epi32((__m128i)acc, _mm_madd_epi16((__m128i)w, _mm_set1_epi32(x2)));
#endif
}

#if HAS_PAIRED_PRODUCTS
// The sign goes to w: the magnitude of x is made once for all w that it meets, not that of w for each x.
FORCE_INLINE IntLanes dot_int8_without_least(IntLanes acc, BitLanes w, int32_t x4) {
#if MOEFLOW_UNIT == MOEFLOW_AVX512
  const __m512i x = _mm512_set1_epi32(x4), ws = (__m512i)w;
  const __m512i signed_w = _mm512_mask_sub_epi8(ws, _mm512_movepi8_mask(x), _mm512_setzero_si512(), ws);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(x), signed_w);
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
  const __m256i x = _mm256_set1_epi32(x4);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8((__m256i)w, x));
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// Additions to a sum, each one instruction for certain: where one is only pinned (integer_sums.h), GCC makes it in
// another register and moves it.
FORCE_INLINE void add_to(IntLanes& sum, IntLanes more) { asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(more)); }
FORCE_INLINE void add_halves_to(BitLanes& sum, BitLanes more) { asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(more)); }

// Products of four bytes, unsigned and signed, as two sums of 16 bits a lane; and sums of these.
#if MOEFLOW_UNIT == MOEFLOW_AVX512
FORCE_INLINE BitLanes paired_products(BitLanes w, int32_t x4) {
  return (BitLanes)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x4));
}
FORCE_INLINE IntLanes sum_of_halves(BitLanes pairs) {
  return (IntLanes)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
}
#else
FORCE_INLINE BitLanes paired_products(BitLanes w, int32_t x4) {
  return (BitLanes)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x4));
}
FORCE_INLINE IntLanes sum_of_halves(BitLanes pairs) {
  return (IntLanes)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}
#endif

// -offset times the sums of kGroup values, in halves as `paired_products` has them: of all, or of both halves.
template <int kSteps>
FORCE_INLINE void sums_of_offsets(const int8_t* values, int offset, int32_t (&sums)[kSteps]) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  const __m256i quads = _mm256_maddubs_epi16(_mm256_set1_epi8(static_cast<char>(offset)), x);
  const __m256i twos = _mm256_add_epi16(quads, _mm256_shuffle_epi32(quads, 0x4e));
  const __m256i fours = _mm256_add_epi16(twos, _mm256_shuffle_epi32(twos, 0xb1));
  const __m256i steps = _mm256_sub_epi16(_mm256_setzero_si256(), fours);
  const __m128i first = _mm256_castsi256_si128(steps), second = _mm256_extracti128_si256(steps, 1);
  if constexpr (kSteps == 1) {
    sums[0] = _mm_cvtsi128_si32(_mm_add_epi16(first, second));
  } else {
    sums[0] = _mm_cvtsi128_si32(first);
    sums[1] = _mm_cvtsi128_si32(second);
  }
}
#endif

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
