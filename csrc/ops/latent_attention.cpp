// Latent attention as attention of all heads over one KV head: queries are projected to latents before, results are
// projected to values after. A token's row has the same bits in any pass, as each of the steps
// has.
#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/scratch.h"

namespace moeflow {
namespace {

// What one step hands to the next.
struct Between {
  Buffer<float> q, queries, attended;
};

// Copies the rotated part, with pairs of neighbours moved half of it apart, and rotates it.
void rotate(const Isa& isa, const LatentAttentionCall& call, int64_t token, const float* x, float* out) {
  const RotaryTable& rotary = call.rotary;
  const int64_t dim = rotary.dim, half = dim / 2;
  if (call.projections.is_interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      out[i] = x[2 * i];
      out[half + i] = x[2 * i + 1];
    }
    x = out;
  }
  isa.rotate_row(x, rotary.cos + token * dim, rotary.sin + token * dim, dim, out);
}

// Stores a token's latent, normalised, and its rotary key.
void store(const Isa& isa, const LatentAttentionCall& call, int64_t token, const float* x) {
  static thread_local Buffer<float> buffer;
  const int64_t latent = call.cache.latent_dim;
  float* const row = buffer.at_least(call.cache.head_dim);
  normalise_row(isa, call.projections.latent_norm, x, latent, row);
  rotate(isa, call, token, x + latent, row + latent);
  write_latent_row(call.cache, call.slots[token], 0, row);
}

}  // namespace

void latent_attention(const Isa& isa, const LatentAttentionCall& call) {
  static thread_local Between between;
  const LatentProjections& by = call.projections;
  const KVCache& cache = call.cache;
  const int64_t tokens = call.num_tokens, heads = call.num_heads, dim = cache.head_dim, latent = cache.latent_dim;
  const int64_t query_dim = by.nope_dim + dim - latent, q_size = heads * query_dim;
  const int64_t row = (by.q_b.data == nullptr ? q_size : by.q_b.cols) + dim;
  const float* q = call.projected;
  int64_t q_stride = row;
  if (by.q_b.data != nullptr) {
    float* const out = between.q.at_least(tokens * q_size);
    linear(isa, LinearCall{by.q_b, q, tokens, row, nullptr, nullptr, out, by.q_norm});
    q = out;
    q_stride = q_size;
  }
  float* const queries = between.queries.at_least(tokens * heads * dim);
  LinearCall to_latents{by.k_b, q, tokens, q_stride, nullptr, nullptr, queries};
  to_latents.out_stride = heads * dim;
  to_latents.num_heads = heads;
  to_latents.head_rows = latent;
  to_latents.x_head_stride = query_dim;
  to_latents.out_head_stride = dim;
  linear(isa, to_latents);
  for_each_row(tokens, 4 * (heads * (dim - latent) + dim), [&](int64_t token) {
    store(isa, call, token, call.projected + (token + 1) * row - dim);
    for (int64_t head = 0; head < heads; ++head) {
      rotate(isa, call, token, q + token * q_stride + head * query_dim + by.nope_dim,
             queries + (token * heads + head) * dim + latent);
    }
  });
  float* const attended = between.attended.at_least(tokens * heads * latent);
  AttentionCall attending{cache, queries, heads * dim, heads, call.sequences, call.sliding_window, call.tree_masks,
                          attended};
  attending.scale = call.scale;
  attention(isa, attending);
  LinearCall to_values{by.v_b, attended, tokens, heads * latent, nullptr, nullptr, call.out};
  to_values.out_stride = heads * by.value_dim;
  to_values.num_heads = heads;
  to_values.head_rows = by.value_dim;
  to_values.x_head_stride = latent;
  to_values.out_head_stride = by.value_dim;
  linear(isa, to_values);
}

}  // namespace moeflow
