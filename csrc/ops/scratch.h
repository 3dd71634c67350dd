// Memory that one operation of several hands results to the next in. Grows to the largest pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace moeflow {

// Bytes that outlive calls: the workspace, and the buffers of all threads.
inline std::atomic<int64_t> kept_bytes{0};

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { kept_bytes -= bytes(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Memory for so many values. Its contents are void if it grows: the old memory is freed first.
  T* at_least(int64_t count) {
    if (static_cast<int64_t>(values_.size()) < count) {
      kept_bytes -= bytes();
      values_ = std::vector<T>();
      values_.resize(count);
      kept_bytes += bytes();
    }
    return values_.data();
  }

 private:
  int64_t bytes() const { return static_cast<int64_t>(values_.capacity() * sizeof(T)); }
  std::vector<T> values_;
};

}  // namespace moeflow
