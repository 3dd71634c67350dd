// The table of a unit with its own instructions for some formats only. Their products are compiled for it; everything
// else comes from the unit below, whose instructions would be the same.
#pragma once

#include "tiles/gemm_tile.h"
#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

constexpr bool has_own_tile(TileKind kind) {
  if (HAS_BF16_DOT) return kind == TileKind::kBF16 || kind == TileKind::kFloat8;
  return kind == TileKind::kIntegers || kind == TileKind::kBlocks;
}

template <const Isa& kBelow()>
void own_tile(const Matrix& weight, const Tile& whole) {
  with_format(weight.format, [&](auto it) {
    if constexpr (has_own_tile(decltype(it)::kTile)) {
      tile_in_format<decltype(it)>(weight, whole);
    } else {
      kBelow().tile(weight, whole);
    }
  });
}

template <const Isa& kBelow()>
Isa table_above() {
  Isa table = kBelow();
  table.name = ISA_NAME;
  table.activation = activation;
  table.tile = own_tile<kBelow>;
  return table;
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
