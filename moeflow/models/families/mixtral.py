"""Mixtral: Llama with experts in place of the feed-forward network, and an optional sliding window."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_experts
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    has_window = reader.raw.get("sliding_window") is not None
    return read_decoder_config(
        reader,
        model_type="mixtral",
        default_theta=1e6,
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
        sliding_window=reader.positive("sliding_window") if has_window else None,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, renormalize=True)
    return DecoderLayer(
        config, allocator, Attention(config, allocator, layer_idx), MoE(config, allocator, choose, NAMES)
    )
