// Formats of weights that Hugging Face's quantized checkpoints have: integers with a scale and a zero point for 128, 64 or
// 32 neighbours, as AWQ, GPTQ and compressed-tensors store them, NVFP4, and float8. Included by formats.h, whose list has
// them.
//
// A group is 128 values, of NVFP4 256. Integers are blocks (block_formats.h), one, two or four a group: codes unsigned, of each output
// scales (16 bits, fp16 or bfloat16), then zero points, whose largest bit says that the scale is bfloat16:
//
//   int4-g128, int8-g128     s, z                    of 16 bits each
//   int4-g64                 s0, s1, z0 z1           zero points of a byte, two to a number
//   int4-g32                 s0, s1, s2, s3, z0 z1, z2 z3
//
// A value is (code - z) * s. Products take z * (sum of activations) off the integer sum, so nothing is rounded on the way.
//
//   nvfp4                    f in float32, two numbers, then e4m3 numbers of 16 values each, two to a number
//
// Its scales are made of f and e4m3 numbers where they are needed (`half_nvfp4_scale`): kept made, they would take 6 bits a
// weight. Rows have an f of their own, so matrices with several may stand one below the other.
//
//   fp8                      s in float32, two numbers; a word has four e4m3 numbers: [ w2 | w0 | w3 | w1 ]
//
// so that those in the odd bytes are neighbours, and after a shift by a byte those in the even ones.
#pragma once

#include <cstdint>

#include "formats/block_formats.h"
#include "formats/convert.h"
#include "formats/format_kinds.h"
#include "formats/group_source_types.h"

namespace moeflow {
namespace {

// ---- integers ----

template <typename Self, typename Block, int kBits>
struct IntegerGroupFormat : BlockFormat<Self, Block, kBits, 0, 128 / Block::kGroup> {
  using Base = BlockFormat<Self, Block, kBits, 0, 128 / Block::kGroup>;
  static constexpr int kScales = 128 / Block::kGroup;
  static constexpr bool kHasZeroBytes = kScales > 1;
  static constexpr int kNumbers = kScales + (kHasZeroBytes ? kScales / 2 : 1);
  static constexpr int32_t kIsBF16 = kHasZeroBytes ? 0x80 : Block::kIsBF16;
  static_assert(kBits == 4 || !kHasZeroBytes, "zero points of eight bits leave no room for the mark");

  static void keep_numbers(const uint8_t* blocks, uint16_t* numbers) {
    const auto block = [=](int i) { return blocks + i * Block::kBytes; };
    for (int i = 0; i < kScales; ++i) numbers[i] = Block::scale_bits(block(i));
    if constexpr (kHasZeroBytes) {
      for (int i = 0; i < kScales; i += 2) {
        numbers[kScales + i / 2] = Base::two_bytes(zero_byte(block(i)), zero_byte(block(i + 1)));
      }
    } else {
      numbers[1] = Block::marked_zero(blocks);
    }
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int stretch, int) {
    const int i = place(stretch);
    return (marked_zero(numbers, i) & kIsBF16) != 0 ? numbers.bf16(i) : numbers.half(i);
  }
  template <typename Numbers>
  static auto offset(const Numbers& numbers, int stretch) {
    return marked_zero(numbers, place(stretch)) & (kIsBF16 - 1);
  }

 private:
  static int place(int stretch) { return stretch * kScales / Base::kStretches; }

  static int zero_byte(const uint8_t* block) {
    const int marked = Block::marked_zero(block);
    return (marked & 127) | (marked & Block::kIsBF16) >> 8;
  }
  template <typename Numbers>
  static auto marked_zero(const Numbers& numbers, int i) {
    if constexpr (kHasZeroBytes) {
      return Base::byte(numbers, kScales, i);
    } else {
      return numbers.bits(1);
    }
  }
};

struct INT4_G128 : IntegerGroupFormat<INT4_G128, source::INT4_G128, 4> {
  static constexpr const char* kName = "int4-g128";
};
struct INT4_G64 : IntegerGroupFormat<INT4_G64, source::INT4_G64, 4> {
  static constexpr const char* kName = "int4-g64";
};
struct INT4_G32 : IntegerGroupFormat<INT4_G32, source::INT4_G32, 4> {
  static constexpr const char* kName = "int4-g32";
};
struct INT8_G128 : IntegerGroupFormat<INT8_G128, source::INT8_G128, 8> {
  static constexpr const char* kName = "int8-g128";
};

struct NVFP4 : BlockFormat<NVFP4, source::NVFP4, 4, 0, 8> {
  static constexpr const char* kName = "nvfp4";
  static constexpr int kNumbers = 2 + kGroup / kSub / 2;
  static constexpr int32_t kOffset = kE2M1Offset;
  static constexpr const uint8_t* kTable = kRaisedE2M1.values;
  static constexpr int kMost = largest(kRaisedE2M1);

  static void keep_numbers(const uint8_t* blocks, uint16_t* numbers) {
    __builtin_memcpy(numbers, blocks, 2 * sizeof(uint16_t));
    for (int i = 0; i < kStretches; ++i) {
      __builtin_memcpy(numbers + 2 + i, blocks + i * Source::kBytes + Source::kSmall, sizeof(uint16_t));
    }
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int stretch, int half) {
    const auto factor = numbers.to_bits_of_floats(numbers.bits(0) | numbers.bits(1) << 16);
    return numbers.half_nvfp4(byte(numbers, 2, 2 * stretch + half), factor);
  }
};

// ---- float8 ----

struct FP8 {
  using Source = source::F8_E4M3;
  static constexpr const char* kName = "fp8";
  static constexpr int kGroup = Source::kGroup, kNumbers = 2, kWords = kGroup / 4;
  static constexpr TileKind kTile = TileKind::kFloat8;
  static constexpr Activation activation(bool) { return Activation::kBF16; }

  static void keep(const uint8_t* block, uint16_t* numbers, uint32_t* words) {
    __builtin_memcpy(numbers, block, kNumbers * sizeof(uint16_t));
    for (int i = 0; i < kWords; ++i) {
      const uint8_t* const w = block + Source::kHead + i * 4;
      const uint8_t bytes[4] = {w[2], w[0], w[3], w[1]};
      __builtin_memcpy(words + i, bytes, sizeof(bytes));
    }
  }
  static void read(const uint16_t* numbers, const uint32_t* words, float* w) {
    float scale;
    __builtin_memcpy(&scale, numbers, sizeof(scale));
    for (int i = 0; i < kWords; ++i, w += 4) {
      uint8_t bytes[4];
      __builtin_memcpy(bytes, words + i, sizeof(bytes));
      const uint8_t in_order[4] = {bytes[1], bytes[3], bytes[0], bytes[2]};
      for (int j = 0; j < 4; ++j) w[j] = e4m3_to_float(in_order[j]) * scale;
    }
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers) {
    return numbers.to_bits_of_floats(numbers.bits(0) | numbers.bits(1) << 16);
  }
};

}  // namespace
}  // namespace moeflow
