"""ERNIE 4.5: softmax with a bias of the choice, a shared expert, and positions that rotate neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.attention.heads import MAX_INTERLEAVED
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_layers
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.moe import ExpertNames
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import count

NAMES: Final = ExpertNames(choice_bias="moe_statics.e_score_correction_bias", has_choice_bias_rows=True)


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    if reader.get(bool, "use_bias", False):
        raise reader.error("'use_bias' is true, where only false is supported")
    width = reader.positive("moe_intermediate_size")
    config = read_decoder_config(
        reader,
        model_type="ernie4_5_moe",
        default_theta=500000.0,
        num_experts=reader.positive("moe_num_experts"),
        top_k=reader.positive("moe_k"),
        min_topk_total=reader.number("moe_norm_min", 1e-12, least=0.0, most=1.0),
        intermediate_size=width,
        shared_intermediate_size=width * count(reader, "moe_num_shared_experts", 2),
        dense_layers=_dense_layers(reader),
        dense_intermediate_size=reader.positive("intermediate_size"),
        unused_prefixes=("model.mtp_",),
        tie_word_embeddings=reader.get(bool, "tie_word_embeddings", True),
    )
    if config.attention.head_dim > MAX_INTERLEAVED:
        raise reader.error(
            f"a head has {config.attention.head_dim} dimensions, at most {MAX_INTERLEAVED} are supported"
        )
    return config.with_fields(rope=replace(config.attention.rotary, is_interleaved=True))


def _dense_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Return the layers without experts: those before the first, behind the last, and all but every so manyth."""
    first, last = reader.get(int, "moe_layer_start_index", 1), reader.get(int, "moe_layer_end_index", -1)
    step, num_layers = reader.positive("moe_layer_interval", 1), read_num_layers(reader)
    last = num_layers - 1 if last == -1 else last
    return tuple(layer for layer in range(num_layers) if not first <= layer <= last or (layer + 1) % step)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, renormalize=True, min_total=config.routing.min_topk_total)
    mlp = feed_forward(config, allocator, layer_idx, choose, NAMES, has_float32_router=True)
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx), mlp)
