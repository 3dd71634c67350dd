// Scratch memory that outlives calls, and the lock that lets one call use it at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace moeflow {

class Workspace {
 public:
  // Start a call: everything handed out before is void. `bytes` must cover all that follows.
  void begin(size_t bytes) {
    if (bytes > capacity_) {
      std::free(memory_);
      capacity_ = (bytes + 4095) / 4096 * 4096;
      memory_ = static_cast<uint8_t*>(std::aligned_alloc(4096, capacity_));
      if (memory_ == nullptr) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    used_ = 0;
  }

  template <typename T>
  T* take(size_t count) {
    T* result = reinterpret_cast<T*>(memory_ + used_);
    used_ += padded<T>(count);
    return result;
  }

  template <typename T>
  static size_t padded(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  uint8_t* memory_ = nullptr;
  size_t capacity_ = 0, used_ = 0;
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
