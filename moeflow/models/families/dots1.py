"""dots.llm1: DeepSeek-V3's routing and shared expert, Qwen3's attention, and a sliding window of the last layers."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config, read_num_layers, read_sliding_layers, with_sliding_layers
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import BIASED_NAMES, check_sigmoid_routing, read_routed_experts, sigmoid_routing

_WINDOW: Final = 4096  # where a config says nothing; null: there is none


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    has_bias = reader.get(bool, "attention_bias", False)
    fields = read_routed_experts(reader, {}) | {"norm_topk_prob": reader.get(bool, "norm_topk_prob", False)}
    config = read_decoder_config(reader, model_type="dots1", qkv_bias=has_bias, out_bias=has_bias, **fields)
    return _with_windows(check_sigmoid_routing(config, reader), reader)


def _with_windows(config: ModelConfig, reader: ConfigReader) -> ModelConfig:
    if reader.raw.get("sliding_window", _WINDOW) is None:
        return config
    first = reader.get(int, "max_window_layers", 62)
    is_sliding = read_sliding_layers(reader) or tuple(layer >= first for layer in range(read_num_layers(reader)))
    return with_sliding_layers(config, reader.positive("sliding_window", _WINDOW), is_sliding)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mlp = feed_forward(config, allocator, layer_idx, sigmoid_routing(config), BIASED_NAMES, has_float32_router=True)
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx, qk_norm="per_head"), mlp)
