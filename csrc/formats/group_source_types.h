// Weights of quantized Hugging Face checkpoints: neighbours of a row that share a scale, with their numbers from other
// tensors (checkpoint/quantized/ assembles them). Included by source_types.h, whose list has them.
//
//   F8_E4M3      scale in float32 | 128 bytes, one a value
//   INT4_G..     scale, zero point, 16 bits each | 128, 64 or 32 codes, a byte each, also of four bits
//                a value is (code - zero point) * scale; the largest bit of the zero point marks a bfloat16 scale,
//                else the scale is fp16
//   NVFP4        factor in float32, the same in a whole row | two e4m3 numbers without a sign, of 16 values each | 16
//                bytes, each two codes, the first in its low half
//                scales are halves of e4m3 times the factor; a negative factor divides instead, by its absolute value
#pragma once

#include <cstdint>

#include "formats/block_source_types.h"
#include "formats/convert.h"

namespace moeflow {
namespace {
namespace source {

struct F8_E4M3 {
  static constexpr const char* kName = "F8_E4M3";
  static constexpr int kGroup = 128, kHead = 4, kBytes = kHead + kGroup;

  static void read(const uint8_t* row, int64_t k, int64_t count, float* w) {
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* const block = row + (k + i) / kGroup * kBytes;
      float scale;
      __builtin_memcpy(&scale, block, sizeof(scale));
      w[i] = e4m3_to_float(block[kHead + (k + i) % kGroup]) * scale;
    }
  }
};

// `kValues` neighbours with one scale and zero point.
template <typename Self, int kValues>
struct IntegerGroups : ScaledBlocks<Self> {
  static constexpr int kGroup = kValues, kSub = kStretch, kHead = 4, kBytes = kHead + kGroup;
  static constexpr bool kHasMin = false;
  static constexpr uint16_t kIsBF16 = 0x8000;

  static void codes(const uint8_t* block, int i, uint8_t* q) {
    __builtin_memcpy(q, block + kHead + i * kStretch, kStretch);
  }
  static uint16_t scale_bits(const uint8_t* block) { return number(block); }
  static uint16_t marked_zero(const uint8_t* block) { return number(block + 2); }  // with the bit for the scale
  static int zero(const uint8_t* block, int) { return marked_zero(block) & ~kIsBF16; }
  static float scale(const uint8_t* block, int) {
    return marked_zero(block) & kIsBF16 ? bf16_to_float(scale_bits(block)) : half_to_float(scale_bits(block));
  }

 private:
  static uint16_t number(const uint8_t* at) {
    uint16_t number;
    __builtin_memcpy(&number, at, sizeof(number));
    return number;
  }
};

struct INT4_G128 : IntegerGroups<INT4_G128, 128> {
  static constexpr const char* kName = "INT4_G128";
};
struct INT4_G64 : IntegerGroups<INT4_G64, 64> {
  static constexpr const char* kName = "INT4_G64";
};
struct INT4_G32 : IntegerGroups<INT4_G32, 32> {
  static constexpr const char* kName = "INT4_G32";
};
struct INT8_G128 : IntegerGroups<INT8_G128, 128> {
  static constexpr const char* kName = "INT8_G128";
};

struct NVFP4 : ScaledBlocks<NVFP4> {
  static constexpr const char* kName = "NVFP4";
  static constexpr int kGroup = 32, kSub = 16, kSmall = 4, kCodes = 6, kBytes = kCodes + kGroup / 2;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int, uint8_t* q) {
    for (int j = 0; j < kGroup / 2; ++j) {
      q[2 * j] = block[kCodes + j] & 15;
      q[2 * j + 1] = block[kCodes + j] >> 4;
    }
  }
  static int value(uint8_t code) { return kE2M1Values[code]; }
  static float scale(const uint8_t* block, int j) {
    float factor;
    __builtin_memcpy(&factor, block, sizeof(factor));
    return half_nvfp4_scale(static_cast<int32_t>(block[kSmall + j]), factor);
  }
};

}  // namespace source
}  // namespace
}  // namespace moeflow
