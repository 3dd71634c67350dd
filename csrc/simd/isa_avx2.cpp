#define MOEFLOW_UNIT MOEFLOW_AVX2
#include "simd/isa_table.h"

namespace moeflow {
const Isa& avx2_isa() { return avx2::kTable; }
}  // namespace moeflow
