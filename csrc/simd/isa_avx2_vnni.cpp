// Takes over what AVX2 does, but for products of integers.
#define MOEFLOW_UNIT MOEFLOW_AVX2_VNNI
#include "simd/isa_above.h"

namespace moeflow {
const Isa& avx2_vnni_isa() {
  static const Isa isa = avx2_vnni::table_above<avx2_isa>();
  return isa;
}
}  // namespace moeflow
