"""MiniMax-M2: sigmoid routing with a bias of the choice; norms over all heads, positions that rotate parts of them."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import check_supported, read_decoder_config, read_num_experts
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES: Final = ExpertNames(
    block="block_sparse_moe", gate="w1", up="w3", down="w2", choice_bias="e_score_correction_bias"
)
_SUPPORTED: Final = {
    "scoring_func": ("sigmoid",),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    check_supported(reader, _SUPPORTED)
    return read_decoder_config(
        reader,
        model_type="minimax_m2",
        default_theta=5e6,
        default_head_dim=128,
        may_be_partial=True,
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, renormalize=True, score="sigmoid")
    attention = Attention(config, allocator, layer_idx, qk_norm="all_heads")
    return DecoderLayer(config, allocator, attention, MoE(config, allocator, choose, NAMES))
