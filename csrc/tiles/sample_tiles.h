// The inner loops of sampling tokens. Values are taken a band at a time and each of its lanes is summed up by itself,
// so that the order is the same however wide registers are:
//
//   x              | 0 .. 15 | 16 .. 31 | 32 .. 47 | ..
//   lane 0 adds      0         16         32         ..    in double; then the lanes are added up, in halves
#pragma once

#include <cstdint>

#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

FORCE_INLINE FloatLanes weigh(FloatLanes x, const Weighing& weighing) {
  const FloatLanes weight = exp_vec((x - weighing.max_logit) * weighing.inverse_temperature);
  return weight >= weighing.least ? weight : FloatLanes{};  // nothing for NaN too
}

// Calls use(band, part, weights of x[band + part * kLanes ...]); beyond the end they are zero.
template <typename Use>
FORCE_INLINE void for_each_weight(const float* x, int64_t count, const Weighing& weighing, const Use& use) {
  int64_t i = 0;
  for (; i + kBand <= count; i += kBand) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      use(i, p, weigh(load_unaligned(x + i + p * kLanes), weighing));
    }
  }
  if (i == count) return;
  float last[kBand];
  for (int lane = 0; lane < kBand; ++lane) last[lane] = i + lane < count ? x[i + lane] : -__builtin_inff();
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    use(i, p, weigh(load_unaligned(last + p * kLanes), weighing));
  }
}

double sum_weights(const float* x, int64_t count, const Weighing& weighing) {
  DoubleLanes sums[kParts][2] = {};
  for_each_weight(x, count, weighing, [&](int64_t, int part, FloatLanes weights) {
    DoubleLanes halves[2];
    to_doubles(weights, halves);
    sums[part][0] += halves[0];
    sums[part][1] += halves[1];
  });
  double lanes[kBand];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  for (int width = kBand / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

void store_weights(const float* x, int64_t count, const Weighing& weighing, float* out) {
  for_each_weight(x, count, weighing, [&](int64_t band, int part, FloatLanes weights) {
    const int64_t first = band + part * kLanes, left = count - first;
    if (left >= kLanes) {
      store_unaligned(out + first, weights);
    } else if (left > 0) {
      __builtin_memcpy(out + first, &weights, left * sizeof(float));
    }
  });
}

void lane_maxima(const float* x, int64_t count, float* out) {
  FloatLanes best[kParts];
  for (FloatLanes& lanes : best) lanes = splat_lanes(-__builtin_inff());
  int64_t i = 0;
  for (; i + kBand <= count; i += kBand) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const FloatLanes v = load_unaligned(x + i + p * kLanes);
      best[p] = v > best[p] ? v : best[p];
    }
  }
  __builtin_memcpy(out, best, sizeof best);
  for (int lane = 0; i < count; ++i, ++lane) out[lane] = x[i] > out[lane] ? x[i] : out[lane];
}

int64_t places_at_least(const float* x, int64_t size, float bound, int32_t* places) {
  const FloatLanes bounds = splat_lanes(bound);
  int64_t found = 0, i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    uint32_t bits = bits_at_least(load_unaligned(x + i), bounds);
    for (; bits != 0; bits &= bits - 1) places[found++] = static_cast<int32_t>(i) + __builtin_ctz(bits);
  }
  for (; i < size; ++i) {
    if (x[i] >= bound) places[found++] = static_cast<int32_t>(i);
  }
  return found;
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
