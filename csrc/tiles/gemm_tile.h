// Tiles of matrix products: rows of activations by bands of weights, in all formats.
#pragma once

#include "tiles/float8_tile.h"
#include "tiles/float_tile.h"
#include "tiles/integer_tile.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// The form of rows for these weights.
Activation activation(const Matrix& weight) {
  const Activation kind = with_format(weight.format, [&](auto it) { return it.activation(weight.is_wide); });
#if !HAS_BF16_DOT
  if (kind == Activation::kBF16) return Activation::kF32;
#endif
  return kind;
}

template <typename F>
void tile_in_format(const Matrix& weight, const Tile& whole) {
  if constexpr (F::kTile == TileKind::kF32 || F::kTile == TileKind::kBF16) {
    tile_floats<F::kTile>(whole);
  } else if constexpr (F::kTile == TileKind::kFloat8) {
    tile_float8s<F>(whole);
  } else {
    (weight.is_wide ? tile_int<F, true> : tile_int<F, false>)(whole);
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
