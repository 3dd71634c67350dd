// GGUF's blocks whose scales are not one fp16 number before signed integers: K-quants, five bits, and indexes into
// tables. Included by source_types.h, whose list has them.
//
// A value is scale * (what a code stands for) (+ minimum). Codes are unsigned: a value raised by kOffset, or a place in
// a table. Neighbouring `kSub` values share scale and minimum.
//
//   kHasMin                  whether there is a minimum
//   codes(block, i, q)       the codes of the i-th 32 values of a block
//   scale(block, j)          the scale of the j-th kSub values,
//   least(block, j)          and their minimum
//   value(code)              what a code stands for
//   zero(block, j)           what is taken off that, if anything, of the j-th kSub values
#pragma once

#include <cstdint>

#include "formats/convert.h"

namespace moeflow {
namespace {
namespace source {

constexpr int kStretch = 32;  // values whose codes are taken out at once

static inline float half_at(const uint8_t* at) {
  uint16_t half;
  __builtin_memcpy(&half, at, sizeof(half));
  return half_to_float(half);
}

template <typename Block, int kOffset = 0>
struct ScaledBlocks {
  static int value(uint8_t code) { return code - kOffset; }
  static float least(const uint8_t*, int) { return 0.0f; }  // of types without one
  static int zero(const uint8_t*, int) { return 0; }        // likewise

  static void read(const uint8_t* row, int64_t k, int64_t count, float* w) {
    for (int64_t first = 0; first < count; first += kStretch) {
      const uint8_t* const block = row + (k + first) / Block::kGroup * Block::kBytes;
      const int stretch = static_cast<int>((k + first) % Block::kGroup / kStretch);
      uint8_t q[kStretch];
      Block::codes(block, stretch, q);
      for (int begin = 0; begin < kStretch; begin += Block::kSub) {
        const int sub = (stretch * kStretch + begin) / Block::kSub;
        const float scale = Block::scale(block, sub), least = Block::least(block, sub);
        const int zero = Block::zero(block, sub);
        float* const out = w + first + begin;
        for (int i = 0; i < Block::kSub; ++i) out[i] = scale * static_cast<float>(Block::value(q[begin + i]) - zero);
        for (int i = 0; Block::kHasMin && i < Block::kSub; ++i) out[i] += least;
      }
    }
  }
};

// 16 bytes; byte j holds codes j and j + 16.
static inline void split_halves(const uint8_t* bytes, uint8_t* q) {
  for (int j = 0; j < 16; ++j) q[j] = bytes[j] & 15, q[j + 16] = bytes[j] >> 4;
}

// Fifth bits: bit j of 32 is that of code j.
static inline void raise_by_bits(const uint8_t* at, uint8_t* q) {
  uint32_t bits;
  __builtin_memcpy(&bits, at, sizeof(bits));
  for (int j = 0; j < kStretch; ++j) q[j] = static_cast<uint8_t>(q[j] | (bits >> j & 1) << 4);
}

struct Q5_0 : ScaledBlocks<Q5_0, 16> {
  static constexpr const char* kName = "Q5_0";
  static constexpr int kGroup = 32, kBytes = 22, kSub = 32;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int, uint8_t* q) {
    split_halves(block + 6, q);
    raise_by_bits(block + 2, q);
  }
  static float scale(const uint8_t* block, int) { return half_at(block); }
};

struct Q5_1 : ScaledBlocks<Q5_1> {
  static constexpr const char* kName = "Q5_1";
  static constexpr int kGroup = 32, kBytes = 24, kSub = 32;
  static constexpr bool kHasMin = true;

  static void codes(const uint8_t* block, int, uint8_t* q) {
    split_halves(block + 8, q);
    raise_by_bits(block + 4, q);
  }
  static float scale(const uint8_t* block, int) { return half_at(block); }
  static float least(const uint8_t* block, int) { return half_at(block + 2); }
};

// ---- K-quants: 256 values, one fp16 scale (and one of minima) for all, small ones for each 32 or 16 ----

// 12 bytes with 8 scales and 8 minima of six bits, as llama.cpp's `get_scale_min_k4` takes them apart.
static inline uint8_t packed_scale(const uint8_t* at, int i) {
  return static_cast<uint8_t>(i < 4 ? at[i] & 63 : (at[i + 4] & 15) | (at[i - 4] >> 6 << 4));
}
static inline uint8_t packed_min(const uint8_t* at, int i) {
  return static_cast<uint8_t>(i < 4 ? at[i + 4] & 63 : at[i + 4] >> 4 | (at[i] >> 6 << 4));
}

// d, dmin, 12 bytes of scales and minima. Types define where nibbles begin.
template <typename Block>
struct FourBitSuperblocks : ScaledBlocks<Block> {
  static constexpr int kGroup = 256, kSub = 32;
  static constexpr bool kHasMin = true;

  static uint8_t small_scale(const uint8_t* block, int j) { return packed_scale(block + 4, j); }
  static uint8_t small_min(const uint8_t* block, int j) { return packed_min(block + 4, j); }
  static float scale(const uint8_t* block, int j) { return half_at(block) * static_cast<float>(small_scale(block, j)); }
  static float least(const uint8_t* block, int j) {
    return -(half_at(block + 2) * static_cast<float>(small_min(block, j)));
  }

 protected:
  // 32 bytes have in their low halves one stretch, in their high halves the next.
  static void nibbles(const uint8_t* from, int i, uint8_t* q) {
    const uint8_t* const bytes = from + i / 2 * kStretch;
    const int shift = i % 2 * 4;
    for (int j = 0; j < kStretch; ++j) q[j] = bytes[j] >> shift & 15;
  }
};

struct Q4_K : FourBitSuperblocks<Q4_K> {
  static constexpr const char* kName = "Q4_K";
  static constexpr int kBytes = 144;

  static void codes(const uint8_t* block, int i, uint8_t* q) { nibbles(block + 16, i, q); }
};

struct Q5_K : FourBitSuperblocks<Q5_K> {
  static constexpr const char* kName = "Q5_K";
  static constexpr int kBytes = 176;

  static void codes(const uint8_t* block, int i, uint8_t* q) {
    nibbles(block + 48, i, q);
    for (int j = 0; j < kStretch; ++j) q[j] = static_cast<uint8_t>(q[j] | (block[16 + j] >> i & 1) << 4);
  }
};

// 64 bytes; each half holds four stretches, two bits of a byte each.
static inline void split_quarters(const uint8_t* from, int i, uint8_t* q) {
  const uint8_t* const bytes = from + i / 4 * kStretch;
  const int shift = i % 4 * 2;
  for (int j = 0; j < kStretch; ++j) q[j] = bytes[j] >> shift & 3;
}

struct Q2_K : ScaledBlocks<Q2_K> {
  static constexpr const char* kName = "Q2_K";
  static constexpr int kGroup = 256, kBytes = 84, kSub = 16, kHead = 80;  // where fp16 numbers are
  static constexpr bool kHasMin = true;

  static void codes(const uint8_t* block, int i, uint8_t* q) { split_quarters(block + 16, i, q); }
  static float scale(const uint8_t* block, int j) { return half_at(block + kHead) * static_cast<float>(block[j] & 15); }
  static float least(const uint8_t* block, int j) { return -(half_at(block + kHead + 2) * static_cast<float>(block[j] >> 4)); }
};

struct Q3_K : ScaledBlocks<Q3_K, 4> {
  static constexpr const char* kName = "Q3_K";
  static constexpr int kGroup = 256, kBytes = 110, kSub = 16, kHead = 108;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int i, uint8_t* q) {
    split_quarters(block + 32, i, q);
    for (int j = 0; j < kStretch; ++j) q[j] = static_cast<uint8_t>(q[j] | (block[j] >> i & 1) << 2);
  }
  static int8_t small_scale(const uint8_t* block, int j) {
    const uint8_t* const scales = block + 96;
    const int low = scales[j % 8] >> (j / 8 * 4) & 15, high = scales[8 + j % 4] >> (j / 4 * 2) & 3;
    return static_cast<int8_t>((low | high << 4) - 32);
  }
  static float scale(const uint8_t* block, int j) {
    return half_at(block + kHead) * static_cast<float>(small_scale(block, j));
  }
};

struct Q6_K : ScaledBlocks<Q6_K, 32> {
  static constexpr const char* kName = "Q6_K";
  static constexpr int kGroup = 256, kBytes = 210, kSub = 16, kHead = 208;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int i, uint8_t* q) {
    const uint8_t* const low = block + i / 4 * 64 + i % 2 * kStretch;
    const uint8_t* const high = block + 128 + i / 4 * kStretch;
    const int low_shift = i % 4 / 2 * 4, high_shift = i % 4 * 2;
    for (int j = 0; j < kStretch; ++j) {
      q[j] = static_cast<uint8_t>((low[j] >> low_shift & 15) | (high[j] >> high_shift & 3) << 4);
    }
  }
  static int8_t small_scale(const uint8_t* block, int j) { return static_cast<int8_t>(block[192 + j]); }
  static float scale(const uint8_t* block, int j) {
    return half_at(block + kHead) * static_cast<float>(small_scale(block, j));
  }
};

// ---- indexes into tables ----

constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2M1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

struct IQ4_NL : ScaledBlocks<IQ4_NL> {
  static constexpr const char* kName = "IQ4_NL";
  static constexpr int kGroup = 32, kBytes = 18, kSub = 32;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int, uint8_t* q) { split_halves(block + 2, q); }
  static int value(uint8_t code) { return kIQ4Values[code]; }
  static float scale(const uint8_t* block, int) { return half_at(block); }
};

struct IQ4_XS : ScaledBlocks<IQ4_XS> {
  static constexpr const char* kName = "IQ4_XS";
  static constexpr int kGroup = 256, kBytes = 136, kSub = 32, kHead = 0;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int i, uint8_t* q) { split_halves(block + 8 + i * 16, q); }
  static int value(uint8_t code) { return kIQ4Values[code]; }
  static int8_t small_scale(const uint8_t* block, int j) {
    const int high = block[2 + j / 4] >> (j % 4 * 2) & 3, low = block[4 + j / 2] >> (j % 2 * 4) & 15;
    return static_cast<int8_t>((low | high << 4) - 32);
  }
  static float scale(const uint8_t* block, int j) {
    return half_at(block + kHead) * static_cast<float>(small_scale(block, j));
  }
};

// What GGUF's grids (IQ1, IQ2, IQ3) come down to: few levels, each with a sign, times a scale of `kSubValues` values.
// Made where files are read (moeflow/checkpoint/gguf/grids.py): an fp16 number, small scales, codes with the sign as
// fourth bit. `kUnit` is the step of scales, as a part of a level.
template <typename Block, int kSubValues>
struct LevelBlocks : ScaledBlocks<Block> {
  static constexpr int kGroup = 256, kSub = kSubValues, kHead = 0;
  static constexpr int kCodes = 2 + kGroup / kSub, kBytes = kCodes + kGroup / 2;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int i, uint8_t* q) { split_halves(block + kCodes + i * 16, q); }
  static int value(uint8_t code) { return Block::kLevels[code]; }
  static int8_t small_scale(const uint8_t* block, int j) { return static_cast<int8_t>(block[2 + j]); }
  static float scale(const uint8_t* block, int j) {
    return half_at(block + kHead) * static_cast<float>(small_scale(block, j)) * Block::kUnit;
  }
};

struct LEVELS_IQ2 : LevelBlocks<LEVELS_IQ2, 16> {
  static constexpr const char* kName = "LEVELS_IQ2";
  static constexpr float kUnit = 0.125f;
  static constexpr int8_t kLevels[16] = {8, 25, 43, 1, 7, 9, 0, 0, -8, -25, -43, -1, -7, -9, 0, 0};
};

struct LEVELS_IQ3_XXS : LevelBlocks<LEVELS_IQ3_XXS, 32> {
  static constexpr const char* kName = "LEVELS_IQ3_XXS";
  static constexpr float kUnit = 0.5f;
  static constexpr int8_t kLevels[16] = {2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31};
};

struct LEVELS_IQ3_S : LevelBlocks<LEVELS_IQ3_S, 32> {
  static constexpr const char* kName = "LEVELS_IQ3_S";
  static constexpr float kUnit = 1.0f;
  static constexpr int8_t kLevels[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
};

struct MXFP4 : ScaledBlocks<MXFP4> {
  static constexpr const char* kName = "MXFP4";
  static constexpr int kGroup = 32, kBytes = 17, kSub = 32;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* block, int, uint8_t* q) { split_halves(block + 1, q); }
  static int value(uint8_t code) { return kE2M1Values[code]; }
  static uint8_t exponent(const uint8_t* block) { return block[0]; }
  static float scale(const uint8_t* block, int) { return half_exponent_to_float(exponent(block)); }
};

}  // namespace source
}  // namespace
}  // namespace moeflow
