"""Gemma 3 that sees images, too: its text model alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.gemma3_text import build, read_text_config

__all__ = ["build", "read_config"]


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    text: Any = reader.raw.get("text_config")
    if not isinstance(text, Mapping):
        raise reader.error("has no 'text_config', an object")
    return read_text_config(ConfigReader(text, reader.file), "gemma3")
