// From the product of the QKV projection to what attention reads: queries and keys normalised and rotated, K and V
// in the cache. One pass over each token's row, a head at a time.
#include <algorithm>

#include "ops/ops.h"
#include "ops/rows.h"

namespace moeflow {
namespace {

struct Heads {
  const float* norm;  // [head_dim], or [num_heads, head_dim] for a norm over all heads; or null
  float all_heads;    // 1 / root mean square over all heads, if the norm is over all
};

// Puts the first of each pair of neighbours before the second of each. Queries and keys alike, so that their products
// do not change.
void split_pairs(float* x, int64_t size) {
  float second[kMaxInterleaved / 2];
  for (int64_t i = 0; i < size / 2; ++i) {
    second[i] = x[2 * i + 1];
    x[i] = x[2 * i];
  }
  std::copy_n(second, size / 2, x + size / 2);
}

// Normalise, clip and rotate one head of a query or a key.
void prepare_head(const Isa& isa, const AttentionInputCall& call, const Heads& heads, int64_t token, int64_t head,
                  float* x) {
  const int64_t dim = call.cache.head_dim;
  const auto normalise = [&] {
    const float scale = call.norm_all_heads ? heads.all_heads : isa.inverse_rms(x, dim, call.eps);
    isa.scale_row(x, scale, call.norm_all_heads ? heads.norm + head * dim : heads.norm, dim, x);
  };
  if (heads.norm != nullptr && !call.norms_last) normalise();
  if (call.clip > 0) isa.clip_row(x, call.clip, dim, x);
  const RotaryTable& rotary = call.rotary;
  if (rotary.cos != nullptr) {
    if (call.is_interleaved) split_pairs(x, rotary.dim);
    isa.rotate_row(x, rotary.cos + token * rotary.dim, rotary.sin + token * rotary.dim, rotary.dim, x);
  }
  if (heads.norm != nullptr && call.norms_last) normalise();
}

void prepare_token(const Isa& isa, const AttentionInputCall& call, int64_t token) {
  const int64_t dim = call.cache.head_dim, kv_heads = call.cache.num_heads;
  const int64_t num_projected = call.num_heads + (call.has_keys ? 2 * kv_heads : 0);
  const int64_t stride = call.qkv_stride == 0 ? num_projected * dim : call.qkv_stride;
  float* const q = call.qkv + token * stride;
  float* const k = q + call.num_heads * dim;
  float* const v = k + kv_heads * dim;
  Heads queries{call.q_norm, 0}, keys{call.k_norm, 0};
  if (call.q_norm != nullptr && call.norm_all_heads) {
    queries.all_heads = isa.inverse_rms(q, call.num_heads * dim, call.eps);
    if (call.has_keys) keys.all_heads = isa.inverse_rms(k, kv_heads * dim, call.eps);
  }
  for (int64_t head = 0; head < call.num_heads; ++head) {
    prepare_head(isa, call, queries, token, head, q + head * dim);
  }
  if (!call.has_keys) return;
  for (int64_t head = 0; call.v_norm != nullptr && head < kv_heads; ++head) {
    float* const x = v + head * dim;
    isa.scale_row(x, isa.inverse_rms(x, dim, call.eps), call.v_norm, dim, x);
  }
  if (call.clip > 0) isa.clip_row(v, call.clip, kv_heads * dim, v);
  for (int64_t head = 0; head < kv_heads; ++head) {
    prepare_head(isa, call, keys, token, head, k + head * dim);
    write_kv_row(call.cache, call.slots[token], head, k + head * dim, v + head * dim);
  }
}

}  // namespace

void attention_input(const Isa& isa, const AttentionInputCall& call) {
  const int64_t row_floats = (call.num_heads + 2 * call.cache.num_heads) * call.cache.head_dim;
  for_each_row(call.num_tokens, 4 * row_floats, [&](int64_t token) { prepare_token(isa, call, token); });
}

}  // namespace moeflow
