"""Whose sampling defaults hold for requests: those of the model's files, or the engine's."""

from __future__ import annotations

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import ConfigError
from moeflow.core.token_choice import TokenChoice
from moeflow.models.sampling_defaults import read_sampling_defaults
from moeflow.planner.settings import GENERATION_CONFIGS, Settings


def choose_sampling_defaults(settings: Settings, checkpoint: Checkpoint) -> TokenChoice:
    """Return the defaults of requests. Raises: ConfigError for an unknown choice, CheckpointError for bad values."""
    if settings.generation_config not in GENERATION_CONFIGS:
        raise ConfigError(
            f"generation_config is {settings.generation_config!r}; use one of {', '.join(GENERATION_CONFIGS)}"
        )
    return TokenChoice() if settings.generation_config == "none" else read_sampling_defaults(checkpoint)
