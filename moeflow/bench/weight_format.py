"""In which format an engine keeps its weights."""

from __future__ import annotations

from moeflow.core.engine_config import EngineConfig


def weight_format(config: EngineConfig) -> str:
    """Return one of the names in `floors.BITS`."""
    return config.dtype
