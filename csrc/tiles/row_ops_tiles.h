// The inner loops of operations on one row. Sums over a row run in one fixed order, so a row's bits do not depend on
// its batch.
#pragma once

#include <cstdint>

#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// The mean of what `of(place, count)` returns of kLanes numbers of a row, or of the `count` that are left, the others
// zero. Bands are added up in four chains, so that additions need not wait for each other; then lanes.
//
//   row       | 0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63 | 64 .. 79 | ..
//   adds to   | sums[0] | sums[1]  | sums[2]  | sums[3]  | sums[0]  | ..     lane by lane
template <typename Of>
FORCE_INLINE float mean_of(int64_t size, const Of& of) {
  constexpr int kChains = 4;
  FloatLanes sums[kChains][kParts] = {};
  int64_t i = 0;
  for (; i + kChains * kBand <= size; i += kChains * kBand) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) sums[chain][p] += of(i + chain * kBand + p * kLanes, kLanes);
  }
  for (; i < size; i += kBand) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) sums[0][p] += of(i + p * kLanes, size - i - p * kLanes);
  }
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) sums[0][p] = (sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p]);
  return sum_band(sums[0]) / static_cast<float>(size);
}

float inverse_rms(const float* x, int64_t size, float eps) {
  const float mean = mean_of(size, [&](int64_t i, int64_t count) {
    const FloatLanes v = load_some(x + i, count);
    return v * v;
  });
  return 1.0f / __builtin_sqrtf(mean + eps);
}

void scale_row(const float* x, float scale, const float* weight, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    store_some(out + i, load_some(x + i, size - i) * scale * load_some(weight + i, size - i), size - i);
  }
}

// Missing terms are not added, not even as zero, which would lose the sign of a negative zero.
FORCE_INLINE FloatLanes plus_some(FloatLanes v, const float* given, int64_t at, int64_t left) {
  return given == nullptr ? v : v + load_some(given + at, left);
}

// The mean goes before squares are summed up: of a row far from zero nothing would be left of their difference.
void layer_norm_row(const float* x, float eps, const float* weight, const float* bias, int64_t size, float* out) {
  const float mean = mean_of(size, [&](int64_t i, int64_t count) { return load_some(x + i, count); });
  const float variance = mean_of(size, [&](int64_t i, int64_t count) {
    FloatLanes v = load_some(x + i, count) - mean;
    for (int64_t lane = count > 0 ? count : 0; lane < kLanes; ++lane) v[lane] = 0;
    return v * v;
  });
  const float scale = 1.0f / __builtin_sqrtf(variance + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t left = size - i;
    const FloatLanes scaled = (load_some(x + i, left) - mean) * scale * load_some(weight + i, left);
    store_some(out + i, plus_some(scaled, bias, i, left), left);
  }
}

void add_row(const float* x, const float* bias, const float* residual, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const FloatLanes biased = plus_some(load_some(x + i, size - i), bias, i, size - i);
    store_some(out + i, plus_some(biased, residual, i, size - i), size - i);
  }
}

void add_weighted_row(const float* x, const float* bias, float weight, int64_t size, float* sum) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const FloatLanes product = rounded(plus_some(load_some(x + i, size - i), bias, i, size - i) * weight);
    store_some(sum + i, load_some(sum + i, size - i) + product, size - i);
  }
}

void clip_row(const float* x, float limit, int64_t size, float* out) {
  const FloatLanes high = splat_lanes(limit), low = splat_lanes(-limit);
  for (int64_t i = 0; i < size; i += kLanes) {
    FloatLanes v = load_some(x + i, size - i);
    v = v > high ? high : v;
    v = v < low ? low : v;
    store_some(out + i, v, size - i);
  }
}

// Of the first half of a row and of the second, numbers at the same place are turned against each other.
//
//   x      | first: 0 .. half - 1               | second: half .. size - 1           |
//   out    | first * cos + second * sin         | second * cos + first * sin         |   cos and sin at the same place
void rotate_row(const float* x, const float* cos, const float* sin, int64_t size, float* out) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const FloatLanes first = load_some(x + i, left), second = load_some(x + half + i, left);
    store_some(out + i, first * load_some(cos + i, left) + second * load_some(sin + i, left), left);
    store_some(out + half + i, second * load_some(cos + half + i, left) + first * load_some(sin + half + i, left),
               left);
  }
}

// Each lane holds the maximum of every so many values and the first place where it was met:
//
//   x          | 0 .. L-1 | L .. 2L-1 | 2L .. 3L-1 | 3L .. 4L-1 | 4L .. 5L-1 | ..     L: kLanes
//   compared   | best[0]  | best[1]   | best[2]    | best[3]    | best[0]    | ..     lane by lane
//
// Of lanes with the same maximum the lowest place is the row's.
Argmax argmax_row(const float* x, int64_t size) {
  typedef int32_t Places __attribute__((vector_size(sizeof(FloatLanes))));
  constexpr int kChains = 4;
  FloatLanes best[kChains], spoiled = {};  // NaN once a lane has met one
  Places place[kChains] = {};
  for (FloatLanes& lanes : best) lanes = -__builtin_inff() - FloatLanes{};
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) {
      const FloatLanes v = load_unaligned(x + i + chain * kLanes);
      const Places is_larger = v > best[chain];
      best[chain] = is_larger ? v : best[chain];
      place[chain] = is_larger ? Places{} + static_cast<int32_t>(i + chain * kLanes) : place[chain];
      spoiled = v == v ? spoiled : v;
    }
  }
  Argmax max{-__builtin_inff(), 0};
  for (int chain = 0; chain < kChains; ++chain) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t index = place[chain][lane] + lane;
      const float value = best[chain][lane];
      if (value > max.value || (value == max.value && index < max.index)) max = {value, index};
    }
  }
  for (; i < size; ++i) {
    if (x[i] > max.value) max = {x[i], i};
    if (!(x[i] == x[i])) max.value = x[i];  // and stays: nothing is larger than NaN
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(spoiled[lane] == spoiled[lane])) max.value = spoiled[lane];
  }
  return max;
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
