// Waits for a number in main memory that a GPU writes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "threads/spin.h"

namespace moeflow {

// Spins until the flag is not 0, at most so many seconds. Returns whether it is. All that the GPU wrote before the flag
// is then visible.
inline bool wait_for_flag(const std::atomic<int64_t>& flag, double seconds) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (flag.load(std::memory_order_acquire) != 0) return true;
    relax();
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (flag.load(std::memory_order_acquire) == 0) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace moeflow
