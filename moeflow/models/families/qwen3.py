"""Qwen3: dense; each head's queries and keys are normalised, and the last layers may have a sliding window."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config
from moeflow.models.families.qwen2 import with_windows
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.weight_allocator import WeightAllocator


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    has_bias = reader.get(bool, "attention_bias", False)
    config = read_decoder_config(
        reader,
        model_type="qwen3",
        default_head_dim=128,
        qkv_bias=has_bias,
        out_bias=has_bias,
    )
    return with_windows(config, reader)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mlp = dense_mlp(allocator, config.hidden_size, config.feed_forward.intermediate_size)
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx, qk_norm="per_head"), mlp)
