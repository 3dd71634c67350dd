// From weights to GGUF's blocks of few bits, by search.
#pragma once

#include <cstdint>

#include "formats/source_types.h"

namespace moeflow {

// Make rows of blocks of type `to` from rows of type `from`. In each block, the search minimizes the sum of
// importance[column] * error^2 over scales (and minima). `importance` is that of `cols` columns, null: alike. Rows hold
// whole
// blocks. In the calling thread. Throws std::invalid_argument for types that are only read.
void quantize_rows(SourceType to, SourceType from, const void* source, int64_t num_rows, int64_t cols,
                   const float* importance, uint8_t* out);

}  // namespace moeflow
