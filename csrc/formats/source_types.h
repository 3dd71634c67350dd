// What rows of a checkpoint consist of: floats, or blocks. A new type is a struct and a row of the list; GGUF's blocks of
// other kinds than the first are in block_source_types.h, those of Hugging Face's quantized checkpoints in
// group_source_types.h.
//
//   kName            what Python calls it
//   kGroup, kBytes   so many neighbouring values lie in so many bytes; a row holds whole groups
//   read             `count` values of a row from column k on, as floats; of blocks, those of whole ones
//
// Included by the instruction sets' units, so all of this has internal linkage: as shared symbols, the linker might
// choose a copy with instructions that the processor lacks.
#pragma once

#include <cstdint>

#include "formats/block_source_types.h"
#include "formats/convert.h"
#include "formats/group_source_types.h"

namespace moeflow {
namespace {
namespace source {

// Where the group of column k begins.
template <typename Source>
const uint8_t* at(const uint8_t* row, int64_t k) {
  return row + k / Source::kGroup * Source::kBytes;
}

struct F32 {
  static constexpr const char* kName = "float32";
  static constexpr int kGroup = 1, kBytes = 4;

  static void read(const uint8_t* row, int64_t k, int64_t count, float* w) {
    __builtin_memcpy(w, at<F32>(row, k), count * sizeof(float));
  }
};

struct BF16 {
  static constexpr const char* kName = "bfloat16";
  static constexpr int kGroup = 1, kBytes = 2;

  static void read(const uint8_t* row, int64_t k, int64_t count, float* w) {
    for (int64_t i = 0; i < count; ++i) {
      uint16_t half;
      __builtin_memcpy(&half, at<BF16>(row, k + i), sizeof(half));
      w[i] = bf16_to_float(half);
    }
  }
};

struct F16 {
  static constexpr const char* kName = "float16";
  static constexpr int kGroup = 1, kBytes = 2;

  static void read(const uint8_t* row, int64_t k, int64_t count, float* w) {
    for (int64_t i = 0; i < count; ++i) {
      uint16_t half;
      __builtin_memcpy(&half, at<F16>(row, k + i), sizeof(half));
      w[i] = half_to_float(half);
    }
  }
};

// Blocks of small integers q that begin with an fp16 scale, and behind it perhaps an fp16 minimum: a value is
// q * scale (+ minimum). Types define the integers: `integers(block, q)`.
template <typename Block>
struct IntegerBlocks {
  static void read(const uint8_t* row, int64_t k, int64_t count, float* w) {
    for (int64_t first = 0; first < count; first += Block::kGroup) {
      const uint8_t* const block = at<Block>(row, k + first);
      int8_t q[Block::kGroup];
      Block::integers(block, q);
      uint16_t numbers[2];
      __builtin_memcpy(numbers, block, sizeof(numbers));
      const float step = half_to_float(numbers[0]);
      for (int i = 0; i < Block::kGroup; ++i) w[first + i] = step * static_cast<float>(q[i]);
      if constexpr (Block::kHasMin) {
        const float lowest = half_to_float(numbers[1]);
        for (int i = 0; i < Block::kGroup; ++i) w[first + i] += lowest;
      }
    }
  }
};

struct Q8_0 : IntegerBlocks<Q8_0> {
  static constexpr const char* kName = "Q8_0";
  static constexpr int kGroup = 32, kBytes = 34;
  static constexpr bool kHasMin = false;

  static void integers(const uint8_t* block, int8_t* q) { __builtin_memcpy(q, block + 2, kGroup); }
};

// 16 bytes; byte j holds integers j and j + 16, minus `kOffset`.
template <int kHead, int kOffset>
void read_halves(const uint8_t* block, int8_t* q) {
  for (int j = 0; j < 16; ++j) {
    q[j] = static_cast<int8_t>((block[kHead + j] & 15) - kOffset);
    q[j + 16] = static_cast<int8_t>((block[kHead + j] >> 4) - kOffset);
  }
}

struct Q4_0 : IntegerBlocks<Q4_0> {
  static constexpr const char* kName = "Q4_0";
  static constexpr int kGroup = 32, kBytes = 18;
  static constexpr bool kHasMin = false;

  static void integers(const uint8_t* block, int8_t* q) { read_halves<2, 8>(block, q); }
};

struct Q4_1 : IntegerBlocks<Q4_1> {
  static constexpr const char* kName = "Q4_1";
  static constexpr int kGroup = 32, kBytes = 20;
  static constexpr bool kHasMin = true;

  static void integers(const uint8_t* block, int8_t* q) { read_halves<4, 0>(block, q); }
};

}  // namespace source
}  // namespace

#define MOEFLOW_SOURCE_TYPES(ROW)                                             \
  ROW(F32) ROW(BF16) ROW(F16) ROW(Q8_0) ROW(Q4_0) ROW(Q4_1) ROW(Q5_0) ROW(Q5_1) ROW(Q2_K) ROW(Q3_K) ROW(Q4_K) ROW(Q5_K) \
  ROW(Q6_K) ROW(IQ4_NL) ROW(IQ4_XS) ROW(MXFP4) ROW(INT4_G128) ROW(INT4_G64) ROW(INT4_G32) ROW(INT8_G128) ROW(F8_E4M3) \
  ROW(LEVELS_IQ2) ROW(LEVELS_IQ3_XXS) ROW(LEVELS_IQ3_S) ROW(NVFP4)

#define MOEFLOW_ROW(NAME) k##NAME,
enum class SourceType : int32_t { MOEFLOW_SOURCE_TYPES(MOEFLOW_ROW) };
#undef MOEFLOW_ROW

// What `run` returns for the struct of a type.
template <typename Run>
static inline auto with_source_type(SourceType type, Run&& run) {
  switch (type) {
#define MOEFLOW_ROW(NAME) \
  case SourceType::k##NAME: return run(source::NAME{});
    MOEFLOW_SOURCE_TYPES(MOEFLOW_ROW)
#undef MOEFLOW_ROW
  }
  __builtin_unreachable();
}

static inline int64_t row_bytes(SourceType type, int64_t cols) {
  return with_source_type(type, [=](auto it) { return cols / it.kGroup * it.kBytes; });
}

}  // namespace moeflow
