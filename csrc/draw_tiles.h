// The inner loops of drawing tokens, part of each instruction set's unit (see tiles.h). Values are taken a band at a
// time and each of its lanes is summed up by itself, so that the order is the same however wide registers are.

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

typedef FloatLanes UnalignedLanes __attribute__((aligned(4), may_alias));
typedef double DoubleLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));  // half of the lanes

FORCE_INLINE void widen(FloatLanes v, DoubleLanes (&halves)[2]) {
#if defined(__AVX512F__)
  halves[0] = (DoubleLanes)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
  halves[1] = (DoubleLanes)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
  halves[0] = (DoubleLanes)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  halves[1] = (DoubleLanes)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#elif defined(__SSE2__)
  halves[0] = (DoubleLanes)_mm_cvtps_pd((__m128)v);
  halves[1] = (DoubleLanes)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v));
#else
  for (int i = 0; i < kLanes; ++i) halves[i / (kLanes / 2)][i % (kLanes / 2)] = v[i];
#endif
}

// A bit for each lane that is at least `bound`; none for NaN.
FORCE_INLINE uint32_t bits_at_least(FloatLanes v, FloatLanes bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)bound, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)bound, _CMP_GE_OQ)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpge_ps((__m128)v, (__m128)bound)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(v[i] >= bound[i]) << i;
  return bits;
#endif
}

FORCE_INLINE FloatLanes weigh(FloatLanes x, const Weighing& weighing) {
  const FloatLanes weight = exp_vec((x - weighing.largest) * weighing.inverse_temperature);
  return weight >= weighing.least ? weight : FloatLanes{};  // nothing for NaN too
}

// Calls use(band, part, weights of x[band + part * kLanes ...]); beyond the end they are zero.
template <typename Use>
FORCE_INLINE void for_each_weight(const float* x, int64_t count, const Weighing& weighing, const Use& use) {
  int64_t i = 0;
  for (; i + kBand <= count; i += kBand) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      use(i, p, weigh(*reinterpret_cast<const UnalignedLanes*>(x + i + p * kLanes), weighing));
    }
  }
  if (i == count) return;
  float last[kBand];
  for (int lane = 0; lane < kBand; ++lane) last[lane] = i + lane < count ? x[i + lane] : -__builtin_inff();
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    use(i, p, weigh(*reinterpret_cast<const UnalignedLanes*>(last + p * kLanes), weighing));
  }
}

double sum_weights(const float* x, int64_t count, const Weighing& weighing) {
  DoubleLanes sums[kParts][2] = {};
  for_each_weight(x, count, weighing, [&](int64_t, int part, FloatLanes weights) {
    DoubleLanes halves[2];
    widen(weights, halves);
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
      *reinterpret_cast<UnalignedLanes*>(out + first) = weights;
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
      const FloatLanes v = *reinterpret_cast<const UnalignedLanes*>(x + i + p * kLanes);
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
    uint32_t bits = bits_at_least(*reinterpret_cast<const UnalignedLanes*>(x + i), bounds);
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
