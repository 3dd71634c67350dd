// Which instruction set the unit that is being compiled belongs to, and how large its tiles are.
//
// A unit (isa_avx2.cpp, ..) says which it is before it includes anything: `#define MOEFLOW_UNIT MOEFLOW_AVX2`.
// Everything that such a unit includes lies in its namespace and has internal linkage: the units are compiled with
// flags that other units must not meet, and the linker must not choose a copy that the processor cannot run.
#pragma once

#define MOEFLOW_GENERIC 0
#define MOEFLOW_AVX2 1
#define MOEFLOW_AVX512 2
#define MOEFLOW_AVX512_VNNI 3
#define MOEFLOW_AVX512_BF16 4

// A header that is compiled by itself (by an editor, or by tests) gets what the compiler's flags allow.
#if !defined(MOEFLOW_UNIT)
#if defined(__AVX512BF16__)
#define MOEFLOW_UNIT MOEFLOW_AVX512_BF16
#elif defined(__AVX512VNNI__)
#define MOEFLOW_UNIT MOEFLOW_AVX512_VNNI
#elif defined(__AVX512F__)
#define MOEFLOW_UNIT MOEFLOW_AVX512
#elif defined(__AVX2__)
#define MOEFLOW_UNIT MOEFLOW_AVX2
#else
#define MOEFLOW_UNIT MOEFLOW_GENERIC
#endif
#endif

#if MOEFLOW_UNIT == MOEFLOW_AVX512_BF16
#define ISA_NAMESPACE avx512_bf16
#define ISA_NAME "avx512_bf16"
#elif MOEFLOW_UNIT == MOEFLOW_AVX512_VNNI
#define ISA_NAMESPACE avx512_vnni
#define ISA_NAME "avx512_vnni"
#elif MOEFLOW_UNIT == MOEFLOW_AVX512
#define ISA_NAMESPACE avx512
#define ISA_NAME "avx512"
#elif MOEFLOW_UNIT == MOEFLOW_AVX2
#define ISA_NAMESPACE avx2
#define ISA_NAME "avx2"
#else
#define ISA_NAMESPACE generic
#define ISA_NAME "generic"
#endif

// How many rows and bands make a tile whose accumulators fit the registers: ROW_TILE rows beside BAND_TILE bands, or
// ROW_TILE_OF_TWO rows beside two bands.
#if MOEFLOW_UNIT >= MOEFLOW_AVX512
#define ROW_TILE 6
#define ROW_TILE_OF_TWO 12
#define BAND_TILE 4
#else
#define ROW_TILE 2
#define ROW_TILE_OF_TWO 2
#define BAND_TILE 2
#endif
