// The operations that Python calls: a few big calls a layer, each spread over the pool. Raw pointers and sizes;
// activations are float32 throughout. Nothing here allocates but the workspace, which grows to the largest call.
#pragma once

#include <cstdint>

#include "isa.h"

namespace moeflow {

// out[r, n] = x[r, k] @ weight.T (+ bias[n]) (+ residual[r, n]). `residual` may be `out` itself.
struct LinearCall {
  Matrix weight;  // [n, k]
  const float* x;
  int64_t num_rows;
  int64_t x_stride;       // floats from a row of x to the next
  const float* bias;      // or null
  const float* residual;  // or null
  float* out;             // rows n apart
};
void linear(const Isa& isa, const LinearCall& call);

// One expert layer: out[t] = (residual[t] +) sum over k of topk_weights[t, k] * down(silu(gate(x)) * up(x)).
// The results of a token's experts are added in ascending order of expert number.
struct ExpertsCall {
  const Matrix* gate_up;  // [num_experts], [2 width, hidden]; bands in turn: gate 0..15, up 0..15, gate 16..31, ...
  const Matrix* down;     // [num_experts], [hidden, width]
  int64_t num_experts, hidden, width;
  const float* x;  // [num_tokens, hidden]
  int64_t num_tokens, top_k;
  const int64_t* topk_ids;    // [num_tokens, top_k], each below num_experts
  const float* topk_weights;  // [num_tokens, top_k]
  const float* residual;      // [num_tokens, hidden], or null; may be `out` itself
  float* out;                 // [num_tokens, hidden]
};
void experts(const Isa& isa, const ExpertsCall& call);

enum class SourceType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// Pack a row-major matrix [.., cols] into `out`. `order[i]` is the source row that becomes output i, or -1 for
// zeros. Integer formats round to nearest with scale = max|w| / 127 (INT8) or as GGUF's Q4_0 (INT4), in fp16.
void pack(Format format, SourceType type, const void* source, int64_t cols, const int64_t* order, int64_t num_rows,
          uint8_t* out);

// Pack rows of GGUF blocks (Q8_0 into INT8, Q4_0 into INT4) without changing a value; cols is a multiple of 32.
void pack_blocks(Format format, const uint8_t* blocks, int64_t cols, const int64_t* order, int64_t num_rows,
                 uint8_t* out);

// The exact values that a packed matrix stands for, row-major [rows, cols].
void unpack(const Matrix& matrix, float* out);

}  // namespace moeflow
