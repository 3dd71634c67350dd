// The table of a unit: all functions compiled once for each instruction set.
#pragma once

#include "ops/activations.h"
#include "tiles/attention_tiles.h"
#include "tiles/gemm_tile.h"
#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "tiles/prepare_row.h"
#include "tiles/recurrent_tiles.h"
#include "tiles/routing_tiles.h"
#include "tiles/row_ops_tiles.h"
#include "tiles/sample_tiles.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

void tile(const Matrix& weight, const Tile& whole) {
  with_format(weight.format, [&](auto it) { tile_in_format<decltype(it)>(weight, whole); });
}

constexpr Isa kTable = {ISA_NAME,         activation,    prepare_part, tile,           activate,
                        attend,           inverse_rms,   scale_row,    layer_norm_row, add_row,
                        add_weighted_row, clip_row,      rotate_row,   route_row,      argmax_row,
                        sum_weights,      store_weights, lane_maxima,  places_at_least,
                        conv_band,        recurrence_band, gate_row};

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow
