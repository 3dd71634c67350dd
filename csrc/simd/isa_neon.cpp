#define MOEFLOW_UNIT MOEFLOW_NEON
#include "simd/isa_table.h"

namespace moeflow {
const Isa& neon_isa() { return neon::kTable; }
}  // namespace moeflow
