// Vector operations, written once with GCC's vector extensions and compiled once per instruction set. simd_x86.h and
// simd_neon.h name instructions that the compiler does not find. simd_types.h defines the widths.
#pragma once

#include <cstdint>

#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd_plain.h"
#include "simd/simd_types.h"

#if defined(__x86_64__)
#include "simd/simd_x86.h"
#elif IS_NEON
#include "simd/simd_neon.h"
#endif

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

#if !defined(__x86_64__) && !IS_NEON
using namespace plain;
#endif

// ---- load, store, fill ----

FORCE_INLINE FloatLanes splat_lanes(float x) { return x - FloatLanes{}; }
FORCE_INLINE FloatLanes load_lanes(const void* p) { return *static_cast<const FloatLanesInMemory*>(p); }
FORCE_INLINE BitLanes load_bits(const void* p) { return *static_cast<const BitLanesInMemory*>(p); }
FORCE_INLINE void store_lanes(void* p, FloatLanes v) { *static_cast<FloatLanesInMemory*>(p) = v; }
FORCE_INLINE FloatLanes load_unaligned(const float* p) { return *reinterpret_cast<const UnalignedLanes*>(p); }
FORCE_INLINE void store_unaligned(float* p, FloatLanes v) { *reinterpret_cast<UnalignedLanes*>(p) = v; }

// The first `count` of kLanes neighbouring floats, if that many: the others are zero, and nothing is stored there.
FORCE_INLINE FloatLanes load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load_unaligned(p);
  FloatLanes v = {};
  if (count > 0) __builtin_memcpy(&v, p, count * sizeof(float));
  return v;
}

FORCE_INLINE void store_some(float* p, FloatLanes v, int64_t count) {
  if (count >= kLanes) {
    store_unaligned(p, v);
  } else if (count > 0) {
    __builtin_memcpy(p, &v, count * sizeof(float));
  }
}

// Has bytes from begin to end on their way to the second cache, from the address `from` on.
FORCE_INLINE void prefetch(const uint8_t* from, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// ---- to and from other types ----

// Load neighbouring numbers into all lanes of a V, as floats: from floats. Loads from bfloat16 or int8 depend on the
// architecture.
template <typename V>
FORCE_INLINE V load_as(const float* p) {
  return *reinterpret_cast<const typename Narrow<sizeof(V) / 4>::Floats*>(p);
}

template <typename V>
FORCE_INLINE void store_as_floats(float* p, V value) {
  *reinterpret_cast<typename Narrow<sizeof(V) / 4>::Floats*>(p) = value;
}

// Two halves in double.
FORCE_INLINE FloatLanes to_floats(const DoubleLanes (&halves)[2]) {
  typedef float HalfLanes __attribute__((vector_size(kLanes * 2)));
  const HalfLanes parts[2] = {__builtin_convertvector(halves[0], HalfLanes),
                              __builtin_convertvector(halves[1], HalfLanes)};
  FloatLanes floats;
  __builtin_memcpy(&floats, parts, sizeof(floats));
  return floats;
}

// ---- across lanes ----

// All lanes of a band: the upper half onto the lower one, again and again, the same order however wide registers are.
FORCE_INLINE float sum_band(const FloatLanes (&parts)[kParts]) {
  FloatLanes halves[kParts];
  __builtin_memcpy(halves, parts, sizeof(parts));
#pragma GCC unroll 2
  for (int count = kParts / 2; count > 0; count /= 2) {
#pragma GCC unroll 2
    for (int p = 0; p < count; ++p) halves[p] += halves[p + count];
  }
  float lanes[kLanes];
  __builtin_memcpy(lanes, halves, sizeof(lanes));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// All lanes by halves, the upper one with the lower one, again and again: every lane has the result.
template <int kWidth = kLanes / 2, typename Combine>
FORCE_INLINE FloatLanes fold_lanes(FloatLanes v, Combine combine) {
  IntLanes partners = {};
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) partners[lane] = lane ^ kWidth;
  v = combine(v, __builtin_shuffle(v, partners));
  if constexpr (kWidth > 1) v = fold_lanes<kWidth / 2>(v, combine);
  return v;
}

// Turn a square of numbers: lane j of vector i becomes lane i of vector j.
FORCE_INLINE void transpose(FloatLanes (&rows)[kLanes]) {
  IntLanes low = {}, high = {};  // the interleaved lower halves of two vectors, and the upper ones
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane / 2 + lane % 2 * kLanes;
    high[lane] = low[lane] + kLanes / 2;
  }
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    FloatLanes next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// ---- lane by lane ----

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

// 2^x for x up to zero, by a polynomial within half a power: about 1 unit in the last place, the same in every lane. It
// takes half the operations of exp_vec. What would lie below the normal numbers becomes the least of them.
FORCE_INLINE FloatLanes exp2_up_to_zero(FloatLanes x) {
  const FloatLanes to_integers = splat_lanes(0x1.8p23f + 127.0f);
  x = larger(splat_lanes(-126.0f), x);
  const FloatLanes shifted = x + to_integers;  // in its lowest bits the exponent of the nearest power of two
  const FloatLanes r = x - (shifted - to_integers);
  FloatLanes p = splat_lanes(1.535336196e-4f);
  p = p * r + 1.339887385e-3f;
  p = p * r + 9.618436918e-3f;
  p = p * r + 5.550332367e-2f;
  p = p * r + 2.402264774e-1f;
  p = p * r + 6.931471825e-1f;
  const FloatLanes power = (FloatLanes)((IntLanes)shifted << 23);
  return p * (r * power) + power;
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
