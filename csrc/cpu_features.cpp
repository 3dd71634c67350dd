// Which instruction sets this processor and its operating system support. GCC's __builtin_cpu_supports asks
// CPUID and, for the registers that AVX and AVX-512 add, XGETBV.
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "isa.h"

namespace moeflow {
namespace {

struct Choice {
  const char* name;
  bool is_supported;
  const Isa& (*table)();
};

#if defined(__x86_64__)
// Asked directly: not every compiler's __builtin_cpu_supports knows the word. It uses AVX's registers only.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1) != 0;
}
#endif

}  // namespace

const Isa* choose_isa(const char* cap) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  const Choice choices[] = {{"generic", true, generic_isa},
                            {"avx2", avx2, avx2_isa},
                            {"avx512", avx512, avx512_isa},
                            {"avx512_vnni", vnni, avx512_vnni_isa},
                            {"avx512_bf16", bf16, avx512_bf16_isa}};
#else
  const Choice choices[] = {{"generic", true, generic_isa}};
#endif
  const Isa* best = nullptr;
  bool is_known = cap[0] == '\0';
  for (const Choice& choice : choices) {
    if (choice.is_supported) best = &choice.table();
    if (std::strcmp(choice.name, cap) == 0) {
      is_known = true;
      break;
    }
  }
  return is_known ? best : nullptr;
}

}  // namespace moeflow
