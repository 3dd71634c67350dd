// From the rows of a checkpoint to bands and back. A group of one output is first written as words: the four bytes of
// this lane in each 64-byte line. Then 16 lanes are interleaved.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "formats/formats.h"
#include "formats/matrix.h"
#include "ops/ops.h"
#include "ops/rows.h"
#include "formats/source_types.h"

namespace moeflow {
namespace {

// ---- one group of one lane ----

template <typename F>
struct LaneGroup {
  uint16_t numbers[F::kNumbers > 0 ? F::kNumbers : 1];
  uint32_t words[F::kWords];  // what the lane has in each 64-byte line
};

// Whether a format can be made from a source type: block formats only from their own.
template <typename F, typename Source>
constexpr bool can_make() {
  if constexpr (holds_blocks(F::kTile)) return std::is_same_v<Source, typename F::Source>;
  return true;
}

// The blocks from column k on. At the end of a row zeros follow: a block of zero bytes.
template <typename F>
void keep_blocks(const uint8_t* row, int64_t k, int64_t cols, LaneGroup<F>& to) {
  using Source = typename F::Source;
  const uint8_t* from = source::at<Source>(row, k);
  uint8_t filled_up[F::kGroup / Source::kGroup * Source::kBytes] = {};
  if (cols - k < F::kGroup) {
    std::memcpy(filled_up, from, (cols - k) / Source::kGroup * Source::kBytes);
    from = filled_up;
  }
  F::keep(from, to.numbers, to.words);
}

// Access to rows of a type, from column k on: a whole group unchanged, or false; or `count` floats. As
// pointers: every format beside every type took three times as long to compile, and everybody who installs waits for it.
template <typename F>
struct RowType {
  bool (*keep)(const uint8_t* row, int64_t k, LaneGroup<F>& to);
  void (*read)(const uint8_t* row, int64_t k, int64_t count, float* w);
};

// The count is mostly a constant, which GCC exploits.
template <typename Source>
void read_floats(const uint8_t* row, int64_t k, int64_t count, float* w) {
  if (count == kGroup) return Source::read(row, k, kGroup, w);
  Source::read(row, k, count, w);
}

template <typename F, typename Source>
bool keep_group(const uint8_t* row, int64_t k, LaneGroup<F>& to) {
  return F::keep(Source{}, source::at<Source>(row, k), to.numbers, to.words);
}

// From column k on. At the end of a row zeros follow.
template <typename F>
void make_group(const RowType<F>& type, const uint8_t* row, int64_t k, int64_t cols, LaneGroup<F>& to) {
  const int64_t left = cols - k;
  float w[F::kGroup];
  if (left >= F::kGroup) {
    if (type.keep(row, k, to)) return;
    type.read(row, k, F::kGroup, w);
  } else {
    type.read(row, k, left, w);
    for (int64_t i = left; i < F::kGroup; ++i) w[i] = 0;
  }
  F::round(w, to.numbers, to.words);
}

// ---- lanes side by side ----

// lines[word][lane] = groups[lane].words[word]
template <typename F>
void transpose(const LaneGroup<F>* groups, uint32_t* lines) {
  constexpr int kInFours = F::kWords / 4 * 4;
  for (int64_t word = 0; word < kInFours; word += 4) {
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
  for (int word = kInFours; word < F::kWords; ++word) {
    for (int lane = 0; lane < kBand; ++lane) lines[word * kBand + lane] = groups[lane].words[word];
  }
}

// Write the lanes that have a row; the others stay as they are, since another call may have brought them.
template <typename F>
void pack_band([[maybe_unused]] const RowType<F>& type, const uint8_t* const* rows, int64_t cols, uint8_t* band) {
  const bool is_whole = std::find(rows, rows + kBand, nullptr) == rows + kBand;
  uint16_t* numbers = reinterpret_cast<uint16_t*>(band);
  uint32_t* lines = reinterpret_cast<uint32_t*>(band + scale_bytes<F>(num_groups<F>(cols)));
  LaneGroup<F> groups[kBand];
  for (int64_t k = 0; k < cols; k += F::kGroup, numbers += F::kNumbers * kBand, lines += F::kWords * kBand) {
    for (int lane = 0; lane < kBand; ++lane) {
      if (rows[lane] == nullptr) continue;
      const LaneGroup<F>& group = groups[lane];
      if constexpr (holds_blocks(F::kTile)) {
        keep_blocks<F>(rows[lane], k, cols, groups[lane]);
      } else {
        make_group(type, rows[lane], k, cols, groups[lane]);
      }
      for (int i = 0; i < F::kNumbers; ++i) numbers[i * kBand + lane] = group.numbers[i];
      for (int i = 0; i < F::kWords && !is_whole; ++i) lines[i * kBand + lane] = group.words[i];
    }
    if (is_whole) transpose(groups, lines);
  }
}

[[noreturn]] void refuse(const char* format, const char* type) {
  throw std::invalid_argument(std::string(format) + " weights are kept as files have them, not made of " + type);
}

template <typename F, typename Source>
RowType<F> row_type_of() {
  if constexpr (!can_make<F, Source>()) {
    refuse(F::kName, Source::kName);
  } else if constexpr (holds_blocks(F::kTile)) {
    return {};
  } else {
    return {keep_group<F, Source>, read_floats<Source>};
  }
}

// ---- and back ----

template <typename F>
void unpack_row(const uint8_t* band, int lane, int64_t cols, float* out) {
  const uint16_t* numbers = reinterpret_cast<const uint16_t*>(band) + lane;
  const uint32_t* lines = reinterpret_cast<const uint32_t*>(band + scale_bytes<F>(num_groups<F>(cols))) + lane;
  for (int64_t k = 0; k < cols; k += F::kGroup, numbers += F::kNumbers * kBand, lines += F::kWords * kBand) {
    LaneGroup<F> group;
    for (int i = 0; i < F::kNumbers; ++i) group.numbers[i] = numbers[i * kBand];
    for (int i = 0; i < F::kWords; ++i) group.words[i] = lines[i * kBand];
    float w[F::kGroup];
    F::read(group.numbers, group.words, w);
    std::memcpy(out + k, w, (cols - k < F::kGroup ? cols - k : F::kGroup) * sizeof(float));
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
  with_format(format, [&](auto as) {
    using F = decltype(as);
    const RowType<F> row_type = with_source_type(type, [](auto from) { return row_type_of<F, decltype(from)>(); });
    for (int64_t band = first; band <= last; ++band) {
      const uint8_t* const* rows_of_band = &lanes[(band - first) * kBand];
      // A gate is spread over every second band.
      const bool is_empty = std::count(rows_of_band, rows_of_band + kBand, nullptr) == kBand;
      if (!is_empty) pack_band(row_type, rows_of_band, cols, out + band * band_bytes(format, cols));
    }
  });
}

void copy_rows(const Matrix& from, const int64_t* rows, int64_t num_rows, uint8_t* out) {
  with_format(from.format, [&](auto it) {
    using F = decltype(it);
    const int64_t groups = num_groups<F>(from.cols), bytes = band_bytes(from.format, from.cols);
    const auto copy = [](const auto* source, int source_lane, auto* to, int lane, int64_t count) {
      for (int64_t i = 0; i < count; ++i) to[i * kBand + lane] = source[i * kBand + source_lane];
    };
    for (int64_t i = 0; i < num_rows; ++i) {
      const uint8_t* const source = from.band(rows[i] / kBand);
      uint8_t* const to = out + i / kBand * bytes;
      const int source_lane = static_cast<int>(rows[i] % kBand), lane = static_cast<int>(i % kBand);
      copy(reinterpret_cast<const uint16_t*>(source), source_lane, reinterpret_cast<uint16_t*>(to), lane,
           groups * F::kNumbers);
      copy(reinterpret_cast<const uint32_t*>(source + scale_bytes<F>(groups)), source_lane,
           reinterpret_cast<uint32_t*>(to + scale_bytes<F>(groups)), lane, groups * F::kWords);
    }
  });
}

void unpack_rows(const Matrix& matrix, const int64_t* rows, int64_t num_rows, float* out) {
  with_format(matrix.format, [&](auto it) {
    using F = decltype(it);
    for_each_row(num_rows, matrix.cols, [&](int64_t i) {
      const int64_t row = rows != nullptr ? rows[i] : i;
      unpack_row<F>(matrix.band(row / kBand), static_cast<int>(row % kBand), matrix.cols, out + i * matrix.cols);
    });
  });
}

}  // namespace moeflow
