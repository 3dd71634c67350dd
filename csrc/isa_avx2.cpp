#define ISA_NAMESPACE avx2
#define ISA_NAME "avx2"
#define ROW_TILE 2
#define ROW_TILE_OF_TWO 2
#define BAND_TILE 2

#include "tiles.h"

namespace moeflow {
const Isa& avx2_isa() { return avx2::kTable; }
}  // namespace moeflow
