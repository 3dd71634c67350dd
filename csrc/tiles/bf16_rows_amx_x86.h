// Tiles of bfloat16 weights by a few rows, beside those of AMX (bf16_tile_amx_x86.h): in AVX-512's floats, but in the
// order of AMX's instruction, so that rows have the bits that they have among many.
//
//   a step, 32 k      even = x[0] * w[0], += x[2] * w[2], ..     fused, a lane an output
//                     odd  = x[1] * w[1], += x[3] * w[3], ..
//                     total += even + odd
//
// From memory they are faster: lines arrive while others are multiplied, where AMX's registers wait for 16 of them.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"
#include "tiles/tile_parts.h"

#if HAS_AMX

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

constexpr int kFewRows = 4;
constexpr int kStepLines = kGroup / 2;  // of a band

// Has subnormal floats count as zero, and none come out, for as long as it lives: AMX does so whatever a thread wants.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | kDenormalsAreZero); }
  ~WithoutSubnormals() { _mm_setcsr(before_); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;

 private:
  static constexpr uint32_t kDenormalsAreZero = 0x40;
  const uint32_t before_;
};

FORCE_INLINE FloatLanes even_floats(BitLanes pairs) { return (FloatLanes)(pairs << 16); }
FORCE_INLINE FloatLanes odd_floats(BitLanes pairs) { return (FloatLanes)(pairs & 0xffff0000u); }

// Fused whatever compilers make of a product and a sum (GCC below -O2: two): a product that is subnormal counts, too.
FORCE_INLINE FloatLanes plus_product(FloatLanes sum, FloatLanes w, FloatLanes x) {
  return (FloatLanes)_mm512_fmadd_ps((__m512)w, (__m512)x, (__m512)sum);
}

// What some rows have in a step, as floats.
template <int R>
struct StepFloats {
  alignas(64) float even[R][kStepLines], odd[R][kStepLines];

  FORCE_INLINE_MEMBER StepFloats(const Tile& t, int64_t step) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const BitLanes x = load_bits(static_cast<const uint8_t*>(t.rows[r]) + step * 64);
      store_lanes(even[r], even_floats(x));
      store_lanes(odd[r], odd_floats(x));
    }
  }
};

template <int R>
FORCE_INLINE void add_pair(FloatLanes (&even)[R], FloatLanes (&odd)[R], BitLanes w, const StepFloats<R>& x, int pair) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    even[r] = plus_product(even[r], even_floats(w), splat_lanes(x.even[r][pair]));
    odd[r] = plus_product(odd[r], odd_floats(w), splat_lanes(x.odd[r][pair]));
  }
}

template <int R, int B>
TILE void tile_bf16_rows(const Tile& t) {
  const int64_t steps = padded_cols(t.cols) / kGroup;
  const Ahead<B> ahead(t, 0, steps * kStepLines);
  FloatLanes total[R][B][kParts] = {};
  for (int64_t step = 0; step < steps; ++step) {
    const StepFloats<R> x(t, step);
    FloatLanes even[B][R] = {}, odd[B][R] = {};
#pragma GCC unroll 4
    for (int pair = 0; pair < kStepLines; ++pair) {
      const int64_t line = step * kStepLines + pair;
      ahead.fetch(line);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) add_pair(even[b], odd[b], load_bits(line_part(t, b, line * 64, 0)), x, pair);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) total[r][b][0] += even[b][r] + odd[b][r];
  }
  store_tile<R, B>(t, total);
}

void tile_bf16_few(const Tile& whole) {
  const WithoutSubnormals mode;
  for (int band = 0; band < whole.num_bands;) {
    const int bands = whole.num_rows <= 2 && whole.num_bands - band >= 4 ? 4 : 2;
    const Tile part = part_of(whole, 0, band, bands);
    switch (whole.num_rows * 8 + bands) {
      case 1 * 8 + 4: tile_bf16_rows<1, 4>(part); break;
      case 2 * 8 + 4: tile_bf16_rows<2, 4>(part); break;
      case 1 * 8 + 2: tile_bf16_rows<1, 2>(part); break;
      case 2 * 8 + 2: tile_bf16_rows<2, 2>(part); break;
      case 3 * 8 + 2: tile_bf16_rows<3, 2>(part); break;
      case 4 * 8 + 2: tile_bf16_rows<4, 2>(part); break;
    }
    band += bands;
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

#endif
