// Which instruction sets this processor and its operating system support. On x86, GCC's __builtin_cpu_supports uses
// CPUID and, for the registers of AVX and AVX-512, XGETBV. On ARM, Linux reports the usable features.
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "simd/isa.h"

namespace moeflow {
namespace {

struct Choice {
  const char* name;
  bool (*is_supported)();
  const Isa& (*table)();
};

bool always() { return true; }

#if defined(__x86_64__)

// Asked directly: not every compiler's __builtin_cpu_supports knows the word. It uses AVX's registers only.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1) != 0;
}

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

// AVX-VNNI, or its substitute in a build for tests.
bool has_avx2_vnni() {
  if (!has_avx2()) return false;
#if defined(MOEFLOW_AVX512_FOR_AVX2_VNNI)
  return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
#endif
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Its registers are large, so that Linux has to be asked before they are used. It refuses if a thread's signal stack is
// too small for them.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kBF16 = 1u << 22, kNeeded = kTile | kInt8 | kBF16;
  constexpr unsigned kRegisters = 3u << 17;                       // that the system keeps: set-up and contents
  constexpr int kRequestPermission = 0x1023, kContents = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kNeeded) != kNeeded) return false;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax & kRegisters) == kRegisters && syscall(SYS_arch_prctl, kRequestPermission, kContents) == 0;
#else
  return false;
#endif
}

constexpr Choice kChoices[] = {{"generic", always, generic_isa},
                               {"avx2", has_avx2, avx2_isa},
                               {"avx2_vnni", has_avx2_vnni, avx2_vnni_isa},
                               {"avx512", has_avx512, avx512_isa},
                               {"avx512_vnni", has_avx512_vnni, avx512_vnni_isa},
                               {"avx512_bf16", has_avx512_bf16, avx512_bf16_isa},
                               {"amx", has_amx, amx_isa}};

#elif defined(__aarch64__)

#if defined(__linux__)
bool has(unsigned long kind, unsigned long bits) { return (getauxval(kind) & bits) == bits; }

bool has_dotprod() { return has(AT_HWCAP, HWCAP_ASIMDDP | HWCAP_ASIMDHP | HWCAP_FPHP); }

bool has_i8mm() { return has_dotprod() && has(AT_HWCAP2, HWCAP2_I8MM | HWCAP2_BF16); }
#else
bool has_dotprod() { return false; }

bool has_i8mm() { return false; }
#endif

// NEON itself belongs to every such processor.
constexpr Choice kChoices[] = {
#if !defined(MOEFLOW_I8MM_ONLY)
    {"neon", always, neon_isa},
    {"neon_dotprod", has_dotprod, neon_dotprod_isa},
#endif
    {"neon_i8mm", has_i8mm, neon_i8mm_isa}};

#else

constexpr Choice kChoices[] = {{"generic", always, generic_isa}};

#endif

}  // namespace

const char* isa_name(int i) {
  return i < static_cast<int>(sizeof(kChoices) / sizeof(*kChoices)) ? kChoices[i].name : nullptr;
}

const Isa* choose_isa(const char* cap) {
  const Isa* best = nullptr;
  for (const Choice& choice : kChoices) {
    if (choice.is_supported()) best = &choice.table();
    if (std::strcmp(choice.name, cap) == 0) return best;
  }
  return cap[0] == '\0' ? best : nullptr;
}

}  // namespace moeflow
