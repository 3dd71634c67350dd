// Rows of activations as products take them (see `Activation` in formats.h): floats, bfloat16, or integers with a scale
// and a sum per group.
#pragma once

#include <cstdint>

#include "convert.h"
#include "isa_unit.h"
#include "matrix.h"
#include "simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// The integers of a group as they are stored: int16 in the order in which `WidePairs` takes weights apart.
FORCE_INLINE void store_group(int8_t* out, IVec low, IVec high) {
  typedef int8_t Bytes __attribute__((vector_size(kBand)));
  const Bytes bytes[2] = {__builtin_convertvector(low, Bytes), __builtin_convertvector(high, Bytes)};
  __builtin_memcpy(out, bytes, kGroup);
}
FORCE_INLINE void store_group(int16_t* out, IVec low, IVec high) {
  typedef int16_t Shorts __attribute__((vector_size(kBand * 2)));
  const Shorts shorts[2] = {__builtin_convertvector(low, Shorts), __builtin_convertvector(high, Shorts)};
  __builtin_memcpy(out, shorts, kGroup * sizeof(int16_t));
  for (int i = 1; i < kGroup; i += 4) {
    const int16_t second = out[i];
    out[i] = out[i + 1];
    out[i + 1] = second;
  }
}

// Symmetric integers per group of 32, with the sums that `activation_bytes` (matrix.h) tells of: scale = max|x| / kMost, nearest, halves to even. An infinity or a NaN in a group
// makes its scale NaN, and so everything computed from the row. Below kTiny, where kMost / max|x| overflows, is zero.
template <typename T, int kMost>
void quantize_row(const float* x, int64_t cols, void* out) {
  constexpr float kTiny = kMost > 127 ? 1e-33f : 1e-36f;
  const int64_t k = padded_cols(cols), groups = k / kGroup;
  T* q = static_cast<T*>(out);
  float* scales = reinterpret_cast<float*>(q + k);
  int32_t* sums = reinterpret_cast<int32_t*>(scales + groups);
  int32_t* first_sums = sums + groups;
  for (int64_t g = 0; g < groups; ++g, q += kGroup) {
    Vec values[2] = {};
    const int64_t left = cols - g * kGroup;
    __builtin_memcpy(values, x + g * kGroup, (left < kGroup ? left : kGroup) * sizeof(float));
    // Without their sign, floats are ordered as their bits are, infinity and NaN above all others.
    const IVec magnitudes[2] = {(IVec)values[0] & 0x7fffffff, (IVec)values[1] & 0x7fffffff};
    const IVec larger = magnitudes[0] > magnitudes[1] ? magnitudes[0] : magnitudes[1];
    const int32_t largest_bits = max_lane(larger);
    const float largest = bit_cast<float>(largest_bits);
    if (!(largest >= kTiny && largest_bits < 0x7f800000)) {
      __builtin_memset(q, 0, kGroup * sizeof(T));
      scales[g] = largest_bits < 0x7f800000 ? 0.0f : __builtin_nanf("");
      sums[g] = 0;
      first_sums[g] = 0;
      continue;
    }
    const float inverse = static_cast<float>(kMost) / largest;
    const IVec low = to_nearest(values[0] * inverse), high = to_nearest(values[1] * inverse);
    store_group(q, low, high);
    scales[g] = largest / static_cast<float>(kMost);
    first_sums[g] = sum_lanes(low);
    sums[g] = first_sums[g] + sum_lanes(high);
  }
}

void prepare_row(Activation kind, const float* x, int64_t cols, void* out) {
  const int64_t k = padded_cols(cols);
  if (kind == Activation::kInt8) {
    quantize_row<int8_t, 127>(x, cols, out);
  } else if (kind == Activation::kInt16) {
    quantize_row<int16_t, 32767>(x, cols, out);
  } else if (kind == Activation::kBF16) {
    uint16_t* values = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < cols; ++i) values[i] = float_to_bf16(x[i]);
    for (int64_t i = cols; i < k; ++i) values[i] = 0;
  } else {
    float* values = static_cast<float*>(out);
    for (int64_t i = 0; i < cols; ++i) values[i] = x[i];
    for (int64_t i = cols; i < k; ++i) values[i] = 0;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
