"""DeepSeek-V2: latent attention; experts beside shared ones, chosen by softmax, perhaps within the best groups.

The first layers are dense. Weights of chosen experts are scaled, not renormalised.
"""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config, read_num_layers
from moeflow.models.latent_keys import read_latent_fields
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.latent_attention import LatentAttention
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.weight_allocator import WeightAllocator


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    num_dense, num_layers = reader.get(int, "first_k_dense_replace", 0), read_num_layers(reader)
    if num_dense < num_layers:
        raise reader.error(f"'first_k_dense_replace' is {num_dense}: experts in the other layers are not supported")
    return read_decoder_config(
        reader,
        model_type="deepseek_v2",
        **read_latent_fields(reader, is_interleaved=True),
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mlp = dense_mlp(allocator, config.hidden_size, config.intermediate_size)
    return DecoderLayer(config, allocator, LatentAttention(config, allocator, layer_idx), mlp)
