// What formats say of themselves in a word: how activations meet them, and which tile multiplies them.
#pragma once

#include <cstdint>

namespace moeflow {

// The form of activations: floats, bf16 (where the processor has instructions for it, else floats), or integers.
enum class Activation : int32_t { kF32 = 0, kBF16 = 1, kInt8 = 2, kInt16 = 3 };

enum class TileKind { kF32, kBF16, kIntegers, kBlocks, kFloat8 };

// Of formats that hold one kind of a file's blocks (`Source`), and nothing that is rounded.
constexpr bool holds_blocks(TileKind kind) { return kind == TileKind::kBlocks || kind == TileKind::kFloat8; }

}  // namespace moeflow
