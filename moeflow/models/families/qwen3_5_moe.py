"""Qwen3.5-MoE that sees images, too: its text model alone."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import text_part
from moeflow.models.families.qwen3_5_moe_text import build, read_text_config

__all__ = ["build", "read_config"]


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_text_config(text_part(reader), "qwen3_5_moe")
