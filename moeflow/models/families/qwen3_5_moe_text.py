"""Qwen3.5-MoE's language model: Qwen3-Next's layers, with a tensor for each thing that a delta net projects to.

Where there is text alone, its positions of three kinds are one, and rotate as others do.
"""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.families.qwen3_next import make_layer, read_experts, read_linear_config
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.weight_allocator import WeightAllocator


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_text_config(reader, "qwen3_5_moe_text")


def read_text_config(reader: ConfigReader, model_type: str) -> ModelConfig:
    """Return the model's shape. Raises: CheckpointError."""
    return read_linear_config(reader, model_type=model_type, norm_topk_prob=True, **read_experts(reader))


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, lambda *place: make_layer(*place, is_by_key_heads=False))
