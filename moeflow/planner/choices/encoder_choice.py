"""What encoder-decoders do without: the error for settings that need a decoder-only model."""

from __future__ import annotations

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.planner.settings import Settings


def check_encoder_decoder(settings: Settings, shape: ModelConfig, *, is_offloaded: bool) -> None:
    """Raise ConfigError for the first setting that a model with an encoder is not run with."""
    if shape.encoder is None:
        return
    asked = {
        "ranks (--ranks)": (settings.num_ranks or 1) > 1,
        "stages (--stages)": settings.stages is not None,
        "replicas that share experts (--expert-parallel)": settings.expert_parallel,
        "speculators (--speculator)": bool(settings.speculators),
        "devices and pipelines (--device, --pipeline)": is_offloaded or settings.pipeline is not None,
        "lenders of memory (--remote-experts)": settings.remote_experts is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{name} are for decoder-only models, and this is an encoder-decoder ({shape.model_type}): "
                "leave the option away"
            )
