"""Qwen2-MoE: a shared expert that each token weighs by a gate, and biases of queries, keys and values."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import (
    read_decoder_config,
    read_dense_layers,
    read_num_experts,
    read_num_layers,
    read_sliding_layers,
    with_sliding_layers,
)
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.mlp import NetworkNames
from moeflow.models.layers.moe import ExpertNames
from moeflow.models.layers.shared_network import SharedNames
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES: Final = ExpertNames(shared=SharedNames(NetworkNames(block="mlp.shared_expert"), gate="mlp.shared_expert_gate"))


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    config = read_decoder_config(
        reader,
        model_type="qwen2_moe",
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
        norm_topk_prob=reader.get(bool, "norm_topk_prob", False),
        intermediate_size=reader.positive("moe_intermediate_size"),
        dense_layers=read_dense_layers(reader),
        dense_intermediate_size=reader.positive("intermediate_size"),
        shared_intermediate_size=reader.positive("shared_expert_intermediate_size"),
        has_shared_gate=True,
        qkv_bias=reader.get(bool, "qkv_bias", True),
    )
    if not reader.get(bool, "use_sliding_window", False):
        return config
    end = reader.get(int, "max_window_layers", 28)
    is_sliding = read_sliding_layers(reader) or tuple(
        layer < end and layer % 2 == 0 for layer in range(read_num_layers(reader))
    )
    return with_sliding_layers(config, reader.positive("sliding_window", 4096), is_sliding)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, renormalize=config.routing.norm_topk_prob)
    mlp = feed_forward(config, allocator, layer_idx, choose, NAMES)
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx), mlp)
