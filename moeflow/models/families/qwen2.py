"""Qwen2: dense; queries, keys and values have biases, and the last layers may have a sliding window."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config, read_num_layers, read_sliding_layers, with_sliding_layers
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.weight_allocator import WeightAllocator


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    config = read_decoder_config(reader, model_type="qwen2", qkv_bias=True)
    return with_windows(config, reader)


def with_windows(config: ModelConfig, reader: ConfigReader) -> ModelConfig:
    """Return the config with the sliding window of those layers that have it: listed, or from one layer on."""
    if not reader.get(bool, "use_sliding_window", False):
        return config
    first = reader.get(int, "max_window_layers", 28)
    is_sliding = read_sliding_layers(reader) or tuple(layer >= first for layer in range(read_num_layers(reader)))
    return with_sliding_layers(config, reader.positive("sliding_window", 4096), is_sliding)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mlp = dense_mlp(allocator, config.hidden_size, config.feed_forward.intermediate_size)
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx), mlp)
