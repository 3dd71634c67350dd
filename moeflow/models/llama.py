"""Llama: dense, and the shape all other families vary. Biases are optional."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_decoder_config
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.placement import Placement


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_decoder_config(
        reader,
        model_type="llama",
        attention_bias=reader.get(bool, "attention_bias", False),
        mlp_bias=reader.get(bool, "mlp_bias", False),
    )


def build(config: ModelConfig, place: Placement) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, place, (_layer(config, place, layer_idx) for layer_idx in range(config.num_layers)))


def _layer(config: ModelConfig, place: Placement, layer_idx: int) -> DecoderLayer:
    mlp = dense_mlp(place, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return DecoderLayer(config, place, Attention(config, place, layer_idx), mlp)
