// AMX: eight registers of up to 16 rows by 64 bytes, and products of the matrices in them.
//
//   A, rows of activations           B, weights in the order of a band      C += A * B
//   row r: 16 words of 32 bits       line i: word i of 16 outputs           row r: 16 outputs
//
// A word is two bfloat16 or four bytes, neighbours along `k`. Words i of A are multiplied by line i of B.
//
// Written as assembly: GCC 12's own intrinsics do not declare their memory reads, so the compiler may delay stores past
// these loads.
#pragma once

#include <cstdint>

#include "simd/isa_unit.h"
#include "simd/simd_types.h"

#if HAS_AMX

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

constexpr int kTileRows = 16, kTileRowBytes = 64;

struct TileRegisterShape {
  int rows, row_bytes;
};

// Sets the registers up for as long as it lives. Each tile does it anew, at some 200 cycles, and releases them: a thread
// that has nothing in them costs context switches no 8 KiB more, needs nothing when it starts or is forked, and meets
// other users of them (torch's oneDNN) with nothing set up.
class TileRegisters {
 public:
  explicit TileRegisters(const TileRegisterShape (&shapes)[8]) {
    Palette palette{};
    for (int i = 0; i < 8; ++i) {
      palette.row_bytes[i] = static_cast<uint16_t>(shapes[i].row_bytes);
      palette.rows[i] = static_cast<uint8_t>(shapes[i].rows);
    }
    asm volatile("ldtilecfg %0" : : "m"(palette));
  }
  ~TileRegisters() { asm volatile("tilerelease" : : : "memory"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  struct alignas(64) Palette {
    uint8_t id = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
};

template <int kRegister>
FORCE_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kRegister));
}

// `stride` bytes from a row to the next.
template <int kRegister>
FORCE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kRegister) : "memory");
}

template <int kRegister>
FORCE_INLINE void store_tile_register(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kRegister) : "memory");
}

// Pairs of bfloat16: first the sums over even and over odd `k`, each in order and from zero on, then C += their sum.
// Subnormal numbers count as zero.
template <int kC, int kA, int kB>
FORCE_INLINE void multiply_bf16_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// Quads of signed bytes; of signed ones with unsigned ones in B.
template <int kC, int kA, int kB>
FORCE_INLINE void multiply_signed_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
FORCE_INLINE void multiply_unsigned_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

#endif
