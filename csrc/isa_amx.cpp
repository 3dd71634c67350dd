// Takes over what AVX-512 with BF16 does, but for products of matrices.
#define MOEFLOW_UNIT MOEFLOW_AMX
#include "bf16_tile_amx_x86.h"
#include "isa.h"

namespace moeflow {
namespace amx {
namespace {

void tile(const Matrix& weight, const Tile& whole) {
  if (weight.format == Format::kBF16) return tile_bf16_amx(whole);
  avx512_bf16_isa().tile(weight, whole);
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
