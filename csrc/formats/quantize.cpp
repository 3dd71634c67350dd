// Searches for the blocks of few bits that stand for weights with the least weighted squared error.
//
// For given codes q of some values w, the best scale (and minimum) solves a linear least-squares problem. For a given
// scale, the best codes are the nearest ones. Alternating the two never increases the error, but ends in a local
// minimum. So it starts from several ranges: the widest holds all values, narrower ones cut off unimportant ones. The
// best result is kept.
//
// Blocks of two levels have small scales (and minima) of few bits, each times one fp16 number of the block. First each
// sub-block's own best are found. Then alternately: the nearby integers with the least error, with new codes for each,
// and the fp16 numbers by least squares for these. The final comparison uses the error of the block's decoded values.
//
// Vectors have four lanes on every processor, nothing is fused, and sums are taken in one order: the same weights give
// the same bits everywhere.
#include "formats/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "formats/convert.h"

namespace moeflow {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kLanes = 4;
typedef float Lanes __attribute__((vector_size(16)));
typedef int32_t IntLanes __attribute__((vector_size(16)));
typedef Lanes UnalignedLanes __attribute__((aligned(4), may_alias));

inline Lanes load(const float* p) { return *reinterpret_cast<const UnalignedLanes*>(p); }
inline Lanes splat(float x) { return Lanes{x, x, x, x}; }
inline float sum(Lanes v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline Lanes bounded(Lanes v, float least, float most) {
  v = v < splat(least) ? splat(least) : v;
  return v > splat(most) ? splat(most) : v;
}
// Halves to even; for numbers far from overflow.
inline Lanes nearest_whole(Lanes v) {
  const Lanes shift = splat(0x1.8p23f);
  return (v + shift) - shift;
}

// Zero for numbers too small for a scale, so that all quotients are finite.
inline float reciprocal(float x) { return std::fabs(x) > 1e-30f ? 1.0f / x : 0.0f; }
inline float rounded_to_half(float x) { return half_to_float(float_to_half(x)); }

// Values that share a scale, and how much an error in each weighs.
template <int kCount>
struct SubBlock {
  float w[kCount], h[kCount];
};

// ---- what codes stand for ----

// The whole numbers from kLeast to kMost; the code is the number less kLeast.
template <int kFrom, int kTo>
struct WholeNumbers {
  static constexpr float kLeast = kFrom, kMost = kTo;
  static constexpr float kShares[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};
  static Lanes nearest(Lanes x) { return nearest_whole(bounded(x, kLeast, kMost)); }
  static uint8_t code(float x) { return static_cast<uint8_t>(nearest(splat(x))[0] - kLeast); }
};

constexpr int kHalves = 512, kZeroHalf = kHalves / 2;

struct IQ4Tables {
  float values[kHalves] = {};
  uint8_t codes[kHalves] = {};

  constexpr IQ4Tables() {
    for (int i = 0, code = 0; i < kHalves; ++i) {
      const auto quarters = [&](int c) { return 4 * source::kIQ4Values[c]; };
      const int middle = 2 * (i - kZeroHalf) + 1;  // in quarters: between this half and the next
      while (code < 15 && quarters(code + 1) - middle < middle - quarters(code)) ++code;
      codes[i] = static_cast<uint8_t>(code);
      values[i] = source::kIQ4Values[code];
    }
  }
};
constexpr IQ4Tables kTables;

// The 16 values of IQ4_NL and IQ4_XS. These are integers, so the nearest one changes at halves only: a table over all
// halves has it.
struct IQ4Values {
  static constexpr float kLeast = -127, kMost = 113;
  static constexpr float kShares[] = {1.03f, 0.98f, 0.93f, 0.88f, 0.83f, 0.78f, 0.73f};

  static Lanes nearest(Lanes x) {
    const IntLanes at = halves(x);
    const float* const values = kTables.values;
    return Lanes{values[at[0]], values[at[1]], values[at[2]], values[at[3]]};
  }
  static uint8_t code(float x) { return kTables.codes[halves(splat(x))[0]]; }

 private:
  static IntLanes halves(Lanes x) {
    return __builtin_convertvector(bounded(x * 2.0f + static_cast<float>(kZeroHalf), 0, kHalves - 1), IntLanes);
  }
};

// ---- a scale: a value is scale * number ----

struct ScaleFit {
  float scale = 0, error = kInfinity;
  float nn = 0, nw = 0;  // weighted sums over the nearest numbers n: n^2, n w
};

// The error with the nearest numbers.
template <typename Numbers, int kCount>
ScaleFit try_scale(const SubBlock<kCount>& sub, float scale) {
  const Lanes inverse = splat(reciprocal(scale)), step = splat(scale);
  Lanes error = {}, nn = {}, nw = {};
  for (int i = 0; i < kCount; i += kLanes) {
    const Lanes w = load(sub.w + i), h = load(sub.h + i), n = Numbers::nearest(w * inverse);
    const Lanes hn = h * n, off = step * n - w;
    error += h * off * off;
    nn += hn * n;
    nw += hn * w;
  }
  return {scale, sum(error), sum(nn), sum(nw)};
}

// The best scale for given numbers.
template <typename Numbers, int kCount>
ScaleFit improved(const SubBlock<kCount>& sub, const ScaleFit& fit) {
  return try_scale<Numbers>(sub, fit.nn > 0 ? fit.nw / fit.nn : 0.0f);
}

constexpr int kImprovements = 3;  // of the best start: what follows changes little

template <typename Numbers, int kCount>
ScaleFit best_scale(const SubBlock<kCount>& sub) {
  float most = 0;
  for (int i = 0; i < kCount; ++i) most = std::fabs(sub.w[i]) > std::fabs(most) ? sub.w[i] : most;
  ScaleFit best = try_scale<Numbers>(sub, 0.0f);
  if (most == 0.0f) return best;
  for (const float end : {Numbers::kLeast, Numbers::kMost}) {  // which of them stands for the largest value
    ScaleFit fit;
    for (const float share : Numbers::kShares) {  // of it, or less: the rest is cut off
      const ScaleFit start = try_scale<Numbers>(sub, most * share / end);
      const ScaleFit better = improved<Numbers>(sub, start);
      if (start.error < fit.error) fit = start;
      if (better.error < fit.error) fit = better;
    }
    for (int i = 0; i <= kImprovements && fit.error < best.error; ++i) {
      best = fit;
      fit = improved<Numbers>(sub, fit);
    }
  }
  return best;
}

// ---- a scale and a minimum: a value is scale * code - low, neither of them negative ----

struct LineFit {
  float scale = 0, low = 0, error = kInfinity;
  float q = 0, qq = 0, qw = 0;  // weighted sums over the nearest codes q: q, q^2, q w
};

template <int kMost, int kCount>
LineFit try_line(const SubBlock<kCount>& sub, float scale, float low) {
  const Lanes inverse = splat(reciprocal(scale)), step = splat(scale), under = splat(low);
  Lanes error = {}, sum_q = {}, qq = {}, qw = {};
  for (int i = 0; i < kCount; i += kLanes) {
    const Lanes w = load(sub.w + i), h = load(sub.h + i);
    const Lanes q = WholeNumbers<0, kMost>::nearest((w + under) * inverse);
    const Lanes hq = h * q, off = step * q - under - w;
    error += h * off * off;
    sum_q += hq;
    qq += hq * q;
    qw += hq * w;
  }
  return {scale, low, sum(error), sum(sum_q), sum(qq), sum(qw)};
}

// Weighted sums that do not depend on codes.
struct ValueSums {
  float h = 0, hw = 0;
};

// The best line through given codes.
template <int kMost, int kCount>
LineFit improved(const SubBlock<kCount>& sub, const ValueSums& sums, const LineFit& fit) {
  const float determinant = fit.qq * sums.h - fit.q * fit.q;
  float scale = determinant > 0 ? (sums.h * fit.qw - fit.q * sums.hw) / determinant : 0.0f;
  float low = determinant > 0 ? (fit.q * fit.qw - fit.qq * sums.hw) / determinant : -1.0f;
  if (low < 0) {
    low = 0;
    scale = fit.qq > 0 ? fit.qw / fit.qq : 0.0f;
  }
  return try_line<kMost>(sub, std::max(scale, 0.0f), low);
}

template <int kMost, int kCount>
LineFit best_line(const SubBlock<kCount>& sub, const ValueSums& sums) {
  float least = 0, most = 0;
  for (int i = 0; i < kCount; ++i) least = std::min(least, sub.w[i]), most = std::max(most, sub.w[i]);
  LineFit best = try_line<kMost>(sub, 0.0f, 0.0f);
  if (least == most) return best;
  LineFit fit;
  for (const float below : {1.0f, 0.87f, 0.75f}) {  // shares of the values on either side of zero
    for (const float above : {1.0f, 0.87f, 0.75f}) {
      const LineFit start = try_line<kMost>(sub, (above * most - below * least) / kMost, -below * least);
      const LineFit better = improved<kMost>(sub, sums, start);
      if (start.error < fit.error) fit = start;
      if (better.error < fit.error) fit = better;
    }
  }
  for (int i = 0; i <= kImprovements && fit.error < best.error; ++i) {
    best = fit;
    fit = improved<kMost>(sub, sums, fit);
  }
  return best;
}

// ---- a block: its values come in as they lie in a row, codes and numbers go out ----

constexpr int kRounds = 2;  // that alternate between small and fp16 numbers

template <int kCount>
SubBlock<kCount> sub_block(const float* w, const float* h) {
  SubBlock<kCount> sub;
  for (int i = 0; i < kCount; ++i) sub.w[i] = w[i], sub.h[i] = h[i];
  return sub;
}

// Blocks with one fp16 scale.
template <typename Numbers, int kCount>
float plain_block(const float* w, const float* h, uint8_t* codes) {
  const float scale = rounded_to_half(best_scale<Numbers>(sub_block<kCount>(w, h)).scale), inverse = reciprocal(scale);
  for (int i = 0; i < kCount; ++i) codes[i] = Numbers::code(w[i] * inverse);
  return scale;
}

inline int bounded_whole(float x, int least, int most) {
  return std::clamp(static_cast<int>(std::nearbyint(std::clamp(x, -1e6f, 1e6f))), least, most);
}

// Blocks with an fp16 scale and for each of kSubs sub-blocks a signed small one.
template <typename Numbers, int kSubs, int kCount, int kMostSmall>
struct ScaledBlock {
  float scale = 0;
  int small[kSubs] = {};
  uint8_t codes[kSubs * kCount];

  void find(const float* w, const float* h) {
    SubBlock<kCount> subs[kSubs];
    float own[kSubs], largest = 0;
    for (int j = 0; j < kSubs; ++j) {
      subs[j] = sub_block<kCount>(w + j * kCount, h + j * kCount);
      own[j] = best_scale<Numbers>(subs[j]).scale;
      largest = std::fabs(own[j]) > std::fabs(largest) ? own[j] : largest;
    }
    float best_error = kInfinity;
    float trial = rounded_to_half(largest / -(kMostSmall + 1));  // there is one more whole number below zero
    for (int round = 0; round < kRounds; ++round) {
      int found[kSubs] = {};
      float error = 0, nn = 0, nw = 0;
      for (int j = 0; j < kSubs; ++j) {
        ScaleFit best;
        const int near = bounded_whole(own[j] * reciprocal(trial), -kMostSmall - 1, kMostSmall);
        for (int it = std::max(near - 1, -kMostSmall - 1); it <= std::min(near + 1, kMostSmall); ++it) {
          const ScaleFit fit = try_scale<Numbers>(subs[j], trial * static_cast<float>(it));
          if (fit.error < best.error) best = fit, found[j] = it;
        }
        const float whole = static_cast<float>(found[j]);
        error += best.error, nn += whole * whole * best.nn, nw += whole * best.nw;
      }
      if (error < best_error) best_error = error, scale = trial, std::copy(found, found + kSubs, small);
      if (nn > 0) trial = rounded_to_half(nw / nn);
    }
    for (int i = 0; i < kSubs * kCount; ++i) {
      codes[i] = Numbers::code(w[i] * reciprocal(scale * static_cast<float>(small[i / kCount])));
    }
  }
};

// Blocks of 8 sub-blocks with a scale and a minimum of six bits each, and fp16 numbers for both.
template <int kMost>
struct LineBlock {
  static constexpr int kSubs = 8, kCount = 32, kMostSmall = 63;
  float scale = 0, low = 0;
  int small_scale[kSubs] = {}, small_low[kSubs] = {};
  uint8_t codes[kSubs * kCount];

  void find(const float* w, const float* h) {
    for (int j = 0; j < kSubs; ++j) {
      subs_[j] = sub_block<kCount>(w + j * kCount, h + j * kCount);
      sums_[j] = {};
      for (int i = 0; i < kCount; ++i) sums_[j].h += subs_[j].h[i], sums_[j].hw += subs_[j].h[i] * subs_[j].w[i];
      own_[j] = best_line<kMost>(subs_[j], sums_[j]);
    }
    Trial trial;
    for (const LineFit& fit : own_) trial.scale = std::max(trial.scale, fit.scale), trial.low = std::max(trial.low, fit.low);
    trial.scale = rounded_to_half(trial.scale / kMostSmall), trial.low = rounded_to_half(trial.low / kMostSmall);
    float best_error = kInfinity;
    for (int round = 0; round < kRounds; ++round) {
      const float error = choose_small(trial);
      if (error < best_error) {
        best_error = error;
        scale = trial.scale, low = trial.low;
        std::copy(trial.small_scale, trial.small_scale + kSubs, small_scale);
        std::copy(trial.small_low, trial.small_low + kSubs, small_low);
      }
      improve(trial);
    }
    for (int i = 0; i < kSubs * kCount; ++i) {
      const float step = scale * static_cast<float>(small_scale[i / kCount]);
      const float under = low * static_cast<float>(small_low[i / kCount]);
      codes[i] = WholeNumbers<0, kMost>::code((w[i] + under) * reciprocal(step));
    }
  }

 private:
  struct Trial {
    float scale = 0, low = 0;
    int small_scale[kSubs] = {}, small_low[kSubs] = {};
    LineFit fits[kSubs];
  };
  SubBlock<kCount> subs_[kSubs];
  ValueSums sums_[kSubs];
  LineFit own_[kSubs];

  // Of the whole numbers around each sub-block's own scale and minimum, those with the least error; return its sum.
  float choose_small(Trial& trial) {
    float error = 0;
    for (int j = 0; j < kSubs; ++j) {
      const int scale_near = bounded_whole(own_[j].scale * reciprocal(trial.scale), 0, kMostSmall);
      const int low_near = bounded_whole(own_[j].low * reciprocal(trial.low), 0, kMostSmall);
      LineFit& best = trial.fits[j];
      best = {};
      for (int s = std::max(scale_near - 1, 0); s <= std::min(scale_near + 1, kMostSmall); ++s) {
        for (int m = std::max(low_near - 1, 0); m <= std::min(low_near + 1, kMostSmall); ++m) {
          const LineFit fit =
              try_line<kMost>(subs_[j], trial.scale * static_cast<float>(s), trial.low * static_cast<float>(m));
          if (fit.error < best.error) best = fit, trial.small_scale[j] = s, trial.small_low[j] = m;
        }
      }
      error += best.error;
    }
    return error;
  }

  // The fp16 numbers that least squares have for the codes and small numbers of a trial.
  void improve(Trial& trial) const {
    float ss = 0, sm = 0, mm = 0, sw = 0, mw = 0;
    for (int j = 0; j < kSubs; ++j) {
      const LineFit& fit = trial.fits[j];
      const float s = static_cast<float>(trial.small_scale[j]), m = static_cast<float>(trial.small_low[j]);
      ss += s * s * fit.qq, sm += s * m * fit.q, mm += m * m * sums_[j].h;
      sw += s * fit.qw, mw += m * sums_[j].hw;
    }
    const float determinant = ss * mm - sm * sm;
    float better_scale = ss > 0 ? sw / ss : 0.0f, better_low = 0;
    if (determinant > 0) {
      const float both_scale = (mm * sw - sm * mw) / determinant, both_low = (sm * sw - ss * mw) / determinant;
      if (both_low >= 0) better_scale = both_scale, better_low = both_low;
    } else if (ss == 0 && mm > 0) {
      better_low = std::max(-mw / mm, 0.0f);
    }
    trial.scale = rounded_to_half(std::max(better_scale, 0.0f)), trial.low = rounded_to_half(better_low);
  }
};

// ---- how blocks are written: the reverse of block_source_types.h ----

void write_half(uint8_t* at, float x) {
  const uint16_t half = float_to_half(x);
  __builtin_memcpy(at, &half, sizeof(half));
}

void join_halves(const uint8_t* q, uint8_t* bytes) {
  for (int j = 0; j < 16; ++j) bytes[j] = static_cast<uint8_t>((q[j] & 15) | (q[j + 16] & 15) << 4);
}

void write_iq4_nl(const float* w, const float* h, uint8_t* block) {
  uint8_t codes[32];
  write_half(block, plain_block<IQ4Values, 32>(w, h, codes));
  join_halves(codes, block + 2);
}

void write_q5_0(const float* w, const float* h, uint8_t* block) {
  uint8_t codes[32];
  write_half(block, plain_block<WholeNumbers<-16, 15>, 32>(w, h, codes));
  uint32_t fifth_bits = 0;
  for (int j = 0; j < 32; ++j) fifth_bits |= static_cast<uint32_t>(codes[j] >> 4 & 1) << j;
  __builtin_memcpy(block + 2, &fifth_bits, sizeof(fifth_bits));
  join_halves(codes, block + 6);
}

void write_small_lines(const int* scales, const int* lows, uint8_t* at) {
  for (int i = 0; i < 4; ++i) {
    at[i] = static_cast<uint8_t>(scales[i] | scales[i + 4] >> 4 << 6);
    at[i + 4] = static_cast<uint8_t>(lows[i] | lows[i + 4] >> 4 << 6);
    at[i + 8] = static_cast<uint8_t>((scales[i + 4] & 15) | (lows[i + 4] & 15) << 4);
  }
}

template <int kMost>
const uint8_t* write_line_numbers(LineBlock<kMost>& made, const float* w, const float* h, uint8_t* block) {
  made.find(w, h);
  write_half(block, made.scale);
  write_half(block + 2, made.low);
  write_small_lines(made.small_scale, made.small_low, block + 4);
  return made.codes;
}

// 32 bytes have in their low halves one stretch of 32 codes, in their high halves the next.
void join_stretches(const uint8_t* codes, uint8_t* bytes) {
  for (int i = 0; i < 128; ++i) {
    const uint8_t* const two = codes + i / 32 * 64 + i % 32;
    bytes[i] = static_cast<uint8_t>((two[0] & 15) | (two[32] & 15) << 4);
  }
}

void write_q4_k(const float* w, const float* h, uint8_t* block) {
  LineBlock<15> made;
  join_stretches(write_line_numbers(made, w, h, block), block + 16);
}

void write_q5_k(const float* w, const float* h, uint8_t* block) {
  LineBlock<31> made;
  const uint8_t* const codes = write_line_numbers(made, w, h, block);
  for (int j = 0; j < 32; ++j) {
    int fifth_bits = 0;
    for (int i = 0; i < 8; ++i) fifth_bits |= (codes[i * 32 + j] >> 4) << i;
    block[16 + j] = static_cast<uint8_t>(fifth_bits);
  }
  join_stretches(codes, block + 48);
}

void write_q6_k(const float* w, const float* h, uint8_t* block) {
  ScaledBlock<WholeNumbers<-32, 31>, 16, 16, 127> made;
  made.find(w, h);
  for (int i = 0; i < 128; ++i) {  // 128 values have 64 bytes of low bits and 32 of high ones
    const uint8_t* const two = made.codes + i / 64 * 128 + i % 64;
    block[i] = static_cast<uint8_t>((two[0] & 15) | (two[64] & 15) << 4);
  }
  for (int i = 0; i < 64; ++i) {
    const uint8_t* const four = made.codes + i / 32 * 128 + i % 32;
    int high_bits = 0;
    for (int j = 0; j < 4; ++j) high_bits |= (four[j * 32] >> 4) << (j * 2);
    block[128 + i] = static_cast<uint8_t>(high_bits);
  }
  for (int j = 0; j < 16; ++j) block[192 + j] = static_cast<uint8_t>(made.small[j]);
  write_half(block + source::Q6_K::kHead, made.scale);
}

using WriteBlock = void (*)(const float* w, const float* h, uint8_t* block);

WriteBlock writer_of(SourceType type) {
  switch (type) {
    case SourceType::kIQ4_NL: return write_iq4_nl;
    case SourceType::kQ5_0: return write_q5_0;
    case SourceType::kQ4_K: return write_q4_k;
    case SourceType::kQ5_K: return write_q5_k;
    case SourceType::kQ6_K: return write_q6_k;
    default: return nullptr;
  }
}

// Far beyond what fp16 scales can stand for, and so that no sum overflows.
constexpr float kTooLarge = 1e15f;

bool are_small_enough(const float* w, int64_t count) {
  bool are = true;
  for (int64_t i = 0; i < count; ++i) are &= std::fabs(w[i]) < kTooLarge;
  return are;
}

// NaN, infinite or nearly infinite values make all values of a block NaN.
template <typename Block>
void write_invalid(WriteBlock write, const float* h, uint8_t* block) {
  const float zeros[Block::kGroup] = {};
  write(zeros, h, block);
  write_half(block + (std::is_same_v<Block, source::Q6_K> ? source::Q6_K::kHead : 0), kInfinity);
}

}  // namespace

void quantize_rows(SourceType to, SourceType from, const void* source, int64_t num_rows, int64_t cols,
                   const float* importance, uint8_t* out) {
  const WriteBlock write = writer_of(to);
  if (write == nullptr) throw std::invalid_argument("blocks of this type are read, not made");
  const int64_t stride = row_bytes(from, cols);
  std::vector<float> w(cols), alike(importance == nullptr ? cols : 0, 1.0f);
  const float* const h = importance == nullptr ? alike.data() : importance;
  with_source_type(to, [&](auto as) {
    using Block = decltype(as);
    for (int64_t row = 0; row < num_rows; ++row) {
      const uint8_t* const values = static_cast<const uint8_t*>(source) + row * stride;
      with_source_type(from, [&](auto it) { decltype(it)::read(values, 0, cols, w.data()); });
      for (int64_t k = 0; k < cols; k += Block::kGroup, out += Block::kBytes) {
        if (are_small_enough(&w[k], Block::kGroup)) {
          write(&w[k], h + k, out);
        } else {
          write_invalid<Block>(write, h + k, out);
        }
      }
    }
  });
}

}  // namespace moeflow
