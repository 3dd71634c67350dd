// How rows are normalised: by their root mean square, or as a layer norm does it.
#pragma once

#include <cstdint>

#include "simd/isa.h"

namespace moeflow {

// x / sqrt(mean(x^2) + eps) * weight. A layer norm subtracts the row's mean from x first, and adds a bias.
struct Norm {
  const float* weight = nullptr;  // [size]; null: rows stay as they are
  float eps = 0;
  bool subtracts_mean = false;
  const float* bias = nullptr;    // [size], of a layer norm; or null
};

// `out` may be `x`.
inline void normalise_row(const Isa& isa, const Norm& norm, const float* x, int64_t size, float* out) {
  if (norm.subtracts_mean) {
    isa.layer_norm_row(x, norm.eps, norm.weight, norm.bias, size, out);
  } else {
    isa.scale_row(x, isa.inverse_rms(x, size, norm.eps), norm.weight, size, out);
  }
}

}  // namespace moeflow
