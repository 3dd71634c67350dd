// The inner loops, written once with GCC's vector extensions and compiled once per instruction set. A unit that
// includes this defines before: ISA_NAMESPACE, ISA_NAME, ROW_TILE (rows whose accumulators fit the registers beside
// BAND_TILE bands), ROW_TILE_OF_TWO (those that fit beside two bands) and, if it has one, MOEFLOW_VNNI or MOEFLOW_BF16.
//
// Every output lane adds up k in order with one chain of operations that is the same in all tile sizes: that
// is what makes a row's bits independent of its batch.

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(32)));

// Vectors as wide as registers, of which a band takes kParts. What is kept over a loop is made of these: wider ones GCC
// keeps in memory and copies word by word.
#if defined(__AVX512F__)
#define MOEFLOW_LANES 16
#elif defined(__AVX2__)
#define MOEFLOW_LANES 8
#else
#define MOEFLOW_LANES 4
#endif
constexpr int kLanes = MOEFLOW_LANES, kParts = kBand / kLanes;
typedef float FloatLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef int32_t IntLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
typedef uint32_t BitLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));

// What memory is read and written through: it holds other types than what is made of it here.
typedef Vec VecInMemory __attribute__((may_alias));
typedef FloatLanes FloatLanesInMemory __attribute__((may_alias));
typedef BitLanes BitLanesInMemory __attribute__((may_alias));
typedef int32_t Int32InMemory __attribute__((may_alias));

#define FORCE_INLINE static inline __attribute__((always_inline))

FORCE_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }
FORCE_INLINE Vec splat(float x) { return x - Vec{}; }
FORCE_INLINE FloatLanes splat_lanes(float x) { return x - FloatLanes{}; }
FORCE_INLINE FloatLanes load_lanes(const void* p) { return *static_cast<const FloatLanesInMemory*>(p); }
FORCE_INLINE BitLanes load_bits(const void* p) { return *static_cast<const BitLanesInMemory*>(p); }

// ---- activation rows ------------------------------------------------------------------------------------

FORCE_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 64);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

FORCE_INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

FORCE_INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  float value;
  uint32_t bits;
  if (exponent == 0) {
    value = static_cast<float>(mantissa) * 0x1p-24f;
    __builtin_memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  }
  __builtin_memcpy(&value, &bits, 4);
  return value;
#endif
}

FORCE_INLINE FloatLanes load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (FloatLanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  FloatLanes v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
  return v;
#endif
}

// To the nearest integer, halves to even. Asked for as one operation, because an addition in floats could be fused
// with the multiplication before it and so round differently in one instruction set than in another.
FORCE_INLINE IVec to_nearest(Vec x) {
#if defined(__AVX512F__)
  return (IVec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  __m256 parts[2];
  __m256i rounded[2];
  __builtin_memcpy(parts, &x, 64);
  for (int i = 0; i < 2; ++i) rounded[i] = _mm256_cvtps_epi32(parts[i]);
#elif defined(__SSE2__)
  __m128 parts[4];
  __m128i rounded[4];
  __builtin_memcpy(parts, &x, 64);
  for (int i = 0; i < 4; ++i) rounded[i] = _mm_cvtps_epi32(parts[i]);
#elif defined(__aarch64__)
  float32x4_t parts[4];
  int32x4_t rounded[4];
  __builtin_memcpy(parts, &x, 64);
  for (int i = 0; i < 4; ++i) rounded[i] = vcvtnq_s32_f32(parts[i]);
#else
  int32_t rounded[kBand];
  for (int i = 0; i < kBand; ++i) rounded[i] = static_cast<int32_t>(__builtin_rintf(x[i]));
#endif
#if !defined(__AVX512F__)
  IVec result;
  __builtin_memcpy(&result, rounded, 64);
  return result;
#endif
}

FORCE_INLINE int32_t largest_lane(IVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < kBand; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

FORCE_INLINE int32_t sum_of_lanes(IVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < kBand; ++i) sum += v[i];
  return sum;
#endif
}

// The integers of a group as they are stored: int16 in the order in which `WidePairs` takes weights apart.
FORCE_INLINE void store_group(int8_t* out, IVec low, IVec high) {
  const Bytes bytes[2] = {__builtin_convertvector(low, Bytes), __builtin_convertvector(high, Bytes)};
  __builtin_memcpy(out, bytes, kGroup);
}
FORCE_INLINE void store_group(int16_t* out, IVec low, IVec high) {
  const Shorts shorts[2] = {__builtin_convertvector(low, Shorts), __builtin_convertvector(high, Shorts)};
  __builtin_memcpy(out, shorts, kGroup * sizeof(int16_t));
  for (int i = 1; i < kGroup; i += 4) {
    const int16_t second = out[i];
    out[i] = out[i + 1];
    out[i + 1] = second;
  }
}

// Symmetric integers per group of 32: scale = max|x| / kMost, nearest, halves to even. An infinity or a NaN in a group
// makes its scale NaN, and so everything computed from the row. Below kTiny, where kMost / max|x| overflows, is zero.
template <typename T, int kMost>
void quantize_row(const float* x, int64_t cols, void* out) {
  constexpr float kTiny = kMost > 127 ? 1e-33f : 1e-36f;
  const int64_t k = padded_cols(cols), groups = k / kGroup;
  T* q = static_cast<T*>(out);
  float* scales = reinterpret_cast<float*>(q + k);
  int32_t* sums = reinterpret_cast<int32_t*>(scales + groups);
  for (int64_t g = 0; g < groups; ++g, q += kGroup) {
    Vec values[2] = {};
    const int64_t left = cols - g * kGroup;
    __builtin_memcpy(values, x + g * kGroup, (left < kGroup ? left : kGroup) * sizeof(float));
    // Without their sign, floats are ordered as their bits are, infinity and NaN above all others.
    const IVec magnitudes[2] = {(IVec)values[0] & 0x7fffffff, (IVec)values[1] & 0x7fffffff};
    const IVec larger = magnitudes[0] > magnitudes[1] ? magnitudes[0] : magnitudes[1];
    const int32_t largest_bits = largest_lane(larger);
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    if (!(largest >= kTiny && largest_bits < 0x7f800000)) {
      __builtin_memset(q, 0, kGroup * sizeof(T));
      scales[g] = largest_bits < 0x7f800000 ? 0.0f : __builtin_nanf("");
      sums[g] = 0;
      continue;
    }
    const float inverse = static_cast<float>(kMost) / largest;
    const IVec low = to_nearest(values[0] * inverse), high = to_nearest(values[1] * inverse);
    store_group(q, low, high);
    scales[g] = largest / static_cast<float>(kMost);
    sums[g] = sum_of_lanes(low + high);
  }
}

void prepare_row(Activation kind, const float* x, int64_t cols, void* out) {
  const int64_t k = padded_cols(cols);
  if (kind == Activation::kInt8) {
    quantize_row<int8_t, 127>(x, cols, out);
  } else if (kind == Activation::kInt16) {
    quantize_row<int16_t, 32767>(x, cols, out);
  } else if (kind == Activation::kBF16) {
    uint16_t* values = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < cols; ++i) values[i] = to_bf16(x[i]);
    for (int64_t i = cols; i < k; ++i) values[i] = 0;
  } else {
    float* values = static_cast<float*>(out);
    for (int64_t i = 0; i < cols; ++i) values[i] = x[i];
    for (int64_t i = cols; i < k; ++i) values[i] = 0;
  }
}

// ---- tiles: R rows by B bands ---------------------------------------------------------------------------

template <int R, int B>
FORCE_INLINE void store_tile(const Tile& t, const FloatLanes (&acc)[R][B][kParts]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        *reinterpret_cast<FloatLanesInMemory*>(t.out + r * kTileStride + b * kBand + p * kLanes) = acc[r][b][p];
      }
}

// Has what is multiplied later fetched while other lines are multiplied.
//
// With several rows, or with halves to take apart, a line is so much work that the processor does not look ahead to
// the next ones by itself (Zen 5, 6 rows: 28 GB/s of int8 weights instead of 18).
template <int B>
class Ahead {
 public:
  static constexpr int64_t kLinesAhead = 32;

  // Of each band, `num_lines` are multiplied, which come after `head` bytes.
  Ahead(const Tile& t, int64_t head, int64_t num_lines) : stride_(t.band_stride) {
    if (t.fetch == Fetch::kNothing) return;
    const int64_t lines = t.fetch == Fetch::kOwn && kLinesAhead < num_lines ? kLinesAhead : num_lines;
    turn_ = num_lines - lines;
    own_ = t.bands + head + lines * 64;
    if (t.following == nullptr) return;
    following_ = t.following + head - turn_ * 64;
    following_head_ = t.following;
  }

  // While line `line` is multiplied.
  void fetch(int64_t line) const {
    const uint8_t* const from = line < turn_ ? own_ : following_;
    if (from == nullptr) return;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) __builtin_prefetch(from + b * stride_ + line * 64);
  }

  // While the part of the head at `offset` is used.
  void fetch_head(int64_t offset) const {
    if (following_head_ == nullptr) return;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) __builtin_prefetch(following_head_ + b * stride_ + offset);
  }

 private:
  int64_t stride_, turn_ = 0;
  const uint8_t *own_ = nullptr, *following_ = nullptr, *following_head_ = nullptr;
};

// Where part `part` of the 64-byte line at `offset` in band `band` begins.
FORCE_INLINE const uint8_t* line_part(const Tile& t, int band, int64_t offset, int part) {
  return t.bands + band * t.band_stride + offset + part * kLanes * 4;
}

template <int R, int B>
void tile_f32(const Tile& t) {
  FloatLanes acc[R][B][kParts] = {};
  const Ahead<B> ahead(t, 0, padded_cols(t.cols));
  for (int64_t k = 0; k < t.cols; ++k) {
    ahead.fetch(k);
    FloatLanes w[B][kParts];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) w[b][p] = load_lanes(line_part(t, b, k * 64, p));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const FloatLanes x = splat_lanes(static_cast<const float*>(t.rows[r])[k]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) acc[r][b][p] += w[b][p] * x;
    }
  }
  store_tile<R, B>(t, acc);
}

template <int R, int B>
void tile_bf16(const Tile& t) {
  FloatLanes acc[R][B][kParts] = {};
  const int64_t pairs = padded_cols(t.cols) / 2;
  const Ahead<B> ahead(t, 0, pairs);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    ahead.fetch(pair);
    BitLanes w[B][kParts];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) w[b][p] = load_bits(line_part(t, b, pair * 64, p));
#if defined(MOEFLOW_BF16)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<const Int32InMemory*>(t.rows[r])[pair]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        acc[r][b][0] = (FloatLanes)_mm512_dpbf16_ps((__m512)acc[r][b][0], (__m512bh)w[b][0], x);
      }
    }
#else
    FloatLanes even[B][kParts], odd[B][kParts];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        even[b][p] = (FloatLanes)(w[b][p] << 16);
        odd[b][p] = (FloatLanes)(w[b][p] & 0xffff0000u);
      }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* row = static_cast<const float*>(t.rows[r]) + 2 * pair;
      const FloatLanes x0 = splat_lanes(row[0]), x1 = splat_lanes(row[1]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          acc[r][b][p] += even[b][p] * x0;
          acc[r][b][p] += odd[b][p] * x1;
        }
    }
#endif
  }
  store_tile<R, B>(t, acc);
}

// acc += w * x over the 4 bytes of each lane; w unsigned, x signed and the same in every lane. Exact.
FORCE_INLINE IntLanes dot_unsigned(IntLanes acc, BitLanes w, int32_t x4) {
#if defined(MOEFLOW_VNNI)
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x4));
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x4));
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x4));
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  int8_t x[4];
  __builtin_memcpy(x, &x4, 4);
  const BitLanes byte = BitLanes{} + 255u;
  return acc + (IntLanes)(w & byte) * x[0] + (IntLanes)((w >> 8) & byte) * x[1] +
         (IntLanes)((w >> 16) & byte) * x[2] + (IntLanes)(w >> 24) * x[3];
#endif
}

// The same with signed w. VNNI has no such product: there w is offset by 128, which the caller undoes.
#if defined(MOEFLOW_VNNI)
constexpr int32_t kInt8Offset = 128;
FORCE_INLINE IntLanes dot_int8(IntLanes acc, BitLanes w, int32_t x4) { return dot_unsigned(acc, w ^ 0x80808080u, x4); }
#else
constexpr int32_t kInt8Offset = 0;
FORCE_INLINE IntLanes dot_int8(IntLanes acc, BitLanes w, int32_t x4) {
#if defined(__AVX512BW__)
  const __m512i x = _mm512_set1_epi32(x4), ws = (__m512i)w;
  const __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(ws), _mm512_setzero_si512(), x);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(ws), signed_x);
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  const __m256i x = _mm256_set1_epi32(x4), ws = (__m256i)w;
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(ws), _mm256_sign_epi8(x, ws));
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  int8_t x[4];
  __builtin_memcpy(x, &x4, 4);
  const IntLanes s = (IntLanes)w;
  return acc + (s << 24 >> 24) * x[0] + (s << 16 >> 24) * x[1] + (s << 8 >> 24) * x[2] + (s >> 24) * x[3];
#endif
}
#endif

// acc += w * x over the two 16-bit halves of each lane, both signed; x the same in every lane. Exact.
FORCE_INLINE IntLanes dot_pairs(IntLanes acc, BitLanes w, int32_t x2) {
#if defined(MOEFLOW_VNNI)
  return (IntLanes)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x2));
#elif defined(__AVX512BW__)
  return (IntLanes)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x2)));
#elif defined(__AVX2__)
  return (IntLanes)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x2)));
#elif defined(__SSE2__)
  return (IntLanes)_mm_add_epi32((__m128i)acc, _mm_madd_epi16((__m128i)w, _mm_set1_epi32(x2)));
#else
  const IntLanes s = (IntLanes)w;
  return acc + (s << 16 >> 16) * static_cast<int16_t>(x2 & 0xffff) + (s >> 16) * (x2 >> 16);
#endif
}

// A line of weights as pairs of 16 bits: of each four neighbours the first and third, then the second and fourth.
template <bool kIsFour>
struct WidePairs {
  static constexpr int kCount = kIsFour ? 4 : 2;
  BitLanes pairs[kCount];

  explicit WidePairs(BitLanes w) {
    if constexpr (kIsFour) {
      constexpr uint32_t kLow = 0x000f000f;
      pairs[0] = w & kLow, pairs[1] = (w >> 8) & kLow, pairs[2] = (w >> 4) & kLow, pairs[3] = (w >> 12) & kLow;
    } else {
      typedef int16_t ShortLanes __attribute__((vector_size(MOEFLOW_LANES * 4)));
      const ShortLanes bytes = (ShortLanes)w;
      pairs[0] = (BitLanes)((bytes << 8) >> 8), pairs[1] = (BitLanes)(bytes >> 8);
    }
  }
};

// One prepared row of integers, taken apart.
struct IntegerRow {
  const Int32InMemory* quads;  // four values each, of 16 bits two
  const float* scales;
  const int32_t* sums;

  IntegerRow(const void* row, int64_t k, int64_t value_bytes)
      : quads(static_cast<const Int32InMemory*>(row)),
        scales(reinterpret_cast<const float*>(static_cast<const int8_t*>(row) + k * value_bytes)),
        sums(reinterpret_cast<const int32_t*>(scales + k / kGroup)) {}
  IntegerRow() = default;
};

// What is taken off each weight as it is multiplied: the sums of activations put it right.
template <Format kFormat, bool kIsWide>
constexpr int32_t kWeightOffset = kFormat == Format::kINT4 ? 8 : kFormat == Format::kINT8 && !kIsWide ? kInt8Offset : 0;

// All integer formats: exact integer sums within a group, then one multiply-add a group in floats (two, where there is
// a minimum), which are kept in the out tile so that the registers hold a large tile of integer sums.
template <int R, int B, Format kFormat, bool kIsWide>
void tile_int(const Tile& t) {
  constexpr bool kIsFour = kFormat != Format::kINT8, kHasMin = kFormat == Format::kINT4Min;
  const int64_t k = padded_cols(t.cols), groups = k / kGroup;
  const int64_t head = scale_bytes(kFormat, t.cols);
  constexpr int kLines = kIsFour ? 4 : 8;  // of 64 bytes, in a group
  constexpr int64_t kNumberBytes = (kHasMin ? 2 : 1) * kBand * 2;
  IntegerRow rows[R];
  for (int r = 0; r < R; ++r) rows[r] = IntegerRow(t.rows[r], k, kIsWide ? 2 : 1);
  FloatLanes total[R][B][kParts] = {};
  const Ahead<B> ahead(t, head, groups * kLines);
  for (int64_t g = 0; g < groups; ++g) {
    if (kHasMin || g % 2 == 0) ahead.fetch_head(g * kNumberBytes);
    IntLanes acc[R][B][kParts];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) acc[r][b][p] = IntLanes{} - kWeightOffset<kFormat, kIsWide> * rows[r].sums[g];
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) {
      const int64_t at = head + (g * kLines + line) * 64;
      ahead.fetch(g * kLines + line);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        BitLanes w[B];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) w[b] = load_bits(line_part(t, b, at, p));
        if constexpr (kIsWide) {
          constexpr int kCount = WidePairs<kIsFour>::kCount;
          const int64_t first = (g * kLines + line) * kCount;
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) {
            const WidePairs<kIsFour> parts(w[b]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
              for (int i = 0; i < kCount; ++i) {
                acc[r][b][p] = dot_pairs(acc[r][b][p], parts.pairs[i], rows[r].quads[first + i]);
              }
          }
        } else {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            if constexpr (kIsFour) {
              const int32_t x0 = rows[r].quads[g * 8 + 2 * line], x1 = rows[r].quads[g * 8 + 2 * line + 1];
#pragma GCC unroll 4
              for (int b = 0; b < B; ++b) {
                acc[r][b][p] = dot_unsigned(acc[r][b][p], w[b] & 0x0f0f0f0fu, x0);
                acc[r][b][p] = dot_unsigned(acc[r][b][p], (w[b] >> 4) & 0x0f0f0f0fu, x1);
              }
            } else {
              const int32_t x = rows[r].quads[g * 8 + line];
#pragma GCC unroll 4
              for (int b = 0; b < B; ++b) acc[r][b][p] = dot_int8(acc[r][b][p], w[b], x);
            }
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const uint8_t* const numbers = t.bands + b * t.band_stride + g * kNumberBytes + p * kLanes * 2;
        const FloatLanes scale = load_halves(reinterpret_cast<const uint16_t*>(numbers));
        FloatLanes least = {};
        if constexpr (kHasMin) least = load_halves(reinterpret_cast<const uint16_t*>(numbers + kBand * 2));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const FloatLanes sum = __builtin_convertvector(acc[r][b][p], FloatLanes);
          total[r][b][p] += sum * (scale * splat_lanes(rows[r].scales[g]));
          if constexpr (kHasMin) {
            total[r][b][p] += least * splat_lanes(rows[r].scales[g] * static_cast<float>(rows[r].sums[g]));
          }
        }
      }
  }
  store_tile<R, B>(t, total);
}

template <int R, int B>
void tile_of(const Matrix& weight, const Tile& t) {
  switch (weight.format) {
    case Format::kF32: return tile_f32<R, B>(t);
    case Format::kBF16: return tile_bf16<R, B>(t);
    case Format::kINT8:
      return weight.is_wide ? tile_int<R, B, Format::kINT8, true>(t) : tile_int<R, B, Format::kINT8, false>(t);
    case Format::kINT4:
      return weight.is_wide ? tile_int<R, B, Format::kINT4, true>(t) : tile_int<R, B, Format::kINT4, false>(t);
    case Format::kINT4Min: return tile_int<R, B, Format::kINT4Min, true>(t);
  }
}

// Compute any tile from the sizes that fit this instruction set's registers. More rows than make a tile of usual shape
// take a tall one of two bands: two tiles, of six rows and of one or two, would take longer and have memory idle while
// the second reads the bands from the cache.
void tile(const Matrix& weight, const Tile& whole) {
  for (int row = 0; row < whole.num_rows;) {
    const int rows_left = whole.num_rows - row;
    const bool is_tall = rows_left > ROW_TILE && ROW_TILE_OF_TWO > ROW_TILE && whole.num_bands % 2 == 0;
    const int most = is_tall ? ROW_TILE_OF_TWO : ROW_TILE, rows = rows_left < most ? rows_left : most;
    for (int band = 0; band < whole.num_bands;) {
      const int left = whole.num_bands - band;
      const int bands = left >= 4 && BAND_TILE >= 4 && !is_tall ? 4 : left >= 2 ? 2 : 1;
      Tile part = whole;
      part.bands = whole.bands + band * whole.band_stride;
      part.rows = whole.rows + row;
      part.out = whole.out + row * kTileStride + band * kBand;
      if (row > 0) {
        part.fetch = Fetch::kNothing;
      } else if (whole.fetch == Fetch::kFollowing) {
        if (whole.following != nullptr) part.following = whole.following + band * whole.band_stride;
      } else if (band + bands < whole.num_bands) {
        part.following = part.bands + bands * whole.band_stride;
      }
      switch (rows * 8 + bands) {
#define MOEFLOW_TILE(R, B) \
  case R * 8 + B:          \
    tile_of<R, B>(weight, part); \
    break;
#define MOEFLOW_TILES(R) MOEFLOW_TILE(R, 1) MOEFLOW_TILE(R, 2)
        MOEFLOW_TILES(1)
        MOEFLOW_TILES(2)
#if ROW_TILE >= 6
        MOEFLOW_TILES(3)
        MOEFLOW_TILES(4)
        MOEFLOW_TILES(5)
        MOEFLOW_TILES(6)
#endif
#if BAND_TILE >= 4
        MOEFLOW_TILE(1, 4)
        MOEFLOW_TILE(2, 4)
        MOEFLOW_TILE(3, 4)
        MOEFLOW_TILE(4, 4)
        MOEFLOW_TILE(5, 4)
        MOEFLOW_TILE(6, 4)
#endif
#if ROW_TILE_OF_TWO >= 12
        MOEFLOW_TILE(7, 2)
        MOEFLOW_TILE(8, 2)
        MOEFLOW_TILE(9, 2)
        MOEFLOW_TILE(10, 2)
        MOEFLOW_TILE(11, 2)
        MOEFLOW_TILE(12, 2)
#endif
      }
      band += bands;
    }
    row += rows;
  }
}

// ---- elementwise ------------------------------------------------------------------------------------------

// exp by range reduction and a polynomial (Cephes' expf): about 2 units in the last place, the same in every lane.
template <typename V>
FORCE_INLINE V exp_vec(V x) {
  const V low = -87.3f - V{}, high = 88.3f - V{};
  x = x < low ? low : x;
  x = x > high ? high : x;
  const V scaled = x * 1.44269504f;
  const auto n = __builtin_convertvector(scaled + (scaled < 0.0f ? -0.5f - V{} : 0.5f - V{}), decltype(x < x));
  const V nf = __builtin_convertvector(n, V);
  const V r = (x - nf * 0.693359375f) - nf * -2.12194440e-4f;
  V p = 1.9875691500e-4f - V{};
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (V)((n + 127) << 23);
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

#include "attention_tiles.h"
#include "small_tiles.h"
#include "draw_tiles.h"

// Needs what the others define.
#include "hidden_units.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// ---- the table ----------------------------------------------------------------------------------------------

Activation activation(const Matrix& weight) {
  switch (weight.format) {
    case Format::kF32: return Activation::kF32;
#if defined(MOEFLOW_BF16)
    case Format::kBF16: return Activation::kBF16;
#else
    case Format::kBF16: return Activation::kF32;
#endif
    case Format::kINT8:
    case Format::kINT4: return weight.is_wide ? Activation::kInt16 : Activation::kInt8;
    case Format::kINT4Min: return Activation::kInt16;  // files have it, and whoever rounds has INT4
  }
  return Activation::kF32;
}

constexpr Isa kTable = {ISA_NAME, activation, prepare_row, tile, activate, attend, inverse_rms, scale_row, add_row,
                        add_weighted_row, clip_row, rotate_row, softmax_topk_row, largest_of_row, sum_weights, store_weights,
                        lane_maxima, places_at_least};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
