#define MOEFLOW_UNIT MOEFLOW_AVX2_VNNI
#include "isa_table.h"

namespace moeflow {
const Isa& avx2_vnni_isa() { return avx2_vnni::kTable; }
}  // namespace moeflow
