"""What is otherwise with encoder-decoders: inputs are computed whole, and some settings are for other models."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.planner.choices.batching_choice import Batching
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.settings import Settings

INPUT_TOKENS: Final = 2048  # that an input may have unless the user says otherwise
_NAME: Final = "max_num_batched_tokens"


def check_encoder_decoder(settings: Settings, shape: ModelConfig, *, is_offloaded: bool) -> None:
    """Raise ConfigError for the first setting that a model with an encoder is not run with."""
    if settings.expert_capacity is not None and not (shape.encoder and shape.num_experts):
        raise ConfigError(
            f"--expert-capacity is for encoders with experts, which a {shape.model_type} model has not: leave it away"
        )
    if shape.encoder is None:
        return
    asked = {
        "ranks (--ranks)": (settings.num_ranks or 1) > 1,
        "stages (--stages)": settings.stages is not None,
        "replicas that share experts (--expert-parallel)": settings.expert_parallel,
        "speculators (--speculator)": bool(settings.speculators),
        "devices and pipelines (--device, --pipeline)": is_offloaded or settings.pipeline is not None,
        "records of routing (--record-routing)": settings.record_routing is not None,
        "lenders of memory (--remote-experts)": settings.remote_experts is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{name} are for decoder-only models, and this is an encoder-decoder ({shape.model_type}): "
                "leave the option away"
            )


def with_whole_inputs(batching: Batching, settings: Settings, shape: ModelConfig, reasons: Reasons) -> Batching:
    """Return the same with passes that take an encoder's input whole, beside a token of everybody else."""
    num_tokens = INPUT_TOKENS + 1 + batching.max_num_seqs
    if shape.encoder is None or settings.max_num_batched_tokens or batching.max_num_batched_tokens >= num_tokens:
        return batching
    reasons[:] = [each for each in reasons if each[0] != _NAME]
    reasons.append((_NAME, f"{num_tokens}: inputs are encoded whole, of up to {INPUT_TOKENS} tokens"))
    return replace(batching, max_num_batched_tokens=num_tokens)
