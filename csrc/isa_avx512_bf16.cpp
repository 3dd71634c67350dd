#define ISA_NAMESPACE avx512_bf16
#define ISA_NAME "avx512_bf16"
#define ROW_TILE 6
#define ROW_TILE_OF_TWO 12
#define BAND_TILE 4
#define MOEFLOW_VNNI
#define MOEFLOW_BF16
#include "tiles.h"

namespace moeflow {
const Isa& avx512_bf16_isa() { return avx512_bf16::kTable; }
}  // namespace moeflow
