// Vectors: their types, how wide they are, and how functions on them are inlined.
//
// `FloatLanes` and its like are as wide as a register, and kParts of them make a band:
//
//   a band   |  0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15 |
//   AVX-512  |                       part 0                          |   kLanes 16, kParts 1
//   AVX2     |          part 0           |          part 1           |   kLanes  8, kParts 2
//   else     |   part 0    |   part 1    |   part 2    |   part 3    |   kLanes  4, kParts 4
//
// There are no wider ones: GCC keeps these in memory, copies them word by word, and compares them value by value.
#pragma once

#include <cstdint>

#include "simd/isa_unit.h"
#include "formats/matrix.h"

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

constexpr int kLanes = MOEFLOW_LANES, kParts = kBand / kLanes;
typedef float FloatLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef int32_t IntLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef uint32_t BitLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef uint16_t HalfBitLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));  // two a lane
typedef double DoubleLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));  // half of the lanes

// Types for reading and writing memory of other types.
typedef FloatLanes FloatLanesInMemory __attribute__((may_alias));
typedef FloatLanes UnalignedLanes __attribute__((aligned(4), may_alias));
typedef BitLanes BitLanesInMemory __attribute__((may_alias));
typedef int32_t Int32InMemory __attribute__((may_alias));

// A table of eight numbers of 16 bits: filled up to a register, and as their lower bytes, then their upper ones.
struct EightHalves {
  alignas(64) uint16_t halves[32];
  alignas(16) uint8_t bytes[16];
};

// kCount neighbouring numbers as memory holds them, at any address, and what becomes of them on the way.
template <int kCount>
struct Narrow {
  typedef uint16_t Halves __attribute__((vector_size(kCount * 2), aligned(2), may_alias));
  typedef int8_t Bytes __attribute__((vector_size(kCount), aligned(1), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(kCount * 4)));
  typedef int32_t Ints __attribute__((vector_size(kCount * 4)));
  typedef float Floats __attribute__((vector_size(kCount * 4), aligned(4), may_alias));
};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
