#define ISA_NAMESPACE generic
#define ISA_NAME "generic"
#define ROW_TILE 2
#define ROW_TILE_OF_TWO 2
#define BAND_TILE 2

#include "tiles.h"

namespace moeflow {
const Isa& generic_isa() { return generic::kTable; }
}  // namespace moeflow
