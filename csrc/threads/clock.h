// The steady clock in nanoseconds: that of Python's `time.perf_counter_ns`, on Linux CLOCK_MONOTONIC.
#pragma once

#include <chrono>
#include <cstdint>

namespace moeflow {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Notes the time at a place; null: nobody asks.
inline void stamp(int64_t* at) {
  if (at != nullptr) *at = now_ns();
}

}  // namespace moeflow
