"""DeepSeek-V3: latent attention; experts beside a shared one, chosen by sigmoids with a bias that balances loads."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config
from moeflow.models.latent_keys import read_latent_fields
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.latent_attention import LatentAttention
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import BIASED_NAMES, check_sigmoid_routing, read_routed_experts, sigmoid_routing

_DEFAULTS: Final = {
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    config = read_decoder_config(
        reader,
        model_type="deepseek_v3",
        **read_routed_experts(reader, _DEFAULTS),
        **read_latent_fields(reader, is_interleaved=reader.get(bool, "rope_interleave", True)),
    )
    return check_sigmoid_routing(config, reader)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, make_layer)


def make_layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    """Return a layer."""
    mlp = feed_forward(config, allocator, layer_idx, sigmoid_routing(config), BIASED_NAMES, has_float32_router=True)
    return DecoderLayer(config, allocator, LatentAttention(config, allocator, layer_idx), mlp)
