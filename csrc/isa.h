// What each instruction set offers, as one table of functions filled in its own translation unit.
//
// Those units are compiled with flags that other units must not meet, so they include nothing but this header,
// matrix.h and tiles.h, and everything in them but the function that hands out the table has internal linkage.
#pragma once

#include "matrix.h"

namespace moeflow {

struct Isa {
  const char* name;
  // The form in which activations must come for weights of a format.
  Activation (*activation)(Format format);
  // Prepare one row of `cols` floats in that form; fills up with zeros to padded_cols.
  void (*prepare_row)(Activation kind, const float* x, int64_t cols, void* out);
  // Multiply any number of rows up to kMaxTileRows with up to kMaxTileBands bands.
  void (*tile)(Format format, const Tile& tile);
  // h[r][16 * num_pairs] = silu(gate) * up, where a tile's results hold bands in the order gate, up, gate, up.
  void (*silu_and_mul)(const float* tile_out, int num_rows, int num_pairs, float* h, int64_t h_stride);
};

const Isa& generic_isa();
#if defined(__x86_64__)
const Isa& avx2_isa();
const Isa& avx512_isa();
const Isa& avx512_vnni_isa();
const Isa& avx512_bf16_isa();
#endif

// The best table that this processor and its operating system support, at most `cap` ("generic", "avx2",
// "avx512", "avx512_vnni", "avx512_bf16"; empty: no cap). Null if the cap is not one of these words.
const Isa* choose_isa(const char* cap);

}  // namespace moeflow
