"""Llama: dense, and the shape all other families vary. Biases are optional."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.weight_allocator import WeightAllocator


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_decoder_config(
        reader,
        model_type="llama",
        qkv_bias=reader.get(bool, "attention_bias", False),
        out_bias=reader.get(bool, "attention_bias", False),
        mlp_bias=reader.get(bool, "mlp_bias", False),
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mlp = dense_mlp(
        allocator, config.hidden_size, config.feed_forward.intermediate_size, bias=config.feed_forward.mlp_bias
    )
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx), mlp)
