"""LFM2 with experts: LFM2's layers; all except the first have experts, chosen by sigmoids and a bias."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_num_experts, read_num_layers
from moeflow.models.families.lfm2 import LAST_NORM, NETWORK, make_mixer, read_lfm2_config
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.moe import ExpertNames
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES: Final = ExpertNames("feed_forward", gate="w1", up="w3", down="w2", choice_bias="expert_bias")
_EPSILON: Final = 1e-6  # of the sum that weights are divided by


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    if not reader.get(bool, "use_expert_bias", True):
        raise reader.error("'use_expert_bias' is false, where only true is supported")
    num_dense = reader.get(int, "num_dense_layers", 2)
    return read_lfm2_config(
        reader,
        model_type="lfm2_moe",
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
        norm_topk_prob=reader.get(bool, "norm_topk_prob", True),
        routed_scaling_factor=reader.number("routed_scaling_factor", 1.0, least=1e-3, most=1e3),
        intermediate_size=reader.positive("moe_intermediate_size"),
        dense_layers=tuple(range(min(max(num_dense, 0), read_num_layers(reader)))),
        dense_intermediate_size=reader.positive("intermediate_size"),
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer, last_norm=LAST_NORM)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mixer, names = make_mixer(config, allocator, layer_idx)
    choose = Routing(
        config.routing.top_k,
        renormalize=config.routing.norm_topk_prob,
        score="sigmoid",
        epsilon=_EPSILON,
        scale=config.routing.routed_scaling_factor,
    )
    mlp = feed_forward(config, allocator, layer_idx, choose, NAMES, dense_names=NETWORK)
    return DecoderLayer(config, allocator, mixer, mlp, names)
