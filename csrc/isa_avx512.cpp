#define ISA_NAMESPACE avx512
#define ISA_NAME "avx512"
#define ROW_TILE 6
#define ROW_TILE_OF_TWO 12
#define BAND_TILE 4

#include "tiles.h"

namespace moeflow {
const Isa& avx512_isa() { return avx512::kTable; }
}  // namespace moeflow
