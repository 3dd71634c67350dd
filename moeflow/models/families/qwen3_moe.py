"""Qwen3-MoE: each head's queries and keys are normalised; some layers may be dense."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_dense_layers, read_num_experts
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.moe import ExpertNames
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES = ExpertNames()


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_decoder_config(
        reader,
        model_type="qwen3_moe",
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
        norm_topk_prob=reader.get(bool, "norm_topk_prob", False),
        intermediate_size=reader.positive("moe_intermediate_size"),
        dense_layers=read_dense_layers(reader),
        dense_intermediate_size=reader.positive("intermediate_size"),
        qkv_bias=reader.get(bool, "attention_bias", False),
        out_bias=reader.get(bool, "attention_bias", False),
        sliding_window=reader.positive("sliding_window") if reader.get(bool, "use_sliding_window", False) else None,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, renormalize=config.routing.norm_topk_prob)
    mlp = feed_forward(config, allocator, layer_idx, choose, NAMES)
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx, qk_norm="per_head"), mlp)
