#define MOEFLOW_UNIT MOEFLOW_AVX512_VNNI
#include "isa_table.h"

namespace moeflow {
const Isa& avx512_vnni_isa() { return avx512_vnni::kTable; }
}  // namespace moeflow
