#define MOEFLOW_UNIT MOEFLOW_GENERIC
#include "simd/isa_table.h"

namespace moeflow {
const Isa& generic_isa() { return generic::kTable; }
}  // namespace moeflow
