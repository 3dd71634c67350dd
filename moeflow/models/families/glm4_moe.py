"""GLM-4.5: DeepSeek-V3's routing and shared expert; positions rotate half of each head, norms of heads are optional."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import BIASED_NAMES, check_sigmoid_routing, read_routed_experts, sigmoid_routing

_DEFAULTS: Final = {"first_k_dense_replace": 1, "n_shared_experts": 1}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    config = read_decoder_config(
        reader,
        model_type="glm4_moe",
        may_be_partial=True,
        default_rotary_share=0.5,
        has_qk_norm=reader.get(bool, "use_qk_norm", False),
        qkv_bias=reader.get(bool, "attention_bias", False),
        **read_routed_experts(reader, _DEFAULTS),
    )
    return check_sigmoid_routing(config, reader)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    attention = Attention(config, allocator, layer_idx, qk_norm="per_head" if config.attention.has_qk_norm else None)
    mlp = feed_forward(config, allocator, layer_idx, sigmoid_routing(config), BIASED_NAMES, has_float32_router=True)
    return DecoderLayer(config, allocator, attention, mlp)
