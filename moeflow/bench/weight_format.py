"""In which format an engine keeps its weights."""

from __future__ import annotations

from moeflow.core.engine_config import EngineConfig
from moeflow.kernels.weight_format import WeightFormat


def weight_format(config: EngineConfig) -> WeightFormat:
    """Return its name."""
    return "bfloat16" if config.dtype == "bfloat16" else "float32"
