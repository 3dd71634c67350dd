"""DeepSeek-V2: latent attention; experts beside shared ones, chosen by softmax, perhaps among those of the best groups.

What a chosen expert weighs is scaled, not renormalised.
"""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import check_supported, read_decoder_config
from moeflow.models.latent_keys import read_latent_fields
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.latent_attention import LatentAttention
from moeflow.models.layers.moe import ExpertNames
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import check_routing, read_routed_experts

NAMES: Final = ExpertNames()
_GROUPED: Final = "group_limited_greedy"
_SUPPORTED: Final = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", _GROUPED),
    "norm_topk_prob": (False,),
    "moe_layer_freq": (1,),
    "mlp_bias": (False,),
}
_DEFAULTS: Final = {"n_shared_experts": 2}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    check_supported(reader, _SUPPORTED)
    fields = read_routed_experts(reader, _DEFAULTS) | {"norm_topk_prob": False}
    if reader.raw.get("topk_method") != _GROUPED:
        fields |= {"num_expert_groups": 1, "num_chosen_groups": 1}
    config = read_decoder_config(
        reader, model_type="deepseek_v2", **fields, **read_latent_fields(reader, is_interleaved=True)
    )
    return check_routing(config, reader, _routing(config))


def _routing(config: ModelConfig) -> Routing:
    return Routing(
        config.routing.top_k,
        num_groups=config.routing.num_expert_groups,
        num_chosen_groups=config.routing.num_chosen_groups,
        scale=config.routing.routed_scaling_factor,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mlp = feed_forward(config, allocator, layer_idx, _routing(config), NAMES, has_float32_router=True)
    return DecoderLayer(config, allocator, LatentAttention(config, allocator, layer_idx), mlp)
