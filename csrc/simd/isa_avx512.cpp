#define MOEFLOW_UNIT MOEFLOW_AVX512
#include "simd/isa_table.h"

namespace moeflow {
const Isa& avx512_isa() { return avx512::kTable; }
}  // namespace moeflow
