// The inner loops of attention.
//
// A *row* is one head of one token. Scores have positions as lanes, results have dimensions as lanes. So every lane
// adds up in order (over dimensions, then over positions), and only a row's weights are summed across lanes, once per
// range. Invisible positions are skipped, never multiplied by zero: a row's bits depend on visible ones alone.
#pragma once

#include <cstdint>

#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "ops/kv_cache.h"
#include "formats/matrix.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// kTilePositions: those whose K or V stays near while rows go over it.
#if MOEFLOW_LANES == 16
constexpr int kScoreVecs = 4, kResultVecs = 4, kMaxRows = 6, kTilePositions = 128;
#elif MOEFLOW_LANES == 8
constexpr int kScoreVecs = 2, kResultVecs = 2, kMaxRows = 6, kTilePositions = 64;
#else
constexpr int kScoreVecs = 2, kResultVecs = 2, kMaxRows = 4, kTilePositions = 64;
#endif
// The rest of a head after its last whole vector; head_dim is even.
typedef float EightDims __attribute__((vector_size(32)));
typedef float FourDims __attribute__((vector_size(16)));
typedef float TwoDims __attribute__((vector_size(8)));
constexpr int kDimStep = 8;  // dimensions between two looks ahead

// Where a sequence's K and V of one head lie, by position. The range is looked up once: blocks are found by divisions,
// which would take a quarter of the time of tiles.
template <typename T>
class Positions {
 public:
  const AttentionRange& range;
  const bool has_rows;                        // values are the first dimensions of keys, see kv_cache.h
  const int64_t values_offset, scales_offset;  // in a cell, in values

  explicit Positions(const AttentionRange& r)
      : range(r),
        has_rows(r.cache->latent_dim > 0),
        values_offset(kv_values_offset(*r.cache) / static_cast<int64_t>(sizeof(T))),
        scales_offset(kv_scales_offset(*r.cache) / static_cast<int64_t>(sizeof(T))) {
    for (int64_t position = r.begin; position < r.end; position += kBand) {
      const int64_t at = (position - r.begin) / kBand;
      cells_[at] = cell(position);
      in_block_[at] = position % r.cache->block_size;
    }
  }

  // K of dimension 0 of some neighbouring positions; the next dimension is k_step values on.
  const T* k(int64_t position) const { return cell_of(position) + in_block(position); }
  int64_t k_step() const { return range.cache->block_size; }
  // V of a position, that of the next one head_dim values on; where the cache has rows, K and V.
  const T* v(int64_t position) const {
    return cell_of(position) + values_offset + in_block(position) * range.cache->head_dim;
  }
  // One past the last position whose V lies behind that of `position`.
  static int64_t neighbours_end(int64_t position) { return (position / kBand + 1) * kBand; }
  // The next read after K (or V) of `position`: the next tile's K, then V of the range, then K of the next range. Given
  // for the first position of a block, as the address of that half of a cell; else null.
  const uint8_t* ahead(int64_t position, bool is_v) const {
    if (has_rows || position % range.cache->block_size != 0) return nullptr;
    int64_t next = position + kTilePositions;
    if (next >= range.end) {
      next = range.begin + position % kTilePositions + (is_v ? kRangePositions : 0);
      is_v = !is_v;
      if (next >= (is_v ? range.end : range.following_end)) return nullptr;
    }
    const T* const from = cell(next) + (is_v ? values_offset : 0);
    return reinterpret_cast<const uint8_t*>(from);
  }
  // Bytes of K or V of a block that belong to some dimensions, or as many.
  int64_t dim_bytes(int64_t num_dims) const {
    return num_dims * range.cache->block_size * static_cast<int64_t>(sizeof(T));
  }
  // Scales of K of neighbouring positions, or, where the cache has rows, of their first dimensions and, block_size values
  // on, of the rest; and of V. INT8 only.
  const float* scales(int64_t position) const {
    return reinterpret_cast<const float*>(cell_of(position) + scales_offset) + in_block(position);
  }
  const float* value_scales(int64_t position) const {
    return scales(position) + (has_rows ? 0 : range.cache->block_size);
  }

 private:
  const T* cells_[kRangePositions / kBand];  // of each 16 positions, as many as a block is a multiple of
  int64_t in_block_[kRangePositions / kBand];

  const T* cell(int64_t position) const {
    const int64_t block = range.block_table[position / range.cache->block_size];
    return reinterpret_cast<const T*>(kv_cell(*range.cache, block, range.head));
  }
  const T* cell_of(int64_t position) const { return cells_[(position - range.begin) / kBand]; }
  int64_t in_block(int64_t position) const {
    return in_block_[(position - range.begin) / kBand] + (position - range.begin) % kBand;
  }
};

// ---- keys as rows: transposed once for all rows that go over a tile ----

// K of a tile of kKeyPositions as floats, [head_dim][kKeyPositions], in the place of what the cache has.
class TransposedKeys {
 public:
  TransposedKeys(const float* keys, int64_t begin) : keys_(keys - begin) {}
  const float* k(int64_t position) const { return keys_ + position; }
  static int64_t k_step() { return kKeyPositions; }
  static const uint8_t* ahead(int64_t, bool) { return nullptr; }
  static int64_t dim_bytes(int64_t) { return 0; }

 private:
  const float* keys_;
};

// Some dimensions of kLanes positions, from `row` on, to where they lie by dimension; `scales` for INT8.
template <typename T>
FORCE_INLINE void transpose_dims(const T* row, int64_t row_values, int64_t dim, int64_t end, const float* scales,
                                 float* keys) {
  for (; dim + kLanes <= end; dim += kLanes) {
    FloatLanes square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = load_as<FloatLanes>(row + i * row_values + dim);
      if constexpr (sizeof(T) == 1) square[i] *= scales[i];
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store_as_floats(keys + (dim + i) * kKeyPositions, square[i]);
  }
  for (; dim < end; dim += 2) {
    for (int i = 0; i < kLanes; ++i) {
      const TwoDims pair = load_as<TwoDims>(row + i * row_values + dim);
      for (int d = 0; d < 2; ++d) {
        keys[(dim + d) * kKeyPositions + i] = sizeof(T) == 1 ? pair[d] * scales[i] : pair[d];
      }
    }
  }
}

// `first` is where some kLanes positions begin.
template <typename T>
void transpose_keys(const Positions<T>& at, int64_t begin, int64_t first, int64_t stop) {
  const AttentionRange& range = at.range;
  const int64_t dim = range.cache->head_dim, latent = range.cache->latent_dim;
  for (int64_t position = first; position < stop; position += kLanes) {
    float* const keys = range.keys + (position - begin);
    const float* const scales = sizeof(T) == 1 ? at.scales(position) : nullptr;
    transpose_dims(at.v(position), dim, 0, latent, scales, keys);
    transpose_dims(at.v(position), dim, latent, dim, sizeof(T) == 1 ? scales + range.cache->block_size : nullptr, keys);
  }
}

// ---- scores: R rows by P vectors of positions --------------------------------------------------------------

// A step is one dimension: K of neighbouring positions, and one number of each row's query, which all lanes are
// multiplied by. K lies transposed in its block, [head_dim][block_size], so that positions are neighbours, or in the
// tile that it was transposed into.
//
//   lane                     position 0     1     ..  kLanes-1    kLanes ..              (from `position` on)
//   memory, dimension d      k[0][d]  k[1][d]  ..               | next vector            P vectors
//                              x        x                            x
//   row r: q[r][d]           acc[r][0]: a score each lane       | acc[r][1]              acc += k * q, d = 0, 1, 2, ..
//
// Scores go to scores[r][position], from where weigh_rows makes weights of them.
template <int R, int P, typename Keys>
void score_tile(const AttentionRange& range, const Keys& at, int first_row, int64_t position) {
  const int64_t dim = range.cache->head_dim, step = at.k_step();
  const float* q = range.q + first_row * range.stride;
  decltype(at.k(position)) k[P];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) k[p] = at.k(position + p * kLanes);
  const uint8_t* next[P] = {};
  if (first_row == 0) {
    for (int p = 0; p < P; ++p) next[p] = at.ahead(position + p * kLanes, false);
  }
  FloatLanes acc[R][P] = {};
  for (int64_t d = 0; d < dim;) {
    for (int p = 0; p < P; ++p) {
      if (next[p] != nullptr) prefetch(next[p], at.dim_bytes(d), at.dim_bytes(d + kDimStep));
    }
#pragma GCC unroll 1
    for (const int64_t stop = d + kDimStep < dim ? d + kDimStep : dim; d < stop; ++d) {
      FloatLanes keys[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) keys[p] = load_as<FloatLanes>(k[p] + d * step);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const FloatLanes x = q[r * range.stride + d] - FloatLanes{};
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[r][p] += keys[p] * x;
      }
    }
  }
  float* scores = range.scores + first_row * kRangePositions + (position - range.begin);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store_as_floats(scores + r * kRangePositions + p * kLanes, acc[r][p]);
}

template <int R, typename Keys>
void score_rows(const AttentionRange& range, const Keys& at, int first_row, int64_t begin, int64_t end) {
  for (; end - begin > (kScoreVecs - 1) * kLanes; begin += kScoreVecs * kLanes) {
    score_tile<R, kScoreVecs>(range, at, first_row, begin);
  }
  for (; begin < end; begin += kLanes) score_tile<R, 1>(range, at, first_row, begin);
}

// ---- weights: the softmax of rows within the range ------------------------------------------------------------

FORCE_INLINE bool sees(const AttentionRow& row, int64_t position) {
  if (position < row.hi) return position >= row.lo;
  const int64_t bit = position - row.tree_begin;
  return bit >= 0 && bit < 64 && (row.tree_bits >> bit & 1) != 0;
}

// The place that a token of the row's branch has on it: which position it would have if nothing else were there.
FORCE_INLINE int64_t place_on_branch(const AttentionRow& row, int64_t position) {
  const uint64_t before = row.tree_bits & ((uint64_t{1} << (position - row.tree_begin)) - 1);
  return row.tree_place + __builtin_popcountll(before);
}

// Biases of the scores of neighbouring positions.
FORCE_INLINE FloatLanes biases(const AttentionRow& row, int64_t position) {
  const int64_t distance = position - row.position, reach = row.bias_reach;
  if (distance >= -reach && distance + kLanes - 1 <= reach) return load_as<FloatLanes>(row.bias + distance);
  FloatLanes values;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t at = distance + lane;
    values[lane] = row.bias[at < -reach ? -reach : at > reach ? reach : at];
  }
  return values;
}

// cap * tanh(scores / cap)
FORCE_INLINE FloatLanes capped(FloatLanes scores, float cap) {
  const FloatLanes size = scores < 0.0f ? -scores : scores;
  const FloatLanes falling = exp_vec(size * (-2.0f / cap));
  const FloatLanes tanh = (1.0f - falling) / (1.0f + falling);
  return (scores < 0.0f ? -tanh : tanh) * cap;
}

// The vectors of a range from the first position that a row sees to the last, and those of them that it sees in all
// lanes and not as a branch of a tree.
struct SeenVectors {
  int64_t begin, whole_begin, whole_end, end;

  SeenVectors(const AttentionRange& range, const AttentionRow& row) {
    const int64_t lo = row.lo > range.begin ? row.lo : range.begin;
    const int64_t hi = (row.hi < range.end ? row.hi : range.end) / kLanes * kLanes;
    const int64_t stop = round_up(row.stop < range.end ? row.stop : range.end, kLanes);
    begin = lo / kLanes * kLanes;
    end = stop > begin ? stop : begin;
    whole_begin = round_up(lo, kLanes) < end ? round_up(lo, kLanes) : end;
    whole_end = hi > whole_begin ? hi : whole_begin;
  }
};

// From products to scores; lanes of what the row does not see become -infinity.
template <typename T>
FORCE_INLINE void finish_scores(const Positions<T>& at, const AttentionRow& row, const SeenVectors& seen,
                                float* scores) {
  const AttentionRange& range = at.range;
  const bool has_scales = sizeof(T) == 1 && !at.has_rows;
  if (has_scales || range.soft_cap > 0 || row.bias != nullptr) {
    for (int64_t position = seen.begin; position < seen.end; position += kLanes) {
      FloatLanes values = load_as<FloatLanes>(scores + position);
      if (has_scales) values *= load_as<FloatLanes>(at.scales(position));
      if (range.soft_cap > 0) values = capped(values, range.soft_cap);
      if (row.bias != nullptr) values += biases(row, position) * kLog2E;
      store_as_floats(scores + position, values);
    }
  }
  const auto hide = [&](int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end; ++position) {
      if (!sees(row, position)) scores[position] = -__builtin_inff();
    }
  };
  hide(seen.begin, seen.whole_begin);
  hide(seen.whole_end, seen.end);
}

FORCE_INLINE float largest_score(const SeenVectors& seen, const float* scores) {
  FloatLanes max = splat_lanes(-__builtin_inff());
  for (int64_t position = seen.begin; position < seen.end; position += kLanes) {
    max = larger(load_as<FloatLanes>(scores + position), max);
  }
  return fold_lanes(max, [](FloatLanes a, FloatLanes b) { return larger(a, b); })[0];
}

// Weights of neighbouring positions, zero in the lanes of what the row does not see. They are added to `sums` in the
// lanes where a branch's tokens will be once they lie in a row.
FORCE_INLINE FloatLanes weigh_some(const AttentionRow& row, int64_t position, FloatLanes scores, FloatLanes& sums) {
  FloatLanes weights = exp2_up_to_zero(scores);
  float lanes[kLanes];  // in memory, so that the sums of whole vectors can stay in a register
  __builtin_memcpy(lanes, &sums, sizeof(sums));
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t at = position + lane;
    if (!sees(row, at)) {
      weights[lane] = 0.0f;
    } else {
      lanes[(at < row.hi ? at : place_on_branch(row, at)) % kLanes] += weights[lane];
    }
  }
  __builtin_memcpy(&sums, lanes, sizeof(sums));
  return weights;
}

// Replace the scores of visible positions by 2^(score - max); zero in the other lanes. Returns their sum.
template <typename T>
FORCE_INLINE float weigh(const Positions<T>& at, const AttentionRow& row, const SeenVectors& seen, float max,
                         float* scores) {
  FloatLanes sums = {};
  const auto store = [&](int64_t position, FloatLanes weights) {
    if constexpr (sizeof(T) == 1) weights *= load_as<FloatLanes>(at.value_scales(position));
    store_as_floats(scores + position, weights);
  };
  const auto weigh_each = [&](int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end; position += kLanes) {
      store(position, weigh_some(row, position, load_as<FloatLanes>(scores + position) - max, sums));
    }
  };
  weigh_each(seen.begin, seen.whole_begin);
  for (int64_t position = seen.whole_begin; position < seen.whole_end; position += kLanes) {
    const FloatLanes weights = exp2_up_to_zero(load_as<FloatLanes>(scores + position) - max);
    sums += weights;
    store(position, weights);
  }
  weigh_each(seen.whole_end, seen.end);
  return fold_lanes(sums, [](FloatLanes a, FloatLanes b) { return a + b; })[0];
}

// All maxima come first: each is known late, and the rows' do not wait for each other.
template <typename T>
void weigh_rows(const Positions<T>& at, int first_row, int num_rows) {
  const AttentionRange& range = at.range;
  float* const scores = range.scores - range.begin;
  for (int r = first_row; r < first_row + num_rows; ++r) {
    const SeenVectors seen(range, range.rows[r]);
    finish_scores(at, range.rows[r], seen, scores + r * kRangePositions);
    range.max[r] = largest_score(seen, scores + r * kRangePositions);
  }
  for (int r = first_row; r < first_row + num_rows; ++r) {
    const SeenVectors seen(range, range.rows[r]);
    range.sum[r] = weigh(at, range.rows[r], seen, range.max[r], scores + r * kRangePositions);
  }
}

// ---- results: R rows by some vectors of dimensions ------------------------------------------------------------

// A step is one position: V of neighbouring dimensions, and its weight for each row, which all lanes are multiplied by.
//
//   lane                     dimension dim   +1   ..  kWidth-1    kWidth ..
//   memory, position p       v[p][dim] v[p][dim+1] ..           | next vector            D vectors
//                              x        x                            x
//   row r: weight[r][p]      acc[r][0]: a result each lane      | acc[r][1]              acc += v * weight, p ascending
//
// What was added for earlier positions is loaded first and stored back at the end.
template <int R, int D, typename V, typename T>
FORCE_INLINE void add_dims(const Positions<T>& at, int first_row, int64_t dim, int64_t begin, int64_t end) {
  constexpr int kWidth = sizeof(V) / 4;
  const AttentionRange& range = at.range;
  const int64_t head_dim = range.cache->head_dim;
  float* const out = range.out + first_row * range.stride + dim;
  const float* const weights = range.scores + first_row * kRangePositions - range.begin;
  V acc[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) acc[r][d] = load_as<V>(out + r * range.stride + d * kWidth);
  while (begin < end) {
    const T* v = at.v(begin) + dim;
    const int64_t neighbours_end = at.neighbours_end(begin), stop = neighbours_end < end ? neighbours_end : end;
    if (first_row == 0) {
      const uint8_t* const next = at.ahead(begin, true);
      if (next != nullptr) prefetch(next, at.dim_bytes(dim), at.dim_bytes(dim + D * kWidth));
    }
    for (; begin < stop; ++begin, v += head_dim) {
      V values[D];
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) values[d] = load_as<V>(v + d * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const V weight = weights[r * kRangePositions + begin] - V{};
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d) acc[r][d] += values[d] * weight;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) store_as_floats(out + r * range.stride + d * kWidth, acc[r][d]);
}

// Some dimensions from `dim` on, if the head has as many left.
template <int R, typename V, typename T>
FORCE_INLINE void add_rest(const Positions<T>& at, int first_row, int64_t& dim, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = sizeof(V) / 4;
  if (dim + kWidth > at.range.cache->value_dim()) return;
  add_dims<R, 1, V>(at, first_row, dim, begin, end);
  dim += kWidth;
}

// out += weight * V over positions that all R rows see.
template <int R, typename T>
void add_positions(const Positions<T>& at, int first_row, int64_t begin, int64_t end) {
  const int64_t value_dim = at.range.cache->value_dim();
  int64_t dim = 0;
  for (; dim + kResultVecs * kLanes <= value_dim; dim += kResultVecs * kLanes) {
    add_dims<R, kResultVecs, FloatLanes>(at, first_row, dim, begin, end);
  }
  for (; dim + kLanes <= value_dim; dim += kLanes) add_dims<R, 1, FloatLanes>(at, first_row, dim, begin, end);
  if constexpr (kLanes > 8) add_rest<R, EightDims>(at, first_row, dim, begin, end);
  if constexpr (kLanes > 4) add_rest<R, FourDims>(at, first_row, dim, begin, end);
  add_rest<R, TwoDims>(at, first_row, dim, begin, end);
}

// CALL(R) with the number of rows, up to kMaxRows, as a constant.
#define MOEFLOW_WITH_ROWS(num_rows, CALL) \
  switch (num_rows) {                     \
    case 1: CALL(1); break;               \
    case 2: CALL(2); break;               \
    case 3: CALL(3); break;               \
    case 4: CALL(4); break;               \
    case 5:                               \
      if constexpr (kMaxRows >= 5) {      \
        CALL(5);                          \
      }                                   \
      break;                              \
    case 6:                               \
      if constexpr (kMaxRows >= 6) {      \
        CALL(6);                          \
      }                                   \
      break;                              \
  }

template <typename T>
void add_rows(const Positions<T>& at, int first_row, int num_rows, int64_t begin, int64_t end) {
  const AttentionRow* const rows = at.range.rows + first_row;
  int64_t lo[kMaxRows], hi[kMaxRows], all_lo = begin, all_hi = end;
  for (int r = 0; r < num_rows; ++r) {
    lo[r] = rows[r].lo > begin ? rows[r].lo : begin;
    hi[r] = rows[r].hi < end ? rows[r].hi : end;
    all_lo = lo[r] > all_lo ? lo[r] : all_lo;
    all_hi = hi[r] < all_hi ? hi[r] : all_hi;
  }
  if (all_lo >= all_hi) all_lo = all_hi = begin;  // nothing in common: each row by itself
  for (int r = 0; r < num_rows; ++r) {
    if (lo[r] < all_lo) add_positions<1>(at, first_row + r, lo[r], all_lo);
  }
  if (all_lo < all_hi) {
#define MOEFLOW_ADD(R) add_positions<R>(at, first_row, all_lo, all_hi)
    MOEFLOW_WITH_ROWS(num_rows, MOEFLOW_ADD)
#undef MOEFLOW_ADD
  }
  for (int r = 0; r < num_rows; ++r) {
    const int64_t rest = lo[r] > all_hi ? lo[r] : all_hi;
    if (rest < hi[r]) add_positions<1>(at, first_row + r, rest, hi[r]);
    if (rows[r].tree_bits == 0) continue;
    for (int64_t position = rows[r].tree_begin > begin ? rows[r].tree_begin : begin; position < end; ++position) {
      if (position >= rows[r].hi && sees(rows[r], position)) {
        add_positions<1>(at, first_row + r, position, position + 1);
      }
    }
  }
}

// ---- a range ------------------------------------------------------------------------------------------------------

// What some rows see of positions [begin, end) or, if that is less, of the range: [first, stop), from the beginning of a
// vector on.
struct Seen {
  int64_t first, stop;

  Seen(const AttentionRange& range, int64_t begin, int64_t end, int first_row, int num_rows) {
    int64_t lo = range.end;
    stop = begin;
    for (int r = first_row; r < first_row + num_rows; ++r) {
      lo = range.rows[r].lo < lo ? range.rows[r].lo : lo;
      stop = range.rows[r].stop > stop ? range.rows[r].stop : stop;
    }
    const int64_t last = end < range.end ? end : range.end;
    first = lo > begin ? lo / kLanes * kLanes : begin;
    stop = stop < last ? stop : last;
  }
};

template <typename Keys>
void score(const AttentionRange& range, const Keys& keys, int64_t begin, int64_t end, int tile_rows) {
  for (int row = 0; row < range.num_rows; row += tile_rows) {
    const int count = range.num_rows - row < tile_rows ? range.num_rows - row : tile_rows;
    const Seen seen(range, begin, end, row, count);
#define MOEFLOW_SCORE(R) score_rows<R>(range, keys, row, seen.first, seen.stop)
    MOEFLOW_WITH_ROWS(count, MOEFLOW_SCORE)
#undef MOEFLOW_SCORE
  }
}

template <typename T>
void attend_as(const AttentionRange& range) {
  const Positions<T> at(range);
  const int num_tiles = (range.num_rows + kMaxRows - 1) / kMaxRows;
  const int tile_rows = (range.num_rows + num_tiles - 1) / num_tiles;
  const int64_t score_positions = at.has_rows ? kKeyPositions : kTilePositions;
  for (int64_t begin = range.begin; begin < range.end; begin += score_positions) {
    const int64_t end = begin + score_positions;
    if (!at.has_rows) {
      score(range, at, begin, end, tile_rows);
      continue;
    }
    const Seen seen(range, begin, end, 0, range.num_rows);
    transpose_keys(at, begin, seen.first, seen.stop);
    score(range, TransposedKeys(range.keys, begin), begin, end, tile_rows);
  }
  for (int row = 0; row < range.num_rows; row += tile_rows) {
    weigh_rows(at, row, range.num_rows - row < tile_rows ? range.num_rows - row : tile_rows);
  }
  __builtin_memset(range.out, 0, range.num_rows * range.stride * sizeof(float));
  for (int64_t begin = range.begin; begin < range.end; begin += kTilePositions) {
    const int64_t last = begin + kTilePositions < range.end ? begin + kTilePositions : range.end;
    for (int row = 0; row < range.num_rows; row += tile_rows) {
      const int count = range.num_rows - row < tile_rows ? range.num_rows - row : tile_rows;
      add_rows(at, row, count, begin, last);
    }
  }
}

void attend(const AttentionRange& range) {
  switch (range.cache->format) {
    case Format::kF32: return attend_as<float>(range);
    case Format::kBF16: return attend_as<uint16_t>(range);
    default: return attend_as<int8_t>(range);
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
