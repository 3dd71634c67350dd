#define MOEFLOW_UNIT MOEFLOW_NEON_DOTPROD
#include "simd/isa_table.h"

namespace moeflow {
const Isa& neon_dotprod_isa() { return neon_dotprod::kTable; }
}  // namespace moeflow
