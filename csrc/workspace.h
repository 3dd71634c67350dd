// Scratch memory that outlives calls, and the lock that lets one call use it at a time.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

#include "scratch.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#endif

namespace moeflow {

class Workspace {
 public:
  // Start a call: everything handed out before is void. `bytes` must cover all that follows.
  void begin(size_t bytes) {
    ASAN_UNPOISON_MEMORY_REGION(memory_, capacity_);
    if (bytes > capacity_) {
      std::free(memory_);
      kept_bytes -= static_cast<int64_t>(capacity_);
      capacity_ = (bytes + 4095) / 4096 * 4096;
      memory_ = static_cast<uint8_t*>(std::aligned_alloc(4096, capacity_));
      if (memory_ == nullptr) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
      kept_bytes += static_cast<int64_t>(capacity_);
    }
    ASAN_POISON_MEMORY_REGION(memory_, capacity_);  // a step beyond what is taken is an error
    bytes_ = bytes;
    used_ = 0;
  }

  template <typename T>
  T* take(size_t count) {
    T* result = reinterpret_cast<T*>(memory_ + used_);
    used_ += padded<T>(count);
    assert(used_ <= bytes_);
    ASAN_UNPOISON_MEMORY_REGION(result, count * sizeof(T));
    return result;
  }

  template <typename T>
  static size_t padded(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  uint8_t* memory_ = nullptr;
  size_t capacity_ = 0;
  size_t bytes_ = 0, used_ = 0;  // of this call
};

// Holds the only workspace for as long as it lives. The workspace is never destroyed: at the end of the process
// another thread may still be computing in it.
class WorkspaceLock {
 public:
  WorkspaceLock() : lock_(mutex()) {}
  Workspace& operator*() const { return instance(); }
  Workspace* operator->() const { return &instance(); }

 private:
  friend struct ForkLocks;
  static std::mutex& mutex() {
    static std::mutex* const mutex = new std::mutex();
    return *mutex;
  }
  static Workspace& instance() {
    static Workspace* const workspace = new Workspace();
    return *workspace;
  }
  std::lock_guard<std::mutex> lock_;
};

}  // namespace moeflow
