// Memory that one operation of several hands results to the next in. Grows to the largest pass.
#pragma once

#include <cstdint>
#include <vector>

namespace moeflow {

template <typename T>
T* at_least(std::vector<T>& values, int64_t count) {
  if (static_cast<int64_t>(values.size()) < count) values.resize(count);
  return values.data();
}

}  // namespace moeflow
