#define MOEFLOW_UNIT MOEFLOW_NEON_I8MM
#include "simd/isa_table.h"

namespace moeflow {
const Isa& neon_i8mm_isa() { return neon_i8mm::kTable; }
}  // namespace moeflow
