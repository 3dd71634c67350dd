// Which instruction set the unit that is being compiled belongs to, and how large its tiles are.
//
// A unit (isa_avx2.cpp, ..) defines its name before it includes anything: `#define MOEFLOW_UNIT MOEFLOW_AVX2`.
// Everything that such a unit includes is in its namespace and has internal linkage. Units have their own compiler
// flags, and the linker must not choose a copy that the processor cannot run.
#pragma once

#define MOEFLOW_GENERIC 0
#define MOEFLOW_AVX2 1
#define MOEFLOW_AVX2_VNNI 2
#define MOEFLOW_AVX512 3
#define MOEFLOW_AVX512_VNNI 4
#define MOEFLOW_AVX512_BF16 5
#define MOEFLOW_AMX 6  // beside AVX-512 with BF16
#define MOEFLOW_NEON 16
#define MOEFLOW_NEON_DOTPROD 17
#define MOEFLOW_NEON_I8MM 18

// A header that is compiled by itself (by an editor, or by tests) gets what the compiler's flags allow.
#if !defined(MOEFLOW_UNIT)
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define MOEFLOW_UNIT MOEFLOW_AMX
#elif defined(__AVX512BF16__)
#define MOEFLOW_UNIT MOEFLOW_AVX512_BF16
#elif defined(__AVX512VNNI__)
#define MOEFLOW_UNIT MOEFLOW_AVX512_VNNI
#elif defined(__AVX512F__)
#define MOEFLOW_UNIT MOEFLOW_AVX512
#elif defined(__AVXVNNI__)
#define MOEFLOW_UNIT MOEFLOW_AVX2_VNNI
#elif defined(__AVX2__)
#define MOEFLOW_UNIT MOEFLOW_AVX2
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MOEFLOW_UNIT MOEFLOW_NEON_I8MM
#elif defined(__ARM_FEATURE_DOTPROD)
#define MOEFLOW_UNIT MOEFLOW_NEON_DOTPROD
#elif defined(__aarch64__)
#define MOEFLOW_UNIT MOEFLOW_NEON
#else
#define MOEFLOW_UNIT MOEFLOW_GENERIC
#endif
#endif

#if MOEFLOW_UNIT == MOEFLOW_AMX
#define ISA_NAMESPACE amx
#define ISA_NAME "amx"
#elif MOEFLOW_UNIT == MOEFLOW_AVX512_BF16
#define ISA_NAMESPACE avx512_bf16
#define ISA_NAME "avx512_bf16"
#elif MOEFLOW_UNIT == MOEFLOW_AVX512_VNNI
#define ISA_NAMESPACE avx512_vnni
#define ISA_NAME "avx512_vnni"
#elif MOEFLOW_UNIT == MOEFLOW_AVX512
#define ISA_NAMESPACE avx512
#define ISA_NAME "avx512"
#elif MOEFLOW_UNIT == MOEFLOW_AVX2_VNNI
#define ISA_NAMESPACE avx2_vnni
#define ISA_NAME "avx2_vnni"
#elif MOEFLOW_UNIT == MOEFLOW_AVX2
#define ISA_NAMESPACE avx2
#define ISA_NAME "avx2"
#elif MOEFLOW_UNIT == MOEFLOW_NEON_I8MM
#define ISA_NAMESPACE neon_i8mm
#define ISA_NAME "neon_i8mm"
#elif MOEFLOW_UNIT == MOEFLOW_NEON_DOTPROD
#define ISA_NAMESPACE neon_dotprod
#define ISA_NAME "neon_dotprod"
#elif MOEFLOW_UNIT == MOEFLOW_NEON
#define ISA_NAMESPACE neon
#define ISA_NAME "neon"
#else
#define ISA_NAMESPACE generic
#define ISA_NAME "generic"
#endif

#define IS_NEON (MOEFLOW_UNIT >= MOEFLOW_NEON)

// Whether it has products of bfloat16 that it adds up in floats.
#define HAS_BF16_DOT \
  (MOEFLOW_UNIT == MOEFLOW_AVX512_BF16 || MOEFLOW_UNIT == MOEFLOW_AMX || MOEFLOW_UNIT == MOEFLOW_NEON_I8MM)

// Whether it has products of matrices: of bytes, two rows by two outputs; of bytes or bfloat16, 16 rows by 16 outputs.
#define HAS_MATRIX_DOT (MOEFLOW_UNIT == MOEFLOW_NEON_I8MM)
#define HAS_AMX (MOEFLOW_UNIT == MOEFLOW_AMX)

// Whether it has products of unsigned with signed bytes that it adds up by fours in 32 bits; or by twos in 16 bits.
#define HAS_VNNI \
  (MOEFLOW_UNIT == MOEFLOW_AVX2_VNNI || (MOEFLOW_UNIT >= MOEFLOW_AVX512_VNNI && MOEFLOW_UNIT <= MOEFLOW_AMX))
#define HAS_PAIRED_PRODUCTS (MOEFLOW_UNIT == MOEFLOW_AVX2 || MOEFLOW_UNIT == MOEFLOW_AVX512)
