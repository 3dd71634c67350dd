// From the rows of a checkpoint to bands and back. A group of 32 k of one output is first written as words, the
// four bytes that this lane has in each 64-byte line, then 16 lanes are laid side by side.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "convert.h"
#include "matrix.h"
#include "ops.h"
#include "pool.h"

namespace moeflow {
namespace {

constexpr int kMaxWords = kGroup;  // of a group of one lane: FP32 has most

int64_t words_in_group(Format format) {
  switch (format) {
    case Format::kF32: return kGroup;
    case Format::kBF16: return kGroup / 2;
    case Format::kINT8: return kGroup / 4;
    case Format::kINT4:
    case Format::kINT4Min: return kGroup / 8;
  }
  return 0;
}

// ---- one group of one row, as it comes ----

int64_t row_bytes(SourceType type, int64_t cols) {
  switch (type) {
    case SourceType::kF32: return cols * 4;
    case SourceType::kBF16:
    case SourceType::kF16: return cols * 2;
    case SourceType::kQ8_0: return cols / kGroup * 34;
    case SourceType::kQ4_0: return cols / kGroup * 18;
    case SourceType::kQ4_1: return cols / kGroup * 20;
  }
  return 0;
}

bool is_block(SourceType type) { return type >= SourceType::kQ8_0; }

// Where the integers of a block begin: behind an fp16 scale, and of Q4_1 an fp16 minimum.
int64_t block_head(SourceType type) { return type == SourceType::kQ4_1 ? 4 : 2; }

// The integers of a block: 32 int8 or, of four bits, 16 bytes of which byte j holds j and j + 16, of Q4_0 8 more.
void read_block(SourceType type, const uint8_t* block, int8_t* q) {
  const uint8_t* const bytes = block + block_head(type);
  if (type == SourceType::kQ8_0) {
    std::memcpy(q, bytes, kGroup);
    return;
  }
  const int offset = type == SourceType::kQ4_0 ? 8 : 0;
  for (int j = 0; j < kGroup / 2; ++j) {
    q[j] = static_cast<int8_t>((bytes[j] & 15) - offset);
    q[j + 16] = static_cast<int8_t>((bytes[j] >> 4) - offset);
  }
}

// `count` floats (all 32 but at the end of a row), then zeros.
void read_floats(SourceType type, const uint8_t* row, int64_t g, int64_t count, float* w) {
  if (type == SourceType::kF32) {
    std::memcpy(w, row + g * kGroup * 4, count * 4);
  } else if (is_block(type)) {
    const uint8_t* block = row + row_bytes(type, kGroup) * g;
    int8_t q[kGroup];
    uint16_t scale, least = 0;
    std::memcpy(&scale, block, 2);
    if (type == SourceType::kQ4_1) std::memcpy(&least, block + 2, 2);
    read_block(type, block, q);
    const float step = half_to_float(scale), lowest = half_to_float(least);
    for (int i = 0; i < kGroup; ++i) w[i] = step * static_cast<float>(q[i]);
    for (int i = 0; i < kGroup && type == SourceType::kQ4_1; ++i) w[i] += lowest;
  } else {
    uint16_t halves[kGroup] = {};
    std::memcpy(halves, row + g * kGroup * 2, count * 2);
    if (type == SourceType::kBF16) {
      for (int i = 0; i < kGroup; ++i) w[i] = bf16_to_float(halves[i]);
    } else {
      for (int i = 0; i < kGroup; ++i) w[i] = half_to_float(halves[i]);
    }
  }
  for (int64_t i = count; i < kGroup; ++i) w[i] = 0;
}

// ---- one group of one lane, as it is kept ----

struct Group {
  uint16_t scale, least;      // of integer formats, fp16; the minimum of INT4_MIN only
  uint32_t words[kMaxWords];  // what the lane has in each 64-byte line
};

// The largest magnitude, found as integers, which compare in the same order and faster.
float max_magnitude(const float* w) {
  int32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    const int32_t magnitude = bit_cast<int32_t>(w[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bit_cast<float>(largest);
}

// Round to nearest, halves away from zero, as GGUF's Q8_0 does.
void quantize_int8(const float* w, Group& group) {
  const float scale = max_magnitude(w) / 127.0f, inverse = scale != 0 ? 1.0f / scale : 0.0f;
  int32_t wide[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float scaled = w[i] * inverse, size = std::fabs(scaled), bounded = size < 127.0f ? size : 127.0f;
    const int32_t whole = static_cast<int32_t>(bounded);
    const int32_t rounded = whole + (bounded - static_cast<float>(whole) >= 0.5f ? 1 : 0);
    const int32_t sign = bit_cast<int32_t>(scaled) >> 31;  // 0 or -1
    wide[i] = (rounded ^ sign) - sign;
  }
  int8_t q[kGroup];
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<int8_t>(wide[i]);
  group.scale = float_to_half(scale);
  std::memcpy(group.words, q, sizeof(q));
}

// Numbers from 0 to 15 as a lane keeps them.
void join_halves(const int32_t* wide, Group& group) {
  uint8_t bytes[kGroup / 2];
  for (int v = 0; v < 4; ++v) {
    for (int j = 0; j < 4; ++j) bytes[v * 4 + j] = static_cast<uint8_t>(wide[v * 8 + j] | wide[v * 8 + 4 + j] << 4);
  }
  std::memcpy(group.words, bytes, sizeof(bytes));
}

// The largest value, with its sign, becomes -8, so that the wider half of the range is used, as GGUF's Q4_0 does.
void quantize_int4(const float* w, Group& group) {
  const uint32_t magnitude = bit_cast<uint32_t>(max_magnitude(w));  // as bits: NaN would equal nothing
  int first = 0;
  while (first < kGroup - 1 && (bit_cast<uint32_t>(w[first]) & 0x7fffffff) != magnitude) ++first;
  const float scale = w[first] / -8.0f, inverse = scale != 0 ? 1.0f / scale : 0.0f;
  int32_t wide[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float raised = w[i] * inverse + 8.5f, bounded = raised < 15.0f ? raised : 15.0f;
    wide[i] = static_cast<int32_t>(bounded > 0.0f ? bounded : 0.0f);
  }
  group.scale = float_to_half(scale);
  join_halves(wide, group);
}

// From the least value to the largest in 15 steps, as GGUF's Q4_1 does.
void quantize_int4_min(const float* w, Group& group) {
  const auto [least, largest] = std::minmax_element(w, w + kGroup);
  const float size = max_magnitude(w);  // as bits, so that NaN is seen
  const float scale = std::isfinite(size) ? (*largest - *least) / 15.0f : size;
  const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  int32_t wide[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float raised = (w[i] - *least) * inverse + 0.5f, bounded = raised < 15.0f ? raised : 15.0f;
    wide[i] = static_cast<int32_t>(bounded > 0.0f ? bounded : 0.0f);
  }
  group.scale = float_to_half(scale);
  group.least = float_to_half(*least);
  join_halves(wide, group);
}

struct PackJob {
  Format format;
  SourceType type;
  int64_t cols;
};

// Groups that are kept as they come go without floats: no value changes.
bool copy_group(const PackJob& job, const uint8_t* row, int64_t g, Group& group) {
  if (job.format == Format::kBF16 && job.type == SourceType::kBF16 && (g + 1) * kGroup <= job.cols) {
    std::memcpy(group.words, row + g * kGroup * 2, kGroup * 2);
    return true;
  }
  if (!is_block(job.type)) return false;
  const uint8_t* block = row + row_bytes(job.type, kGroup) * g;
  std::memcpy(&group.scale, block, 2);
  if (job.format == Format::kINT8 && job.type != SourceType::kQ4_1) {
    int8_t q[kGroup];
    read_block(job.type, block, q);
    std::memcpy(group.words, q, sizeof(q));
    return true;
  }
  const bool is_kept = job.type == SourceType::kQ4_0 ? job.format == Format::kINT4
                                                     : job.type == SourceType::kQ4_1 && job.format == Format::kINT4Min;
  if (!is_kept) return false;
  if (job.type == SourceType::kQ4_1) std::memcpy(&group.least, block + 2, 2);
  // Byte j of word v holds 8 v + j in its low half and 8 v + 4 + j in its high half; a block's, 4 v + j and 16 above.
  uint32_t stored[4];
  std::memcpy(stored, block + block_head(job.type), sizeof(stored));
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = stored[2 * i], b = stored[2 * i + 1];
    group.words[i] = (a & kLow) | (b & kLow) << 4;
    group.words[2 + i] = (a >> 4 & kLow) | (b & ~kLow);
  }
  return true;
}

void make_group(const PackJob& job, const uint8_t* row, int64_t g, Group& group) {
  if (copy_group(job, row, g, group)) return;
  const int64_t left = job.cols - g * kGroup;
  float w[kGroup];
  read_floats(job.type, row, g, left < kGroup ? left : kGroup, w);
  switch (job.format) {
    case Format::kF32: std::memcpy(group.words, w, sizeof(w)); break;
    case Format::kBF16: {
      uint16_t halves[kGroup];
      for (int i = 0; i < kGroup; ++i) halves[i] = float_to_bf16(w[i]);
      std::memcpy(group.words, halves, sizeof(halves));
      break;
    }
    case Format::kINT8: quantize_int8(w, group); break;
    case Format::kINT4: quantize_int4(w, group); break;
    case Format::kINT4Min: quantize_int4_min(w, group); break;
  }
}

// ---- lanes side by side ----

// lines[word][lane] = groups[lane].words[word]; `num_words` is a multiple of 4.
void transpose(const Group* groups, int64_t num_words, uint32_t* lines) {
  for (int64_t word = 0; word < num_words; word += 4) {
    for (int lane = 0; lane < kBand; lane += 4) {
      uint32_t* out = lines + word * kBand + lane;
#if defined(__SSE2__)
      const auto load = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(groups[lane + i].words + word));
      };
      const auto store = [&](int i, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * kBand), v); };
      const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
      const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
      const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
      store(0, _mm_unpacklo_epi64(ab_low, cd_low));
      store(1, _mm_unpackhi_epi64(ab_low, cd_low));
      store(2, _mm_unpacklo_epi64(ab_high, cd_high));
      store(3, _mm_unpackhi_epi64(ab_high, cd_high));
#else
      for (int w = 0; w < 4; ++w) {
        for (int i = 0; i < 4; ++i) out[w * kBand + i] = groups[lane + i].words[word + w];
      }
#endif
    }
  }
}

// Write the lanes that have a row; the others stay as they are, since another call may have brought them.
void pack_band(const PackJob& job, const uint8_t* const* rows, uint8_t* band) {
  const int64_t num_words = words_in_group(job.format), num_scales = scale_bytes(job.format, job.cols);
  const int64_t num_numbers = group_numbers(job.format);
  const bool is_whole = std::find(rows, rows + kBand, nullptr) == rows + kBand;
  Group groups[kBand];
  for (int64_t g = 0; g < padded_cols(job.cols) / kGroup; ++g) {
    uint32_t* lines = reinterpret_cast<uint32_t*>(band + num_scales) + g * num_words * kBand;
    uint16_t* scales = reinterpret_cast<uint16_t*>(band) + g * num_numbers * kBand;
    for (int lane = 0; lane < kBand; ++lane) {
      if (rows[lane] == nullptr) continue;
      make_group(job, rows[lane], g, groups[lane]);
      if (num_numbers >= 1) scales[lane] = groups[lane].scale;
      if (num_numbers == 2) scales[kBand + lane] = groups[lane].least;
      for (int64_t w = 0; w < num_words && !is_whole; ++w) lines[w * kBand + lane] = groups[lane].words[w];
    }
    if (is_whole) transpose(groups, num_words, lines);
  }
}

// ---- and back ----

void read_packed_floats(const Matrix& m, const uint8_t* band, int64_t g, int lane, float* w) {
  const int64_t num_words = words_in_group(m.format);
  const uint32_t* lines =
      reinterpret_cast<const uint32_t*>(band + scale_bytes(m.format, m.cols)) + g * num_words * kBand + lane;
  uint32_t words[kMaxWords];
  for (int64_t i = 0; i < num_words; ++i) words[i] = lines[i * kBand];
  if (m.format == Format::kF32) {
    std::memcpy(w, words, kGroup * 4);
    return;
  }
  if (m.format == Format::kBF16) {
    uint16_t halves[kGroup];
    std::memcpy(halves, words, sizeof(halves));
    for (int i = 0; i < kGroup; ++i) w[i] = bf16_to_float(halves[i]);
    return;
  }
  int8_t q[kGroup];
  if (m.format == Format::kINT8) {
    std::memcpy(q, words, kGroup);
  } else {
    const int offset = m.format == Format::kINT4 ? 8 : 0;
    for (int v = 0; v < 4; ++v) {
      for (int j = 0; j < 4; ++j) {
        const int byte = static_cast<int>(words[v] >> (8 * j) & 255);
        q[v * 8 + j] = static_cast<int8_t>((byte & 15) - offset);
        q[v * 8 + 4 + j] = static_cast<int8_t>((byte >> 4) - offset);
      }
    }
  }
  const uint16_t* numbers = reinterpret_cast<const uint16_t*>(band) + g * group_numbers(m.format) * kBand + lane;
  const float step = half_to_float(numbers[0]);
  for (int i = 0; i < kGroup; ++i) w[i] = step * static_cast<float>(q[i]);
  if (m.format != Format::kINT4Min) return;
  const float lowest = half_to_float(numbers[kBand]);
  for (int i = 0; i < kGroup; ++i) w[i] += lowest;
}

void unpack_row(const Matrix& m, int64_t row, float* out) {
  const uint8_t* band = m.band(row / kBand);
  const int lane = static_cast<int>(row % kBand);
  for (int64_t at = 0; at < m.cols; at += kGroup) {
    float w[kGroup];
    read_packed_floats(m, band, at / kGroup, lane, w);
    std::memcpy(out + at, w, (m.cols - at < kGroup ? m.cols - at : kGroup) * 4);
  }
}

struct UnpackJob {
  const Matrix& matrix;
  const int64_t* rows;
  int64_t num_rows;
  float* out;
};

void run_unpack(void* context, Team& team, int) {
  const UnpackJob& job = *static_cast<const UnpackJob*>(context);
  for (int64_t i; (i = team.counter(0).take()) < job.num_rows;) {
    unpack_row(job.matrix, job.rows != nullptr ? job.rows[i] : i, job.out + i * job.matrix.cols);
  }
}

}  // namespace

void pack_rows(Format format, SourceType type, const void* source, int64_t cols, const int64_t* rows, int64_t num_rows,
               uint8_t* out) {
  if (num_rows == 0) return;
  int64_t first = rows[0], last = rows[0];
  for (int64_t i = 1; i < num_rows; ++i) {
    first = rows[i] < first ? rows[i] : first;
    last = rows[i] > last ? rows[i] : last;
  }
  first /= kBand, last /= kBand;
  std::vector<const uint8_t*> lanes((last - first + 1) * kBand, nullptr);
  const int64_t stride = row_bytes(type, cols);
  for (int64_t i = 0; i < num_rows; ++i) {
    lanes[rows[i] - first * kBand] = static_cast<const uint8_t*>(source) + i * stride;
  }
  const PackJob job{format, type, cols};
  for (int64_t band = first; band <= last; ++band) {
    const uint8_t* const* rows_of_band = &lanes[(band - first) * kBand];
    // As every second band is of those that a gate is spread over.
    const bool is_empty = std::count(rows_of_band, rows_of_band + kBand, nullptr) == kBand;
    if (!is_empty) pack_band(job, rows_of_band, out + band * band_bytes(format, cols));
  }
}

void unpack_rows(const Matrix& matrix, const int64_t* rows, int64_t num_rows, float* out) {
  UnpackJob job{matrix, rows, num_rows, out};
  run_on_pool(run_unpack, &job);
}

}  // namespace moeflow
