// The layout of a packed weight matrix [rows, cols], in the order of kernels' reads.
//
// The rows (outputs) are split into bands of 16, one output per lane. Each band is stored with k running slowest, so
// that a thread reads one sequential stream and adds up k in order. A lane's sum never depends on other work. The last
// band is filled up with zero rows, k with zeros to a multiple of kGroup.
//
// Each format has a layout of its own within a band (formats.h). Activations come as rows: floats, bf16, or (for
// integer weights) int8 or int16 with a scale and a sum per group.
//
// Included by the instruction sets' units, so its functions are static: as shared symbols, the linker might choose
// a copy with instructions that the processor lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/formats.h"

namespace moeflow {

constexpr int kBand = 16;   // outputs, one a lane
constexpr int kGroup = 32;  // k of activations that share a scale; also what k is filled up to

static inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static inline int64_t padded_cols(int64_t cols) { return round_up(cols, kGroup); }
static inline int64_t num_bands(int64_t rows) { return (rows + kBand - 1) / kBand; }

// Groups that share scales and minima, in a row of weights.
template <typename F>
static inline int64_t num_groups(int64_t cols) {
  return round_up(cols, F::kGroup) / F::kGroup;
}

// Bytes of the scales and minima of a band of so many groups; what follows is aligned to 64 bytes.
template <typename F>
static inline int64_t scale_bytes(int64_t groups) {
  return round_up(groups * F::kNumbers * kBand * 2, 64);
}

static inline int64_t band_bytes(Format format, int64_t cols) {
  return with_format(format, [=](auto it) {
    using F = decltype(it);
    const int64_t groups = num_groups<F>(cols);
    return scale_bytes<F>(groups) + groups * F::kWords * kBand * 4;
  });
}

static inline int64_t matrix_bytes(Format format, int64_t rows, int64_t cols) {
  return num_bands(rows) * band_bytes(format, cols);
}

// What the columns of a matrix must be a multiple of: files have whole blocks.
static inline int64_t column_multiple(Format format) {
  return with_format(format, [](auto it) -> int64_t {
    using F = decltype(it);
    if constexpr (holds_blocks(F::kTile)) return F::Source::kGroup;
    return 1;
  });
}

struct Matrix {
  Format format;
  int64_t rows, cols;
  const uint8_t* data;   // 64-byte aligned
  bool is_wide = false;  // integers meet activations of 16 bits, instead of 8, which are faster

  const uint8_t* band(int64_t index) const { return data + index * band_bytes(format, cols); }
};

// One prepared activation row of `cols` values: [values, filled up to padded_cols] and for integers, behind them,
// for all groups a float scale, the int32 sum of the group's values (which undoes the offset of unsigned weights, and
// meets their minimum), and that of its first 16. Of int16, each four values lie as 0, 2, 1, 3. Always a multiple of 64
// bytes.
static inline int64_t activation_bytes(Activation kind, int64_t cols) {
  const int64_t k = padded_cols(cols);
  switch (kind) {
    case Activation::kF32: return round_up(k * 4, 64);
    case Activation::kBF16: return round_up(k * 2, 64);
    case Activation::kInt8: return round_up(k + k / kGroup * 12, 64);
    case Activation::kInt16: return round_up(k * 2 + k / kGroup * 12, 64);
  }
  return 0;
}

// Prefetches during a tile: none; the tile's own lines ahead and, past their end, the first following ones; or all
// following lines, because its own were read just before.
enum class Fetch : int32_t { kNothing = 0, kOwn = 1, kFollowing = 2 };

// For one of several tiles that read the same bands, one after another.
static inline Fetch fetch_in(bool is_first, bool is_last) {
  if (is_first) return Fetch::kOwn;
  return is_last ? Fetch::kFollowing : Fetch::kNothing;
}

// A tile: some activation rows against some neighbouring bands, results written to out[row][16 * num_bands].
struct Tile {
  const uint8_t* bands;     // first band
  int64_t band_stride;      // bytes from a band to the next
  int num_bands;            // at most kMaxTileBands
  const void* const* rows;  // prepared activation rows
  int num_rows;             // at most kMaxTileRows
  int64_t cols;             // of the matrix, before filling up
  float* out;               // [num_rows][kMaxTileBands * kBand], always this stride
  Fetch fetch;
  const uint8_t* following;  // bands that are likely to be read next, or null
};

constexpr int kMaxTileBands = 4;
constexpr int kMaxTileRows = 32;
constexpr int kTileStride = kMaxTileBands * kBand;

}  // namespace moeflow
