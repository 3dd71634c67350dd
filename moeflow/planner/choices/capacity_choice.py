"""What a limit of the choices that experts take excludes and changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.settings.settings import Settings

_FLAG: Final = "--capacity-factor"


def with_capacity(settings: Settings, shape: ModelConfig, device: str, reasons: Reasons) -> Settings:
    """Return settings for passes that may drop choices: keys and values of such passes are for one request alone.

    Raises: ConfigError for another setting or a model that does not go with it.
    """
    factor = settings.capacity_factor
    assert factor is not None, "the user gave one"
    if not 0 < factor < math.inf:
        raise ConfigError(f"capacity_factor must be a positive number, not {factor:g}")
    obstacles = {
        f"this {shape.model_type} model has no experts": not shape.routing.num_experts,
        "experts are on a GPU (--device cpu computes without one)": device != "cpu",
        "drafted tokens would take the places of others (--speculator)": bool(settings.speculators),
        "each rank sees the choices of its own layers only (--stages)": settings.stages is not None,
        "each rank sees the choices of its own sequences only (--attention-layout data)": (
            settings.attention_layout == "data"
        ),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ConfigError(f"experts have no capacity ({_FLAG}) where {obstacle}: remove one of them")
    reasons.append(("capacity_factor", f"{factor:g}: choices beyond it are dropped, so answers change with the batch"))
    if settings.prefix_caching and shape.encoder is None:
        reasons.append(("prefix_caching", f"off: keys and values after drops depend on the batch ({_FLAG})"))
    return replace(settings, prefix_caching=False)
