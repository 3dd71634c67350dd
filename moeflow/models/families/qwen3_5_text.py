"""Qwen3.5's language model without experts: the layers of Qwen3.5-MoE, with a dense network each."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.families.qwen3_5_moe_text import build
from moeflow.models.families.qwen3_next import read_linear_config

__all__ = ["build", "read_config", "read_text_config"]


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_text_config(reader, "qwen3_5_text")


def read_text_config(reader: ConfigReader, model_type: str) -> ModelConfig:
    """Return the model's shape. Raises: CheckpointError."""
    return read_linear_config(reader, model_type=model_type, intermediate_size=reader.positive("intermediate_size"))
