// Layers of a decoder, one after another in one call: between two kernels of a pass there is then no Python.
#include <vector>

#include "ops.h"

namespace moeflow {
namespace {

// What one stage hands to the next. Grows to the largest pass.
struct Between {
  std::vector<float> qkv, attended;
};

}  // namespace

void decoder(const Isa& isa, const DecoderCall& call) {
  static thread_local Between between;
  const int64_t tokens = call.num_tokens;
  for (int64_t i = 0; i < call.num_layers; ++i) {
    const DecoderLayer& layer = *call.layers[i];
    const KVCache& cache = *call.caches[i];
    const int64_t row = layer.qkv.rows, hidden_size = layer.qkv.cols, q_size = layer.num_heads * cache.head_dim;
    if (static_cast<int64_t>(between.qkv.size()) < tokens * row) between.qkv.resize(tokens * row);
    if (static_cast<int64_t>(between.attended.size()) < tokens * q_size) between.attended.resize(tokens * q_size);
    float* const qkv = between.qkv.data();
    float* const attended = between.attended.data();

    linear(isa, LinearCall{layer.qkv, call.hidden, tokens, hidden_size, layer.qkv_bias, nullptr, qkv, layer.input_norm,
                           layer.eps});
    attention_input(isa, AttentionInputCall{cache, qkv, tokens, layer.num_heads, layer.q_norm, layer.k_norm,
                                            layer.norm_all_heads, layer.eps, layer.clip, call.cos, call.sin,
                                            call.slots});
    const Sequences& sequences = call.sequences;
    attention(isa, AttentionCall{cache, qkv, row, layer.num_heads, sequences.count, sequences.first_tokens,
                                 sequences.starts, sequences.counts, sequences.table_offsets, sequences.block_tables,
                                 layer.sliding_window, call.tree_masks, attended});
    MoEStageCall stage = layer.stage;
    stage.attended = attended;
    stage.hidden = stage.out = call.hidden;
    stage.num_tokens = tokens;
    moe_stage(isa, stage);
  }
}

}  // namespace moeflow
