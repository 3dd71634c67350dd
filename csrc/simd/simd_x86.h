// What vectors can do on x86: SSE2, AVX2 and AVX-512. simd_plain.h documents each of them.
#pragma once

#include <immintrin.h>

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
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
  }
#endif
  return plain::load_as<V>(p);
}
template <typename V>
FORCE_INLINE V load_as(const int8_t* p) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
#endif
  return plain::load_as<V>(p);
}

FORCE_INLINE FloatLanes load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (FloatLanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return plain::load_halves(p);
#endif
}

FORCE_INLINE IntLanes load_shorts(const uint16_t* p) {
#if defined(__AVX512F__)
  return (IntLanes)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (IntLanes)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return plain::load_shorts(p);
#endif
}

#if defined(__AVX512F__)
FORCE_INLINE IntLanes byte_of_shorts(const uint16_t* p, int half) {
  return half == 0 ? load_shorts(p) & 255 : load_shorts(p) >> 8;
}
// From the needed byte on, so that it is the lower one: for the last number, the following byte is read, too.
FORCE_INLINE IntLanes raised_byte_of_shorts(const uint16_t* p, int half) {
  const uint8_t* const from = reinterpret_cast<const uint8_t*>(p) + half;
  const __m256i shorts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (IntLanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(shorts), 24);
}
#elif defined(__AVX2__)
// Where bytes of eight numbers go, each to byte `to` of its lane.
struct BytePlaces {
  alignas(32) int8_t from[32];
};
constexpr BytePlaces byte_places(int half, int to) {
  BytePlaces places{};
  for (int i = 0; i < 32; ++i) places.from[i] = static_cast<int8_t>(i % 4 == to ? i / 4 * 2 + half : -1);
  return places;
}
constexpr BytePlaces kLowestPlaces[2] = {byte_places(0, 0), byte_places(1, 0)};
constexpr BytePlaces kHighestPlaces[2] = {byte_places(0, 3), byte_places(1, 3)};

FORCE_INLINE IntLanes take_bytes(const uint16_t* p, const BytePlaces& places) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (IntLanes)_mm256_shuffle_epi8(twice, _mm256_load_si256(reinterpret_cast<const __m256i*>(places.from)));
}
FORCE_INLINE IntLanes byte_of_shorts(const uint16_t* p, int half) { return take_bytes(p, kLowestPlaces[half]); }
FORCE_INLINE IntLanes raised_byte_of_shorts(const uint16_t* p, int half) { return take_bytes(p, kHighestPlaces[half]); }
#else
FORCE_INLINE IntLanes byte_of_shorts(const uint16_t* p, int half) { return plain::byte_of_shorts(p, half); }
FORCE_INLINE IntLanes raised_byte_of_shorts(const uint16_t* p, int half) {
  return plain::raised_byte_of_shorts(p, half);
}
#endif

FORCE_INLINE IntLanes to_nearest(FloatLanes x) {
#if defined(__AVX512F__)
  return (IntLanes)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (IntLanes)_mm256_cvtps_epi32((__m256)x);
#else
  return (IntLanes)_mm_cvtps_epi32((__m128)x);
#endif
}

FORCE_INLINE void store_bytes(int8_t* p, const IntLanes (&values)[kGroup / kLanes]) {
#if defined(__AVX512F__)
  for (int i = 0; i < 2; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i, _mm512_cvtepi32_epi8((__m512i)values[i]));
  }
#elif defined(__AVX2__)
  const __m256i low = _mm256_packs_epi32((__m256i)values[0], (__m256i)values[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)values[2], (__m256i)values[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing goes by halves of registers
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
#else
  for (int i = 0; i < 2; ++i) {
    const __m128i low = _mm_packs_epi32((__m128i)values[4 * i], (__m128i)values[4 * i + 1]);
    const __m128i high = _mm_packs_epi32((__m128i)values[4 * i + 2], (__m128i)values[4 * i + 3]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i, _mm_packs_epi16(low, high));
  }
#endif
}

FORCE_INLINE void to_doubles(FloatLanes v, DoubleLanes (&halves)[2]) {
#if defined(__AVX512F__)
  halves[0] = (DoubleLanes)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
  halves[1] = (DoubleLanes)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
  halves[0] = (DoubleLanes)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  halves[1] = (DoubleLanes)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
  halves[0] = (DoubleLanes)_mm_cvtps_pd((__m128)v);
  halves[1] = (DoubleLanes)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v));
#endif
}

// ---- across lanes ----

FORCE_INLINE int32_t max_lane(IntLanes v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__AVX2__)
  const __m256i eight = (__m256i)v;
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
  return plain::max_lane(v);
#endif
}

FORCE_INLINE int32_t sum_lanes(IntLanes v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  const __m256i eight = (__m256i)v;
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
  return plain::sum_lanes(v);
#endif
}

FORCE_INLINE uint32_t bits_at_least(FloatLanes v, FloatLanes bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)bound, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)bound, _CMP_GE_OQ)));
#else
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpge_ps((__m128)v, (__m128)bound)));
#endif
}

// ---- lane by lane ----

FORCE_INLINE FloatLanes larger(FloatLanes a, FloatLanes b) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (FloatLanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return (FloatLanes)_mm_max_ps((__m128)a, (__m128)b);
#endif
}

FORCE_INLINE BitLanes look_up(const uint8_t* table, BitLanes places) {
#if defined(__AVX512BW__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (BitLanes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)places);
#elif defined(__AVX2__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (BitLanes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)places);
#else
  return plain::look_up(table, places);
#endif
}

FORCE_INLINE BitLanes look_up_halves(const EightHalves& table, BitLanes places) {
#if defined(__AVX512BW__)
  return (BitLanes)_mm512_permutexvar_epi16((__m512i)places, _mm512_load_si512(table.halves));
#else
  return look_up(table.bytes, plain::places_of_bytes(places));
#endif
}

FORCE_INLINE FloatLanes rounded(FloatLanes product) {
  asm("" : "+v"(product));
  return product;
}

#if HAS_BF16_DOT
// acc += w * x over the two bfloat16 halves of each lane; x the same in every lane.
FORCE_INLINE FloatLanes dot_bf16(FloatLanes acc, BitLanes w, int32_t x2) {
  return (FloatLanes)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x2));
}
#endif

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
