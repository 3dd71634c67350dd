"""Qwen3-Next: most layers are gated delta nets, the others attend, gated; experts as in Qwen2-MoE.

Norms multiply by one more than their weights, which a folder's checkpoint is seen with (`checkpoint/renamed/`).
"""

from __future__ import annotations

from typing import Any, Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.recurrent_config import MAX_KEY_DIM, MAX_TAPS, GatedDeltaConfig, RecurrentConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import (
    read_decoder_config,
    read_dense_layers,
    read_layer_types,
    read_num_experts,
    read_num_layers,
)
from moeflow.models.families.qwen2_moe import NAMES
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer, LayerNames
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.gated_attention import GatedAttention
from moeflow.models.layers.recurrent.gated_delta_net import GatedDeltaNet
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import predictors

_KINDS: Final = {"full_attention": False, "linear_attention": True}
_LINEAR: Final = LayerNames(mixer="linear_attn")


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_linear_config(
        reader,
        model_type="qwen3_next",
        norm_topk_prob=reader.get(bool, "norm_topk_prob", True),
        dense_layers=read_dense_layers(reader),
        dense_intermediate_size=reader.positive("intermediate_size", 5632),
        **read_experts(reader),
    )


def read_linear_config(reader: ConfigReader, *, model_type: str, **family: Any) -> ModelConfig:
    """Return the shape of a model of such layers; `family` is as `read_decoder_config` has it.

    Raises: CheckpointError.
    """
    has_bias = reader.get(bool, "attention_bias", False)
    return read_decoder_config(
        reader,
        model_type=model_type,
        may_be_partial=True,
        default_head_dim=256,
        default_rotary_share=0.25,
        has_output_gate=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        recurrent=_read_recurrent(reader),
        unused_prefixes=predictors(reader),
        **family,
    )


def read_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of `ModelConfig` about experts. Raises: CheckpointError."""
    return {
        "num_experts": read_num_experts(reader),
        "top_k": reader.positive("num_experts_per_tok"),
        "intermediate_size": reader.positive("moe_intermediate_size"),
        "shared_intermediate_size": reader.positive("shared_expert_intermediate_size"),
        "has_shared_gate": True,
    }


def _read_recurrent(reader: ConfigReader) -> RecurrentConfig | None:
    interval = reader.positive("full_attention_interval", 4)
    is_linear = read_layer_types(reader, _KINDS) or tuple(
        (layer_idx + 1) % interval > 0 for layer_idx in range(read_num_layers(reader))
    )
    mixer = GatedDeltaConfig(
        num_heads=reader.positive("linear_num_value_heads", 32),
        num_key_heads=reader.positive("linear_num_key_heads", 16),
        key_dim=reader.positive("linear_key_head_dim", 128, most=MAX_KEY_DIM),
        value_dim=reader.positive("linear_value_head_dim", 128),
        kernel_size=reader.positive("linear_conv_kernel_dim", 4, most=MAX_TAPS),
        key_heads_take_turns=reader.get(bool, "linear_key_heads_take_turns", False),  # which GGUF files say
    )
    if mixer.num_heads % mixer.num_key_heads:
        raise reader.error(
            f"'linear_num_value_heads' is {mixer.num_heads}, no multiple of 'linear_num_key_heads', "
            f"{mixer.num_key_heads}"
        )
    layers = tuple(layer_idx for layer_idx, linear in enumerate(is_linear) if linear)
    return RecurrentConfig(layers, mixer) if layers else None


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, lambda *place: make_layer(*place, is_by_key_heads=True))


def make_layer(
    config: ModelConfig, allocator: WeightAllocator, layer_idx: int, *, is_by_key_heads: bool
) -> DecoderLayer:
    """Return a layer; `is_by_key_heads` is as `GatedDeltaNet` has it."""
    choose = Routing(config.routing.top_k, renormalize=config.routing.norm_topk_prob)
    mlp = feed_forward(config, allocator, layer_idx, choose, NAMES)
    if config.recurrent is None or layer_idx not in config.recurrent.layers:
        attention = GatedAttention(config, allocator, layer_idx, qk_norm="per_head")
        return DecoderLayer(config, allocator, attention, mlp)
    mixer = config.recurrent.mixer
    assert isinstance(mixer, GatedDeltaConfig)
    net = GatedDeltaNet(config, allocator, layer_idx, mixer, is_by_key_heads=is_by_key_heads)
    return DecoderLayer(config, allocator, net, mlp, _LINEAR)
