// Vectors and what can be done with them, written once with GCC's vector extensions and compiled once per instruction
// set; where the compiler does not find the right instruction by itself, it is named here.
//
// Two widths. A `Vec` has 16 lanes, a whole band, everywhere: several registers where those are narrower. `FloatLanes`
// and its like are as wide as a register, and kParts of them make a band:
//
//   a band   |  0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15 |
//   AVX-512  |                       part 0                          |   kLanes 16, kParts 1
//   AVX2     |          part 0           |          part 1           |   kLanes  8, kParts 2
//   else     |   part 0    |   part 1    |   part 2    |   part 3    |   kLanes  4, kParts 4
//
// What is kept over a loop is made of parts: wider vectors GCC keeps in memory and copies word by word.
#pragma once

#include <cstdint>

#include "convert.h"
#include "isa_unit.h"
#include "matrix.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define MOEFLOW_LANES 16
#elif defined(__AVX2__)
#define MOEFLOW_LANES 8
#else
#define MOEFLOW_LANES 4
#endif

#define FORCE_INLINE_MEMBER __attribute__((always_inline))
#define FORCE_INLINE static inline FORCE_INLINE_MEMBER

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));

constexpr int kLanes = MOEFLOW_LANES, kParts = kBand / kLanes;
typedef float FloatLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef int32_t IntLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef uint32_t BitLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef double DoubleLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));  // half of the lanes

// What memory is read and written through: it holds other types than what is made of it here.
typedef Vec VecInMemory __attribute__((may_alias));
typedef Vec UnalignedVec __attribute__((aligned(4), may_alias));
typedef FloatLanes FloatLanesInMemory __attribute__((may_alias));
typedef FloatLanes UnalignedLanes __attribute__((aligned(4), may_alias));
typedef BitLanes BitLanesInMemory __attribute__((may_alias));
typedef int32_t Int32InMemory __attribute__((may_alias));

// ---- load, store, fill ----

FORCE_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }
FORCE_INLINE Vec splat(float x) { return x - Vec{}; }
FORCE_INLINE FloatLanes splat_lanes(float x) { return x - FloatLanes{}; }
FORCE_INLINE FloatLanes load_lanes(const void* p) { return *static_cast<const FloatLanesInMemory*>(p); }
FORCE_INLINE BitLanes load_bits(const void* p) { return *static_cast<const BitLanesInMemory*>(p); }
FORCE_INLINE FloatLanes load_unaligned(const float* p) { return *reinterpret_cast<const UnalignedLanes*>(p); }
FORCE_INLINE void store_unaligned(float* p, FloatLanes v) { *reinterpret_cast<UnalignedLanes*>(p) = v; }

// Up to 16 neighbouring floats, filled up with zeros.
FORCE_INLINE Vec load_some(const float* p, int64_t count) {
  if (count >= kBand) return *reinterpret_cast<const UnalignedVec*>(p);
  Vec v = {};
  __builtin_memcpy(&v, p, count * sizeof(float));
  return v;
}

FORCE_INLINE void store_some(float* p, Vec v, int64_t count) {
  if (count >= kBand) {
    *reinterpret_cast<UnalignedVec*>(p) = v;
  } else {
    __builtin_memcpy(p, &v, count * sizeof(float));
  }
}

// Has bytes from begin to end on their way to the second cache, from the address `from` on.
FORCE_INLINE void prefetch(const uint8_t* from, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// ---- to and from other types ----

// kCount neighbouring numbers as memory holds them, at any address, and what becomes of them on the way.
template <int kCount>
struct Narrow {
  typedef uint16_t Halves __attribute__((vector_size(kCount * 2), aligned(2), may_alias));
  typedef int8_t Bytes __attribute__((vector_size(kCount), aligned(1), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(kCount * 4)));
  typedef int32_t Ints __attribute__((vector_size(kCount * 4)));
  typedef float Floats __attribute__((vector_size(kCount * 4), aligned(4), may_alias));
};

// Load as many neighbouring numbers as a V has lanes, as floats: from floats, bfloat16 or int8.
template <typename V>
FORCE_INLINE V load_as(const float* p) {
  return *reinterpret_cast<const typename Narrow<sizeof(V) / 4>::Floats*>(p);
}
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
  using Types = Narrow<sizeof(V) / 4>;
  const typename Types::Halves halves = *reinterpret_cast<const typename Types::Halves*>(p);
  return (V)(__builtin_convertvector(halves, typename Types::Bits) << 16);
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
  using Types = Narrow<sizeof(V) / 4>;
  const typename Types::Bytes bytes = *reinterpret_cast<const typename Types::Bytes*>(p);
  return __builtin_convertvector(__builtin_convertvector(bytes, typename Types::Ints), V);
}

template <typename V>
FORCE_INLINE void store_as_floats(float* p, V value) {
  *reinterpret_cast<typename Narrow<sizeof(V) / 4>::Floats*>(p) = value;
}

// Numbers in half precision as floats.
FORCE_INLINE FloatLanes load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (FloatLanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const auto halves = *reinterpret_cast<const Narrow<kLanes>::Halves*>(p);
  return halves_to_floats<FloatLanes>(__builtin_convertvector(halves, IntLanes));
#endif
}

// Numbers of 16 bits as integers.
FORCE_INLINE IntLanes load_shorts(const uint16_t* p) {
#if defined(__AVX512F__)
  return (IntLanes)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (IntLanes)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const Narrow<kLanes>::Halves*>(p), IntLanes);
#endif
}

// To the nearest integer, halves to even. Asked for as one operation, because an addition in floats could be fused
// with the multiplication before it and so round differently in one instruction set than in another.
FORCE_INLINE IVec to_nearest(Vec x) {
#if defined(__AVX512F__)
  return (IVec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  __m256 parts[2];
  __m256i rounded[2];
  __builtin_memcpy(parts, &x, 64);
  for (int i = 0; i < 2; ++i) rounded[i] = _mm256_cvtps_epi32(parts[i]);
#elif defined(__SSE2__)
  __m128 parts[4];
  __m128i rounded[4];
  __builtin_memcpy(parts, &x, 64);
  for (int i = 0; i < 4; ++i) rounded[i] = _mm_cvtps_epi32(parts[i]);
#elif defined(__aarch64__)
  float32x4_t parts[4];
  int32x4_t rounded[4];
  __builtin_memcpy(parts, &x, 64);
  for (int i = 0; i < 4; ++i) rounded[i] = vcvtnq_s32_f32(parts[i]);
#else
  int32_t rounded[kBand];
  for (int i = 0; i < kBand; ++i) rounded[i] = moeflow::to_nearest(x[i]);
#endif
#if !defined(__AVX512F__)
  IVec result;
  __builtin_memcpy(&result, rounded, 64);
  return result;
#endif
}

// The lower and the upper half of the lanes.
FORCE_INLINE void to_doubles(FloatLanes v, DoubleLanes (&halves)[2]) {
#if defined(__AVX512F__)
  halves[0] = (DoubleLanes)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
  halves[1] = (DoubleLanes)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
  halves[0] = (DoubleLanes)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  halves[1] = (DoubleLanes)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#elif defined(__SSE2__)
  halves[0] = (DoubleLanes)_mm_cvtps_pd((__m128)v);
  halves[1] = (DoubleLanes)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v));
#else
  for (int i = 0; i < kLanes; ++i) halves[i / (kLanes / 2)][i % (kLanes / 2)] = v[i];
#endif
}

// ---- across lanes ----

FORCE_INLINE int32_t max_lane(IVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < kBand; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

FORCE_INLINE int32_t sum_lanes(IVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < kBand; ++i) sum += v[i];
  return sum;
#endif
}

// The upper half onto the lower one, again and again: the same order everywhere.
FORCE_INLINE float sum_lanes(Vec v) {
  for (int width = kBand / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  }
  return v[0];
}

// A bit for each lane that is at least `bound`; none for NaN.
FORCE_INLINE uint32_t bits_at_least(FloatLanes v, FloatLanes bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)bound, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)bound, _CMP_GE_OQ)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpge_ps((__m128)v, (__m128)bound)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(v[i] >= bound[i]) << i;
  return bits;
#endif
}

// ---- lane by lane ----

// Of each byte, a place in a table of 16, what is there.
FORCE_INLINE BitLanes look_up(const uint8_t* table, BitLanes places) {
#if defined(__AVX512BW__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (BitLanes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)places);
#elif defined(__AVX2__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (BitLanes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)places);
#elif defined(__aarch64__)
  return (BitLanes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
#else
  uint8_t bytes[sizeof(places)];
  __builtin_memcpy(bytes, &places, sizeof(places));
  for (uint8_t& byte : bytes) byte = table[byte];
  __builtin_memcpy(&places, bytes, sizeof(places));
  return places;
#endif
}

// Keeps compilers from fusing the product with an addition, so that all instruction sets round alike.
FORCE_INLINE FloatLanes rounded(FloatLanes product) {
#if defined(__x86_64__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

// exp by range reduction and a polynomial (Cephes' expf): about 2 units in the last place, the same in every lane.
template <typename V>
FORCE_INLINE V exp_vec(V x) {
  const V low = -87.3f - V{}, high = 88.3f - V{};
  x = x < low ? low : x;
  x = x > high ? high : x;
  const V scaled = x * 1.44269504f;
  const auto n = __builtin_convertvector(scaled + (scaled < 0.0f ? -0.5f - V{} : 0.5f - V{}), decltype(x < x));
  const V nf = __builtin_convertvector(n, V);
  const V r = (x - nf * 0.693359375f) - nf * -2.12194440e-4f;
  V p = 1.9875691500e-4f - V{};
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (V)((n + 127) << 23);
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
