// Takes over what AVX-512 does, but for products of integers.
#define MOEFLOW_UNIT MOEFLOW_AVX512_VNNI
#include "simd/isa_above.h"

namespace moeflow {
const Isa& avx512_vnni_isa() {
  static const Isa isa = avx512_vnni::table_above<avx512_isa>();
  return isa;
}
}  // namespace moeflow
