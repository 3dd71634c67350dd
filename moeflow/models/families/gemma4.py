"""Multimodal Gemma 4: its text model alone."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import text_part
from moeflow.models.families.gemma4_text import build, read_text_config

__all__ = ["build", "read_config"]


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_text_config(text_part(reader), "gemma4")
