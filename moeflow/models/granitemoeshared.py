"""Granite MoE with a shared expert."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.granitemoe import build, read_granite_config

__all__ = ["build", "read_config"]


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    size = reader.get(int, "shared_intermediate_size", 1024)
    shared = reader.positive("shared_intermediate_size", size) if size else 0
    return read_granite_config(reader, "granitemoeshared", shared_intermediate_size=shared)
