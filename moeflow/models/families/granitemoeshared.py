"""Granite MoE with a shared expert."""

from __future__ import annotations

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.models.config_keys import read_num_experts
from moeflow.models.families.granitemoe import build, read_granite_config
from moeflow.models.routed_keys import count

__all__ = ["build", "read_config"]


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    shared = count(reader, "shared_intermediate_size", 0)
    num_experts = read_num_experts(reader)
    return read_granite_config(reader, "granitemoeshared", num_experts=num_experts, shared_intermediate_size=shared)
