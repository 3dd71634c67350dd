// Takes over what AVX-512 with BF16 does, but for products of matrices.
#define MOEFLOW_UNIT MOEFLOW_AMX
#include "tiles/bf16_tile_amx_x86.h"
#include "tiles/float8_tile_amx_x86.h"
#include "tiles/integer_tile_amx_x86.h"
#include "simd/isa.h"

namespace moeflow {
namespace amx {
namespace {

void tile_below(const Matrix& weight, const Tile& whole) { avx512_bf16_isa().tile(weight, whole); }

// Registers that are not full are no faster than the unit below, which gives rows of integers the same bits.
template <typename F>
void tile_integers(const Matrix& weight, const Tile& whole) {
  const int rest = whole.num_rows % kTileRows;
  Tile part = whole;
  part.num_rows -= rest;
  if (part.num_rows > 0) {
    IntegerTileAmx<F>(part).compute();
    part.fetch = Fetch::kNothing;
  }
  if (rest == 0) return;
  part.rows += part.num_rows;
  part.out += part.num_rows * kTileStride;
  part.num_rows = rest;
  tile_below(weight, part);
}

void tile(const Matrix& weight, const Tile& whole) {
  with_format(weight.format, [&](auto it) {
    using F = decltype(it);
    if constexpr (F::kTile == TileKind::kBF16) return tile_bf16_amx(whole);
    if constexpr (F::kTile == TileKind::kFloat8) return tile_float8_amx<F>(whole);
    if constexpr (F::kTile == TileKind::kIntegers || F::kTile == TileKind::kBlocks) {
      if constexpr (F::kSub == kGroup) {
        if (!weight.is_wide) return tile_integers<F>(weight, whole);
      }
    }
    tile_below(weight, whole);
  });
}

Isa table() {
  Isa table = avx512_bf16_isa();
  table.name = ISA_NAME;
  table.tile = tile;
  return table;
}

}  // namespace
}  // namespace amx

const Isa& amx_isa() {
  static const Isa isa = amx::table();
  return isa;
}
}  // namespace moeflow
