"""A layer's feed-forward network: dense, or experts, as the config has it."""

from __future__ import annotations

from moeflow.core.model_config import ModelConfig
from moeflow.models.layers.mlp import MLP, NAMES, FusedMLP, NetworkNames, dense_mlp
from moeflow.models.layers.moe import Choose, ExpertNames, MoE, expert_kind
from moeflow.models.layers.weight_allocator import WeightAllocator


def feed_forward(
    config: ModelConfig,
    allocator: WeightAllocator,
    layer_idx: int,
    choose: Choose,
    names: ExpertNames,
    *,
    dense_names: NetworkNames = NAMES,
    has_float32_router: bool = False,
) -> MLP | FusedMLP | MoE:
    """Return the network of a layer of a family with experts, some of whose layers or models may have none.

    `choose`, `names` and `has_float32_router` are as `MoE` has them, of layers with experts.
    """
    if layer_idx in config.moe_layers:
        return MoE(config, allocator, choose, names, has_float32_router=has_float32_router)
    kind, bias = expert_kind(config), config.feed_forward.mlp_bias
    return dense_mlp(allocator, config.hidden_size, config.dense_width, kind, dense_names, bias=bias)
