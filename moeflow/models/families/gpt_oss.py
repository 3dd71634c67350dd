"""gpt-oss: biases everywhere, a clamped SwiGLU, attention sinks, and a sliding window in every other layer."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_experts, read_sliding_layers, with_sliding_layers
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES = ExpertNames(router="router", router_bias="router.bias")
_ROPE: Final = {  # where a config says nothing
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    if not (reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling")):
        reader = ConfigReader(dict(reader.raw) | {"rope_parameters": _ROPE}, reader.file)
    has_bias = reader.get(bool, "attention_bias", True)
    config = read_decoder_config(
        reader,
        model_type="gpt_oss",
        default_theta=150000.0,
        default_head_dim=64,
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
        expert_bias=True,
        swiglu_alpha=reader.number("swiglu_alpha", 1.702, least=0.0, most=1e3),
        swiglu_limit=reader.number("swiglu_limit", 7.0, least=0.0, most=1e6),
    )
    are_sliding = read_sliding_layers(reader) or [layer % 2 == 0 for layer in range(config.num_layers)]
    return with_sliding_layers(config, reader.positive("sliding_window", 128), are_sliding)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    # A softmax over the chosen experts alone is that over all, renormalised.
    choose = Routing(config.routing.top_k, renormalize=True)
    return DecoderLayer(
        config, allocator, Attention(config, allocator, layer_idx), MoE(config, allocator, choose, NAMES)
    )
