#define ISA_NAMESPACE avx512_vnni
#define ISA_NAME "avx512_vnni"
#define ROW_TILE 6
#define ROW_TILE_OF_TWO 12
#define BAND_TILE 4
#define MOEFLOW_VNNI
#include "tiles.h"

namespace moeflow {
const Isa& avx512_vnni_isa() { return avx512_vnni::kTable; }
}  // namespace moeflow
