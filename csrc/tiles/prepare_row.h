// Rows of activations as products take them (see `Activation` in formats.h): floats, bfloat16, or integers with a scale
// and a sum per group.
#pragma once

#include <cstdint>

#include "formats/convert.h"
#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// A group, as registers hold it.
constexpr int kGroupParts = kGroup / kLanes;

// The stored integers of a group: int16 in the order of unpacked weights for wide products.
FORCE_INLINE void store_group(int8_t* out, const IntLanes (&values)[kGroupParts]) { store_bytes(out, values); }
FORCE_INLINE void store_group(int16_t* out, const IntLanes (&values)[kGroupParts]) {
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  IntLanes order = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) order[i] = i / 4 * 4 + i % 2 * 2 + i / 2 % 2;
  for (int i = 0; i < kGroupParts; ++i) {
    *reinterpret_cast<Shorts*>(out + i * kLanes) = __builtin_convertvector(__builtin_shuffle(values[i], order), Shorts);
  }
}

// Symmetric integers per group of 32, with the sums described at `activation_bytes` (matrix.h): scale = max|x| / kMost,
// nearest, halves to even. An infinity or a NaN in a group makes its scale NaN, and so everything
// computed from the row. Below kTiny, where kMost / max|x| overflows, is zero.
template <typename T, int kMost>
void quantize_part(const float* x, const RowPart& part, void* out) {
  constexpr float kTiny = kMost > 127 ? 1e-33f : 1e-36f;
  const int64_t k = padded_cols(part.cols), groups = k / kGroup;
  float* const scales = reinterpret_cast<float*>(static_cast<T*>(out) + k);
  int32_t* const sums = reinterpret_cast<int32_t*>(scales + groups);
  int32_t* const first_sums = sums + groups;
  T* q = static_cast<T*>(out) + part.first;
  for (int64_t at = 0, g = part.first / kGroup; at < part.count; at += kGroup, ++g, q += kGroup) {
    FloatLanes values[kGroupParts];
    IntLanes largest_lanes = {};
#pragma GCC unroll 8
    for (int i = 0; i < kGroupParts; ++i) {
      values[i] = load_some(x + at + i * kLanes, part.count - at - i * kLanes);
      // Without their sign, floats are ordered as their bits are, infinity and NaN above all others.
      const IntLanes magnitudes = (IntLanes)values[i] & 0x7fffffff;
      largest_lanes = magnitudes > largest_lanes ? magnitudes : largest_lanes;
    }
    const int32_t largest_bits = max_lane(largest_lanes);
    const float largest = bit_cast<float>(largest_bits);
    if (!(largest >= kTiny && largest_bits < 0x7f800000)) {
      __builtin_memset(q, 0, kGroup * sizeof(T));
      scales[g] = largest_bits < 0x7f800000 ? 0.0f : __builtin_nanf("");
      sums[g] = 0;
      first_sums[g] = 0;
      continue;
    }
    const float inverse = static_cast<float>(kMost) / largest;
    IntLanes nearest[kGroupParts], halves[2] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kGroupParts; ++i) {
      nearest[i] = to_nearest(values[i] * inverse);
      halves[i / (kGroupParts / 2)] += nearest[i];
    }
    store_group(q, nearest);
    scales[g] = largest / static_cast<float>(kMost);
    first_sums[g] = sum_lanes(halves[0]);
    sums[g] = first_sums[g] + sum_lanes(halves[1]);
  }
}

void prepare_part(Activation kind, const float* x, const RowPart& part, void* out) {
  const int64_t filled = padded_cols(part.count);
  if (kind == Activation::kInt8) {
    quantize_part<int8_t, 127>(x, part, out);
  } else if (kind == Activation::kInt16) {
    quantize_part<int16_t, 32767>(x, part, out);
  } else if (kind == Activation::kBF16) {
    uint16_t* const values = static_cast<uint16_t*>(out) + part.first;
    for (int64_t i = 0; i < part.count; ++i) values[i] = float_to_bf16(x[i]);
    for (int64_t i = part.count; i < filled; ++i) values[i] = 0;
  } else {
    float* const values = static_cast<float*>(out) + part.first;
    for (int64_t i = 0; i < part.count; ++i) values[i] = x[i];
    for (int64_t i = part.count; i < filled; ++i) values[i] = 0;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
