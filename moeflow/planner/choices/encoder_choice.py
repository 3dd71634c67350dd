"""The choice that differs for encoders: inputs are computed whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeflow.core.model_config import ModelConfig
from moeflow.planner.choices.batching_choice import Batching
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.settings.settings import Settings

INPUT_TOKENS: Final = 2048  # that an input may have unless the user says otherwise
_NAME: Final = "max_num_batched_tokens"


def with_whole_inputs(batching: Batching, settings: Settings, shape: ModelConfig, reasons: Reasons) -> Batching:
    """Return the same with passes that take an encoder's input whole, beside a token of everybody else."""
    num_tokens = INPUT_TOKENS + 1 + batching.max_num_seqs
    if shape.encoder is None or settings.max_num_batched_tokens or batching.max_num_batched_tokens >= num_tokens:
        return batching
    reasons[:] = [each for each in reasons if each[0] != _NAME]
    reasons.append((_NAME, f"{num_tokens}: inputs are encoded whole, of up to {INPUT_TOKENS} tokens"))
    return replace(batching, max_num_batched_tokens=num_tokens)
