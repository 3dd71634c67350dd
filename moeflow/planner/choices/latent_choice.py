"""What latent attention is not run with: devices whose pipelines cut layers before and behind attention."""

from __future__ import annotations

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.planner.settings import Settings


def check_latent_attention(settings: Settings, shape: ModelConfig, *, is_offloaded: bool) -> None:
    """Raise ConfigError for a setting that a model with latent attention is not run with."""
    if shape.latent is not None and (is_offloaded or settings.pipeline is not None):
        raise ConfigError(
            "devices and pipelines (--device, --pipeline) are not for models with latent attention, as this one has "
            f"({shape.model_type}): leave the option away"
        )
