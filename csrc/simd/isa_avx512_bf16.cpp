// Takes over what AVX-512 with VNNI does, but for products of bfloat16 and float8.
#define MOEFLOW_UNIT MOEFLOW_AVX512_BF16
#include "simd/isa_above.h"

namespace moeflow {
const Isa& avx512_bf16_isa() {
  static const Isa isa = avx512_bf16::table_above<avx512_vnni_isa>();
  return isa;
}
}  // namespace moeflow
