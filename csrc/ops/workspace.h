// Scratch memory that outlives calls, and the lock that lets one call use it at a time.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

#include "ops/scratch.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#endif

namespace moeflow {

class Workspace {
 public:
  Workspace() = default;
  ~Workspace() {
    ASAN_UNPOISON_MEMORY_REGION(memory_, capacity_);
    std::free(memory_);
    kept_bytes -= static_cast<int64_t>(capacity_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Start a call: earlier memory is void. `bytes` must cover all that follows.
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
    ASAN_POISON_MEMORY_REGION(memory_, capacity_);  // a step beyond the allocation is an error
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

// A workspace, and the mutex that is held by who uses it.
struct LockedWorkspace {
  std::mutex mutex;
  Workspace workspace;
};

// Of threads that compute by themselves (`use_own_threads`); null: this thread shares the one of all others.
inline thread_local LockedWorkspace* own_workspace = nullptr;

// Holds this thread's workspace for as long as it lives. The shared one is never destroyed: at the end of the process
// another thread may still be computing in it.
class WorkspaceLock {
 public:
  WorkspaceLock() : held_(own_workspace == nullptr ? shared() : *own_workspace), lock_(held_.mutex) {}
  Workspace& operator*() const { return held_.workspace; }
  Workspace* operator->() const { return &held_.workspace; }

 private:
  friend struct ForkLocks;
  static LockedWorkspace& shared() {
    static LockedWorkspace* const workspace = new LockedWorkspace();
    return *workspace;
  }
  LockedWorkspace& held_;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace moeflow
