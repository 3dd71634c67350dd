#define MOEFLOW_UNIT MOEFLOW_AVX512_BF16
#include "isa_table.h"

namespace moeflow {
const Isa& avx512_bf16_isa() { return avx512_bf16::kTable; }
}  // namespace moeflow
