"""fairseq's language models with experts in every other layer (2112.10684): like GPT-MoE, with sinusoidal positions.

The weights of a token's two experts sum to 1. fairseq draws the second expert with noise in training; here it is the
second best one. What a config calls capacity, beyond which tokens skip experts, is a means of training, not applied.
"""

from __future__ import annotations

import math

from moeflow.core.embedding_config import AddedPositions
from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_num_layers
from moeflow.models.families import gpt_moe
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.weight_allocator import WeightAllocator


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read the config. Raises: CheckpointError."""
    is_learned = reader.get(bool, "has_learned_positions", False)
    positions = AddedPositions(
        "learned" if is_learned else "sinusoidal",
        reader.positive("max_position_embeddings"),
        first_row=reader.get(int, "pad_token_id") + 1,
    )
    frequency, num_layers = reader.get(int, "moe_frequency", 0), read_num_layers(reader)
    dense_layers = tuple(layer for layer in range(num_layers) if frequency < 1 or (layer + 1) % frequency)
    config = gpt_moe.read_biased_decoder(reader, "fairseq_moe", positions, dense_layers)
    has_scale = reader.get(bool, "scales_embeddings", True)
    return config.with_fields(embedding_scale=math.sqrt(config.hidden_size) if has_scale else 1.0)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return gpt_moe.build(config, allocator)
