// The formats of packed weights: how a band of 16 outputs lies in memory, how weights become that, and what products
// read. A new format is a struct and a row of the list at the end; all that depends on the format is made from it.
//
// A band is stored in groups of neighbouring k. First come the numbers of all groups: of each, 16 x fp16, one an output
// (none for floats; a scale; a scale and a minimum), filled up to 64 bytes. Then come values in lines of 64 bytes, 16
// words of 32 bits, one an output.
//
//   F32       per k:    w[k]
//   BF16      per 2 k:  w[k], w[k+1]
//   INT8      per 4 k:  w[k] .. w[k+3], signed
//   INT4      per 8 k:  4 bytes, byte j: w[k+j]+8 in the low half, w[k+4+j]+8 in the high half
//   INT4Min   likewise, but without the 8
//
// The value of an integer weight is q * scale (+ minimum): GGUF's Q8_0, Q4_0 and Q4_1 blocks fit in without loss. Its
// other blocks have formats of their own (block_formats.h), which nothing is rounded to, and so do Hugging Face's
// quantized checkpoints (group_formats.h).
//
// What a format says:
//
//   kName                what Python calls it (moeflow/kernels/weight_format.py has the rest that is to be known there)
//   kGroup               k that share numbers
//   kNumbers, kWords     what an output has in a group: 16-bit numbers, 32-bit words of values
//   kTile                which tile of gemm_tile.h multiplies it
//   activation(is_wide)  in which form activations meet it
//   round(w, ..)         make numbers and words of floats, each the nearest step; in pack.cpp only, whose flags have
//                        nothing fused that is rounded as GGUF's tools do
//   keep(Source, ..)     the same from a group of a checkpoint as it lies there, without floats: no value changes;
//                        false: cannot
//   read(.., w)          the exact values again
//
// Integers, besides, as a stretch of 32 values has kStretchWords words: kSub, how many values share numbers; kHasMin;
// kOffset, which values have been raised by to be unsigned, and kMost, the largest of them then; kTable, what codes stand
// for (null: themselves); and of one output, or of as many as a vector has lanes:
//
//   quad(word, i)                the codes of the i-th four neighbours of a stretch, as bytes; word(i) is its i-th word
//   scale(numbers, i, step)      of the i-th stretch of a group, where it has steps of kSub values
//   least(numbers, i, step)      and the minimum
//   common_of(numbers, j)        the j-th of kCommon factors (mostly none) that these have in common in a group; they get
//                                it as numbers.common<Format>(j), so that it can be made once for all stretches
//
// Included by the instruction sets' units, so all of this has internal linkage and calls no shared template: the linker
// might choose a copy with instructions that the processor lacks.
#pragma once

#include <cstdint>

#include "formats/block_formats.h"
#include "formats/convert.h"
#include "formats/format_kinds.h"
#include "formats/group_formats.h"
#include "formats/source_types.h"

namespace moeflow {

namespace {

// Formats keep the sources of their overloads of `keep`.
struct KeepsNothing {
  template <typename Source>
  static bool keep(Source, const uint8_t*, uint16_t*, uint32_t*) {
    return false;
  }
};

// ---- floats ----

struct F32 : KeepsNothing {
  static constexpr const char* kName = "float32";
  static constexpr int kGroup = 32, kNumbers = 0, kWords = 32;
  static constexpr TileKind kTile = TileKind::kF32;
  static constexpr Activation activation(bool) { return Activation::kF32; }

  static void round(const float* w, uint16_t*, uint32_t* words) { __builtin_memcpy(words, w, kGroup * sizeof(float)); }
  using KeepsNothing::keep;
  static bool keep(source::F32, const uint8_t* from, uint16_t*, uint32_t* words) {
    __builtin_memcpy(words, from, kGroup * sizeof(float));
    return true;
  }
  static void read(const uint16_t*, const uint32_t* words, float* w) {
    __builtin_memcpy(w, words, kGroup * sizeof(float));
  }
};

struct BF16 : KeepsNothing {
  static constexpr const char* kName = "bfloat16";
  static constexpr int kGroup = 32, kNumbers = 0, kWords = 16;
  static constexpr TileKind kTile = TileKind::kBF16;
  static constexpr Activation activation(bool) { return Activation::kBF16; }

  static void round(const float* w, uint16_t*, uint32_t* words) {
    uint16_t halves[kGroup];
    for (int i = 0; i < kGroup; ++i) halves[i] = float_to_bf16(w[i]);
    __builtin_memcpy(words, halves, sizeof(halves));
  }
  using KeepsNothing::keep;
  static bool keep(source::BF16, const uint8_t* from, uint16_t*, uint32_t* words) {
    __builtin_memcpy(words, from, kGroup * sizeof(uint16_t));
    return true;
  }
  static void read(const uint16_t*, const uint32_t* words, float* w) {
    uint16_t halves[kGroup];
    __builtin_memcpy(halves, words, sizeof(halves));
    for (int i = 0; i < kGroup; ++i) w[i] = bf16_to_float(halves[i]);
  }
};

// ---- integers ----

// The largest magnitude, found as integers, which compare in the same order and faster.
static inline float max_magnitude(const float* w, int count) {
  int32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t magnitude = bit_cast<int32_t>(w[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bit_cast<float>(largest);
}

struct INT8 : KeepsNothing {
  static constexpr const char* kName = "int8";
  static constexpr int kGroup = 32, kNumbers = 1, kWords = 8;
  static constexpr int kSub = 32, kStretches = 1, kStretchWords = kWords, kMost = 255, kCommon = 0;
  static constexpr bool kHasMin = false;
  static constexpr int32_t kOffset = 128;
  static constexpr const uint8_t* kTable = nullptr;
  static constexpr TileKind kTile = TileKind::kIntegers;
  static constexpr Activation activation(bool is_wide) { return is_wide ? Activation::kInt16 : Activation::kInt8; }

  // Round to nearest, halves away from zero, as GGUF's Q8_0 does.
  static void round(const float* w, uint16_t* numbers, uint32_t* words) {
    const float scale = max_magnitude(w, kGroup) / 127.0f, inverse = scale != 0 ? 1.0f / scale : 0.0f;
    int32_t wide[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const float scaled = w[i] * inverse, size = __builtin_fabsf(scaled), bounded = size < 127.0f ? size : 127.0f;
      const int32_t whole = static_cast<int32_t>(bounded);
      const int32_t rounded = whole + (bounded - static_cast<float>(whole) >= 0.5f ? 1 : 0);
      const int32_t sign = bit_cast<int32_t>(scaled) >> 31;  // 0 or -1
      wide[i] = (rounded ^ sign) - sign;
    }
    int8_t q[kGroup];
    for (int i = 0; i < kGroup; ++i) q[i] = static_cast<int8_t>(wide[i]);
    numbers[0] = float_to_half(scale);
    __builtin_memcpy(words, q, sizeof(q));
  }

  using KeepsNothing::keep;
  static bool keep(source::Q8_0, const uint8_t* block, uint16_t* numbers, uint32_t* words) {
    return keep_integers<source::Q8_0>(block, numbers, words);
  }
  static bool keep(source::Q4_0, const uint8_t* block, uint16_t* numbers, uint32_t* words) {
    return keep_integers<source::Q4_0>(block, numbers, words);
  }

  static void read(const uint16_t* numbers, const uint32_t* words, float* w) {
    int8_t q[kGroup];
    __builtin_memcpy(q, words, sizeof(q));
    const float step = half_to_float(numbers[0]);
    for (int i = 0; i < kGroup; ++i) w[i] = step * static_cast<float>(q[i]);
  }

  template <typename Word>
  static auto quad(const Word& word, int quad) {
    return word(quad) ^ 0x80808080u;
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int, int) {
    return numbers.half(0);
  }

 private:
  template <typename Block>
  static bool keep_integers(const uint8_t* block, uint16_t* numbers, uint32_t* words) {
    int8_t q[kGroup];
    Block::integers(block, q);
    __builtin_memcpy(numbers, block, sizeof(uint16_t));
    __builtin_memcpy(words, q, sizeof(q));
    return true;
  }
};

// Four bits a value: how both formats of these keep numbers from 0 to 15.
struct FourBits : KeepsNothing {
  static constexpr int kGroup = 32, kWords = 4;
  static constexpr int kSub = 32, kStretches = 1, kStretchWords = kWords, kMost = 15, kCommon = 0;
  static constexpr const uint8_t* kTable = nullptr;
  static constexpr TileKind kTile = TileKind::kIntegers;
  static constexpr Activation activation(bool is_wide) { return is_wide ? Activation::kInt16 : Activation::kInt8; }

  template <typename Word>
  static auto quad(const Word& word, int quad) {
    return word(quad / 2) >> (quad % 2 * 4) & 0x0f0f0f0fu;
  }
  template <typename Numbers>
  static auto scale(const Numbers& numbers, int, int) {
    return numbers.half(0);
  }
  template <typename Numbers>
  static auto least(const Numbers& numbers, int, int) {
    return numbers.half(1);
  }

 protected:
  // Rounded already, if not down yet.
  static int32_t bounded(float raised) {
    const float most = raised < 15.0f ? raised : 15.0f;
    return static_cast<int32_t>(most > 0.0f ? most : 0.0f);
  }

  static void join(const int32_t* wide, uint32_t* words) {
    uint8_t bytes[kGroup / 2];
    for (int v = 0; v < 4; ++v) {
      for (int j = 0; j < 4; ++j) bytes[v * 4 + j] = static_cast<uint8_t>(wide[v * 8 + j] | wide[v * 8 + 4 + j] << 4);
    }
    __builtin_memcpy(words, bytes, sizeof(bytes));
  }

  // Byte j of word v holds 8 v + j in its low half and 8 v + 4 + j in its high half; a block's, 4 v + j and 16 above.
  static void reorder(const uint8_t* bytes, uint32_t* words) {
    uint32_t stored[kWords];
    __builtin_memcpy(stored, bytes, sizeof(stored));
    constexpr uint32_t kLow = 0x0f0f0f0f;
    for (int i = 0; i < 2; ++i) {
      const uint32_t a = stored[2 * i], b = stored[2 * i + 1];
      words[i] = (a & kLow) | (b & kLow) << 4;
      words[2 + i] = (a >> 4 & kLow) | (b & ~kLow);
    }
  }

  static void split(const uint32_t* words, int offset, int8_t* q) {
    for (int v = 0; v < 4; ++v) {
      for (int j = 0; j < 4; ++j) {
        const int byte = static_cast<int>(words[v] >> (8 * j) & 255);
        q[v * 8 + j] = static_cast<int8_t>((byte & 15) - offset);
        q[v * 8 + 4 + j] = static_cast<int8_t>((byte >> 4) - offset);
      }
    }
  }
};

struct INT4 : FourBits {
  static constexpr const char* kName = "int4";
  static constexpr int kNumbers = 1;
  static constexpr bool kHasMin = false;
  static constexpr int32_t kOffset = 8;

  // The largest value, with its sign, becomes -8, so that the wider half of the range is used, as GGUF's Q4_0 does.
  static void round(const float* w, uint16_t* numbers, uint32_t* words) {
    const uint32_t magnitude = bit_cast<uint32_t>(max_magnitude(w, kGroup));  // as bits: NaN would equal nothing
    int first = 0;
    while (first < kGroup - 1 && (bit_cast<uint32_t>(w[first]) & 0x7fffffff) != magnitude) ++first;
    const float scale = w[first] / -8.0f, inverse = scale != 0 ? 1.0f / scale : 0.0f;
    int32_t wide[kGroup];
    for (int i = 0; i < kGroup; ++i) wide[i] = bounded(w[i] * inverse + 8.5f);
    numbers[0] = float_to_half(scale);
    join(wide, words);
  }

  using KeepsNothing::keep;
  static bool keep(source::Q4_0, const uint8_t* block, uint16_t* numbers, uint32_t* words) {
    __builtin_memcpy(numbers, block, kNumbers * sizeof(uint16_t));
    reorder(block + kNumbers * sizeof(uint16_t), words);
    return true;
  }

  static void read(const uint16_t* numbers, const uint32_t* words, float* w) {
    int8_t q[kGroup];
    split(words, kOffset, q);
    const float step = half_to_float(numbers[0]);
    for (int i = 0; i < kGroup; ++i) w[i] = step * static_cast<float>(q[i]);
  }
};

struct INT4Min : FourBits {
  static constexpr const char* kName = "int4-min";
  static constexpr int kNumbers = 2;
  static constexpr bool kHasMin = true;
  static constexpr int32_t kOffset = 0;

  // From the least value to the largest in 15 steps, as GGUF's Q4_1 does.
  static void round(const float* w, uint16_t* numbers, uint32_t* words) {
    float least = w[0], largest = w[0];
    for (int i = 1; i < kGroup; ++i) {
      if (w[i] < least) least = w[i];
      if (w[i] > largest) largest = w[i];
    }
    const float size = max_magnitude(w, kGroup);  // as bits, so that NaN is seen
    const float scale = __builtin_isfinite(size) ? (largest - least) / 15.0f : size;
    const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
    int32_t wide[kGroup];
    for (int i = 0; i < kGroup; ++i) wide[i] = bounded((w[i] - least) * inverse + 0.5f);
    numbers[0] = float_to_half(scale);
    numbers[1] = float_to_half(least);
    join(wide, words);
  }

  using KeepsNothing::keep;
  static bool keep(source::Q4_1, const uint8_t* block, uint16_t* numbers, uint32_t* words) {
    __builtin_memcpy(numbers, block, kNumbers * sizeof(uint16_t));
    reorder(block + kNumbers * sizeof(uint16_t), words);
    return true;
  }

  static void read(const uint16_t* numbers, const uint32_t* words, float* w) {
    int8_t q[kGroup];
    split(words, kOffset, q);
    const float step = half_to_float(numbers[0]), lowest = half_to_float(numbers[1]);
    for (int i = 0; i < kGroup; ++i) w[i] = step * static_cast<float>(q[i]);
    for (int i = 0; i < kGroup; ++i) w[i] += lowest;
  }
};

}  // namespace

// ---- the list ----

#define MOEFLOW_FORMATS(ROW)                                                                                    \
  ROW(F32) ROW(BF16) ROW(INT8) ROW(INT4) ROW(INT4Min) ROW(Q5_0) ROW(Q5_1) ROW(Q2_K) ROW(Q3_K) ROW(Q4_K) ROW(Q5_K) \
  ROW(Q6_K) ROW(IQ4_NL) ROW(IQ4_XS) ROW(MXFP4) ROW(INT4_G128) ROW(INT4_G64) ROW(INT4_G32) ROW(INT8_G128) ROW(FP8) \
  ROW(LEVELS_IQ2) ROW(LEVELS_IQ3_XXS) ROW(LEVELS_IQ3_S) ROW(NVFP4)

#define MOEFLOW_ROW(NAME) k##NAME,
enum class Format : int32_t { MOEFLOW_FORMATS(MOEFLOW_ROW) };
#undef MOEFLOW_ROW

// What `run` returns for the struct of a format.
template <typename Run>
static inline auto with_format(Format format, Run&& run) {
  switch (format) {
#define MOEFLOW_ROW(NAME) \
  case Format::k##NAME: return run(NAME{});
    MOEFLOW_FORMATS(MOEFLOW_ROW)
#undef MOEFLOW_ROW
  }
  __builtin_unreachable();
}

}  // namespace moeflow
