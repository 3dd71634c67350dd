"""OLMoE: queries and keys are normalised over all heads at once, then clipped with the values."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_experts
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES = ExpertNames()


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    clip = reader.get(float, "clip_qkv", None)
    if clip is not None and clip <= 0:
        raise reader.error(f"'clip_qkv' is {clip}, where a positive number is expected")
    return read_decoder_config(
        reader,
        model_type="olmoe",
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
        norm_topk_prob=reader.get(bool, "norm_topk_prob", False),
        qkv_bias=reader.get(bool, "attention_bias", False),
        out_bias=reader.get(bool, "attention_bias", False),
        clip_qkv=clip,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    attention = Attention(config, allocator, layer_idx, qk_norm="all_heads")
    choose = Routing(config.routing.top_k, renormalize=config.routing.norm_topk_prob)
    return DecoderLayer(config, allocator, attention, MoE(config, allocator, choose, NAMES))
