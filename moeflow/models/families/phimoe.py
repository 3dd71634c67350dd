"""Phi-3.5-MoE: Mixtral with layer norms, biases everywhere but in experts, and a router of its own (SparseMixer).

Rotary positions are stretched for long contexts (LongRoPE), equally for texts of any length: with the factors of long
texts, unless the model takes only short ones.
"""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_experts
from moeflow.models.families.mixtral import NAMES
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.rope_keys import read_rope

_THETA = 1e6


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    top_k = reader.positive("num_experts_per_tok", 2)
    if top_k != 2:
        raise reader.error(f"'num_experts_per_tok' is {top_k}, where this family's router chooses 2")
    has_window = reader.raw.get("sliding_window") is not None
    has_bias = reader.get(bool, "attention_bias", False)
    hidden_size, num_heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    max_position = reader.positive("max_position_embeddings")
    return read_decoder_config(
        reader,
        model_type="phimoe",
        rope=read_rope(reader, _THETA, max_position, max(hidden_size // num_heads, 1), may_be_long=True),
        num_experts=read_num_experts(reader),
        top_k=top_k,
        norm_topk_prob=False,
        sparsemixer_jitter=reader.number("router_jitter_noise", 0.01, least=0.0, most=1.0),
        qkv_bias=has_bias,
        out_bias=has_bias,
        lm_head_bias=reader.get(bool, "lm_head_bias", False),
        sliding_window=reader.positive("sliding_window") if has_window else None,
        has_layer_norms=True,
        norm_bias=True,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    assert config.routing.sparsemixer_jitter is not None
    choose = Routing(config.routing.top_k, score="sparsemixer", jitter=config.routing.sparsemixer_jitter)
    return DecoderLayer(
        config, allocator, Attention(config, allocator, layer_idx), MoE(config, allocator, choose, NAMES)
    )
