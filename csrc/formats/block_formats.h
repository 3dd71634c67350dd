// Formats of weights that only files have: GGUF's K-quants, five bits, and indexes into tables. Included by formats.h,
// whose list has them.
//
// A group is a block of the file (MXFP4: two), and is kept as it is: codes (block_source_types.h) and scales change
// places, but no bit. Of each output, the 16-bit numbers of a group are first what the block has in fp16, then its small
// scales and minima, unpacked to a byte each, two to a number.
//
//   Q5_0, IQ4_NL         d
//   Q5_1                 d, m
//   MXFP4                e0 e1
//   Q4_K, Q5_K           d, dmin, s0 m0, s1 m1, ..           of 32 values each
//   Q2_K                 d, dmin, b0 b1, b2 b3, ..           of 16; a byte's low half is the scale, its high half the
//                                                            minimum
//   Q3_K, Q6_K, IQ4_XS   d, s0 s1, s2 s3, ..                 signed; of 16 values each, in IQ4_XS of 32
//   LEVELS_..            d, s0 s1, s2 s3, ..                 likewise; of 16 values each in LEVELS_IQ2, of 32 in others
//
// A stretch of 32 values has words with the low bits of its codes, then words with their high bits. Byte j of such words
// has bits of codes j, 4 + j, 8 + j, .., the first lowest:
//
//   4 low bits   [ c0 c4 | c1 c5 | c2 c6 | c3 c7 ], [ c8 c12 | .. ], ..    4 words
//   2 low bits   [ c0 c4 c8 c12 | c1 c5 c9 c13 | .. ], [ c16 .. ]          2 words
//   1 high bit   [ c0 c4 .. c28 | c1 c5 .. c29 | .. ]                      1 word
//   2 high bits  as 2 low bits
//
// so that four neighbours, a quad, come out of a word by a shift and a mask.
#pragma once

#include <cstdint>

#include "formats/block_source_types.h"
#include "formats/convert.h"
#include "formats/format_kinds.h"

namespace moeflow {
namespace {

// `kLow` + `kHigh` bits a code. `Numbers` in what follows is what reads numbers of a group: `half(i)` and `bf16(i)` as
// floats, `bits(i)` as integers, `low_byte(i)` and `high_byte(i)`, `raised_byte(i, half)` as the highest byte of an
// integer, `common<Format>(i)`, and what makes floats of these; of one output, or of as many as a vector has lanes.
template <typename Self, typename Block, int kLow, int kHigh, int kBlocks = 1>
struct BlockFormat {
  using Source = Block;
  static constexpr int kGroup = Block::kGroup * kBlocks, kSub = Block::kSub;
  static constexpr int kStretchWords = kLow + kHigh, kStretches = kGroup / source::kStretch;
  static constexpr int kWords = kStretches * kStretchWords;
  static constexpr bool kHasMin = Block::kHasMin;
  static constexpr int kCommon = 0;
  static constexpr int32_t kOffset = 0;
  static constexpr const uint8_t* kTable = nullptr;  // of 16 values raised by kOffset; null: codes are these
  static constexpr int kMost = (1 << (kLow + kHigh)) - 1;  // the largest value, raised
  static constexpr TileKind kTile = TileKind::kBlocks;
  static constexpr Activation activation(bool is_wide) { return is_wide ? Activation::kInt16 : Activation::kInt8; }

  // The offset subtracted from the values of a stretch.
  template <typename Numbers>
  static int32_t offset(const Numbers&, int) {
    return Self::kOffset;
  }

  // `blocks` are the blocks of a group.
  static void keep(const uint8_t* blocks, uint16_t* numbers, uint32_t* words) {
    for (int i = 0; i < kStretches; ++i) {
      uint8_t codes[source::kStretch];
      const int stretch = i % (kStretches / kBlocks);
      Block::codes(blocks + i / (kStretches / kBlocks) * Block::kBytes, stretch, codes);
      join(codes, words + i * kStretchWords);
    }
    Self::keep_numbers(blocks, numbers);
  }

  // The codes of quad `quad` of a stretch as bytes; `word(i)` is the stretch's i-th.
  template <typename Word>
  static auto quad(const Word& word, int quad) {
    constexpr uint32_t kLowMask = ((1u << kLow) - 1) * 0x01010101u;
    auto codes = word(quad * kLow / 8) >> (quad * kLow % 8) & kLowMask;
    if constexpr (kHigh > 0) {
      constexpr uint32_t kHighMask = (((1u << kHigh) - 1) << kLow) * 0x01010101u;
      const auto high = word(kLow + quad * kHigh / 8);
      const int from = quad * kHigh % 8;
      codes |= (from < kLow ? high << (kLow - from) : high >> (from - kLow)) & kHighMask;
    }
    return codes;
  }

  static void read(const uint16_t* numbers, const uint32_t* words, float* w) {
    const OneOutput of_output{numbers};
    for (int i = 0; i < kStretches; ++i, words += kStretchWords, w += source::kStretch) {
      uint32_t quads[source::kStretch / 4];
      for (int j = 0; j < source::kStretch / 4; ++j) quads[j] = quad([&](int word) { return words[word]; }, j);
      uint8_t codes[source::kStretch];
      __builtin_memcpy(codes, quads, sizeof(codes));
      for (int j = 0; j < source::kStretch; ++j) {
        w[j] = Self::scale(of_output, i, j / kSub) * static_cast<float>(raised_value(codes[j]) - Self::offset(of_output, i));
        if constexpr (kHasMin) w[j] += Self::least(of_output, i, j / kSub);
      }
    }
  }

 protected:
  // Byte j of the bytes that begin at number `first`.
  template <typename Numbers>
  static auto byte(const Numbers& numbers, int first, int j) {
    return numbers.bits(first + j / 2) >> (j % 2 * 8) & 255;
  }

  static uint16_t two_bytes(int first, int second) {
    return static_cast<uint16_t>((first & 255) | (second & 255) << 8);
  }

 private:
  struct OneOutput {
    const uint16_t* numbers;
    float half(int i) const { return half_to_float(numbers[i]); }
    float bf16(int i) const { return bf16_to_float(numbers[i]); }
    int32_t bits(int i) const { return numbers[i]; }
    int32_t low_byte(int i) const { return numbers[i] & 255; }
    int32_t high_byte(int i) const { return numbers[i] >> 8; }
    int32_t raised_byte(int i, int half) const { return static_cast<int8_t>(numbers[i] >> (half * 8)) * (1 << 24); }
    template <typename Format>
    float common(int i) const {
      return Format::common_of(*this, i);
    }
    static float to_floats(int32_t number) { return static_cast<float>(number); }
    static float to_bits_of_floats(int32_t bits) { return bit_cast<float>(bits); }
    static float half_exponents(int32_t exponent) { return half_exponents_to_floats<float>(exponent); }
    static float half_nvfp4(int32_t code, float factor) { return half_nvfp4_scale(code, factor); }
  };

  static int32_t raised_value(uint8_t code) {
    if constexpr (Self::kTable != nullptr) return Self::kTable[code];
    return code;
  }

  static void join(const uint8_t* codes, uint32_t* words) {
    constexpr uint32_t kLowMask = ((1u << kLow) - 1) * 0x01010101u, kHighMask = ((1u << kHigh) - 1) * 0x01010101u;
    for (int i = 0; i < kStretchWords; ++i) words[i] = 0;
    for (int quad = 0; quad < source::kStretch / 4; ++quad) {
      uint32_t four;
      __builtin_memcpy(&four, codes + quad * 4, sizeof(four));
      words[quad * kLow / 8] |= (four & kLowMask) << (quad * kLow % 8);
      if constexpr (kHigh > 0) words[kLow + quad * kHigh / 8] |= (four >> kLow & kHighMask) << (quad * kHigh % 8);
    }
  }
};

// ---- one scale for 32 values ----

// Blocks begin with their numbers, which are fp16.
template <typename Self, typename Block, int kLow, int kHigh>
struct PlainBlockFormat : BlockFormat<Self, Block, kLow, kHigh> {
  static constexpr int kNumbers = Block::kHasMin ? 2 : 1;

  static void keep_numbers(const uint8_t* block, uint16_t* numbers) {
    __builtin_memcpy(numbers, block, kNumbers * sizeof(uint16_t));
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int, int) {
    return numbers.half(0);
  }
  template <typename Numbers>
  static auto least(const Numbers& numbers, int, int) {
    return numbers.half(1);
  }
};

struct Q5_0 : PlainBlockFormat<Q5_0, source::Q5_0, 4, 1> {
  static constexpr const char* kName = "q5_0";
  static constexpr int32_t kOffset = 16;
};

struct Q5_1 : PlainBlockFormat<Q5_1, source::Q5_1, 4, 1> {
  static constexpr const char* kName = "q5_1";
};

struct RaisedTable {
  uint8_t values[16];
};

static constexpr RaisedTable raised(const int8_t (&values)[16], int offset) {
  RaisedTable table{};
  for (int i = 0; i < 16; ++i) table.values[i] = static_cast<uint8_t>(values[i] + offset);
  return table;
}

constexpr int largest(const RaisedTable& table) {
  int most = 0;
  for (const uint8_t value : table.values) most = value > most ? value : most;
  return most;
}

// By 128 a signed byte becomes an unsigned one, which is also what changing its highest bit does.
constexpr int kIQ4Offset = 128, kE2M1Offset = 12;
constexpr RaisedTable kRaisedIQ4 = raised(source::kIQ4Values, kIQ4Offset);
constexpr RaisedTable kRaisedE2M1 = raised(source::kE2M1Values, kE2M1Offset);

struct IQ4_NL : PlainBlockFormat<IQ4_NL, source::IQ4_NL, 4, 0> {
  static constexpr const char* kName = "iq4_nl";
  static constexpr int32_t kOffset = kIQ4Offset;
  static constexpr const uint8_t* kTable = kRaisedIQ4.values;
  static constexpr int kMost = largest(kRaisedIQ4);
};

struct MXFP4 : BlockFormat<MXFP4, source::MXFP4, 4, 0, 2> {
  static constexpr const char* kName = "mxfp4";
  static constexpr int kNumbers = 1;
  static constexpr int32_t kOffset = kE2M1Offset;
  static constexpr const uint8_t* kTable = kRaisedE2M1.values;
  static constexpr int kMost = largest(kRaisedE2M1);

  static void keep_numbers(const uint8_t* blocks, uint16_t* numbers) {
    numbers[0] = two_bytes(Source::exponent(blocks), Source::exponent(blocks + Source::kBytes));
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int stretch, int) {
    return numbers.half_exponents(byte(numbers, 0, stretch));
  }
};

// ---- small scales beside fp16 ones ----

template <typename Self, typename Block, int kHigh>
struct FourBitSuperblockFormat : BlockFormat<Self, Block, 4, kHigh> {
  using Base = BlockFormat<Self, Block, 4, kHigh>;
  static constexpr int kNumbers = 2 + Base::kStretches, kCommon = 2;

  static void keep_numbers(const uint8_t* block, uint16_t* numbers) {
    __builtin_memcpy(numbers, block, 2 * sizeof(uint16_t));
    for (int i = 0; i < Base::kStretches; ++i) {
      numbers[2 + i] = Base::two_bytes(Block::small_scale(block, i), Block::small_min(block, i));
    }
  }
  template <typename Numbers>
  static auto common_of(const Numbers& numbers, int i) {
    return i == 0 ? numbers.half(0) : -numbers.half(1);
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int stretch, int) {
    return numbers.template common<Self>(0) * numbers.to_floats(numbers.low_byte(2 + stretch));
  }
  template <typename Numbers>
  static auto least(const Numbers& numbers, int stretch, int) {
    return numbers.template common<Self>(1) * numbers.to_floats(numbers.high_byte(2 + stretch));
  }
};

struct Q4_K : FourBitSuperblockFormat<Q4_K, source::Q4_K, 0> {
  static constexpr const char* kName = "q4_k";
};

struct Q5_K : FourBitSuperblockFormat<Q5_K, source::Q5_K, 1> {
  static constexpr const char* kName = "q5_k";
};

struct Q2_K : BlockFormat<Q2_K, source::Q2_K, 2, 0> {
  static constexpr const char* kName = "q2_k";
  static constexpr int kNumbers = 2 + kGroup / kSub / 2, kCommon = 2;

  static void keep_numbers(const uint8_t* block, uint16_t* numbers) {
    __builtin_memcpy(numbers, block + Source::kHead, 2 * sizeof(uint16_t));
    __builtin_memcpy(numbers + 2, block, kGroup / kSub);
  }
  template <typename Numbers>
  static auto common_of(const Numbers& numbers, int i) {
    return i == 0 ? numbers.half(0) : -numbers.half(1);
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int stretch, int half) {
    return numbers.template common<Q2_K>(0) * numbers.to_floats(byte(numbers, 2, 2 * stretch + half) & 15);
  }
  template <typename Numbers>
  static auto least(const Numbers& numbers, int stretch, int half) {
    return numbers.template common<Q2_K>(1) * numbers.to_floats(byte(numbers, 2, 2 * stretch + half) >> 4);
  }
};

// Signed ones, for each `kSub` values.
template <typename Self, typename Block, int kLow, int kHigh>
struct SignedScalesFormat : BlockFormat<Self, Block, kLow, kHigh> {
  using Base = BlockFormat<Self, Block, kLow, kHigh>;
  static constexpr int kScales = Base::kGroup / Base::kSub, kNumbers = 1 + kScales / 2, kCommon = 1;

  static void keep_numbers(const uint8_t* block, uint16_t* numbers) {
    __builtin_memcpy(numbers, block + Block::kHead, sizeof(uint16_t));
    for (int j = 0; j < kScales; j += 2) {
      numbers[1 + j / 2] = Base::two_bytes(Block::small_scale(block, j), Block::small_scale(block, j + 1));
    }
  }
  // As the highest byte of an integer a small scale has its sign without further ado, and is 2^24 times as large.
  template <typename Numbers>
  static auto common_of(const Numbers& numbers, int) {
    return numbers.half(0) * 0x1p-24f;
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int stretch, int half) {
    const int j = stretch * (kScales / Base::kStretches) + half;
    return numbers.template common<Self>(0) * numbers.to_floats(numbers.raised_byte(1 + j / 2, j % 2));
  }
};

struct Q3_K : SignedScalesFormat<Q3_K, source::Q3_K, 2, 1> {
  static constexpr const char* kName = "q3_k";
  static constexpr int32_t kOffset = 4;
};

struct Q6_K : SignedScalesFormat<Q6_K, source::Q6_K, 4, 2> {
  static constexpr const char* kName = "q6_k";
  static constexpr int32_t kOffset = 32;
};

struct IQ4_XS : SignedScalesFormat<IQ4_XS, source::IQ4_XS, 4, 0> {
  static constexpr const char* kName = "iq4_xs";
  static constexpr int32_t kOffset = kIQ4Offset;
  static constexpr const uint8_t* kTable = kRaisedIQ4.values;
  static constexpr int kMost = largest(kRaisedIQ4);
};

// No member of a template: its address, which might be another unit's, is not known to be none where GCC checks pointers.
constexpr int kIQ2Offset = 43, kIQ3_XXSOffset = 31, kIQ3_SOffset = 15;
constexpr RaisedTable kRaisedIQ2 = raised(source::LEVELS_IQ2::kLevels, kIQ2Offset);
constexpr RaisedTable kRaisedIQ3_XXS = raised(source::LEVELS_IQ3_XXS::kLevels, kIQ3_XXSOffset);
constexpr RaisedTable kRaisedIQ3_S = raised(source::LEVELS_IQ3_S::kLevels, kIQ3_SOffset);

template <typename Self, typename Block, int kRaisedBy, const RaisedTable& kRaised>
struct LevelsFormat : SignedScalesFormat<Self, Block, 4, 0> {
  using Base = SignedScalesFormat<Self, Block, 4, 0>;
  static constexpr int32_t kOffset = kRaisedBy;
  static constexpr const uint8_t* kTable = kRaised.values;
  static constexpr int kMost = largest(kRaised);

  template <typename Numbers>
  static auto common_of(const Numbers& numbers, int i) {
    return Base::common_of(numbers, i) * Block::kUnit;
  }
};

struct LEVELS_IQ2 : LevelsFormat<LEVELS_IQ2, source::LEVELS_IQ2, kIQ2Offset, kRaisedIQ2> {
  static constexpr const char* kName = "levels-iq2";
};

struct LEVELS_IQ3_XXS
    : LevelsFormat<LEVELS_IQ3_XXS, source::LEVELS_IQ3_XXS, kIQ3_XXSOffset, kRaisedIQ3_XXS> {
  static constexpr const char* kName = "levels-iq3-xxs";
};

struct LEVELS_IQ3_S : LevelsFormat<LEVELS_IQ3_S, source::LEVELS_IQ3_S, kIQ3_SOffset, kRaisedIQ3_S> {
  static constexpr const char* kName = "levels-iq3-s";
};

}  // namespace
}  // namespace moeflow
