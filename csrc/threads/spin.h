// How threads wait for one another: first a short while without sleeping, because most waits are short.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeflow {

// How many pauses before a thread sleeps or yields: about 50 microseconds, longer than the gap between two
// kernels of a decode pass, far shorter than a pass of torch code that wants the cores.
constexpr int kSpins = 2000;

#if defined(__x86_64__)
inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
inline void relax() { asm volatile("yield"); }
#else
inline void relax() {}
#endif

}  // namespace moeflow
