"""`options` of Ollama's requests: how tokens are chosen, in Ollama's words.

Options of the machine change nothing: the server's own settings hold. Values of a wrong type are refused. An
unsupported option that would change the answer is refused with the reason.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from pydantic import Field

from moeflow.core.sampling_params import (
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from moeflow.server.api.schema.field_rules import Rule
from moeflow.server.api.schema.sampling_fields import Stop
from moeflow.server.api.schema.strict_model import StrictModel

logger = logging.getLogger(__name__)

_RANDOM_SEED = -1
_PENALTIES = {"repeat_penalty": (None, 1), "presence_penalty": (None, 0), "frequency_penalty": (None, 0)}  # to be off
_NO_WINDOW = Rule(
    "repeat_last_n",
    "repeat_last_n is not supported: penalties look at all tokens; send -1, or leave it out",
    lambda fields: (
        (fields["repeat_last_n"] or 0) <= 0 or all(fields[name] in values for name, values in _PENALTIES.items())
    ),
    {
        "anyOf": [
            {"properties": {"repeat_last_n": {"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 0}]}}},
            {"properties": {name: {"enum": [*values]} for name, values in _PENALTIES.items()}},
        ]
    },
)


class OllamaOptions(StrictModel):
    """How tokens are chosen. The model's defaults hold where an option is left out."""

    rules: ClassVar[tuple[Rule, ...]] = (_NO_WINDOW,)

    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 or -1: all tokens.")
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED, description="-1: different on every run.")
    stop: Stop | None = None
    num_predict: int | None = Field(
        None, ge=-2, le=2**31, description="Tokens at most; -1 and -2: until the context is full."
    )
    repeat_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: int | None = Field(None, ge=-1, le=2**31, description="-1: penalties as set; 0: none.")
    num_ctx: int | None = Field(
        None, ge=0, le=2**31, description="Accepted; the server's context is the same for all requests."
    )

    def to_sampling_params(self, *, logprobs: int | None) -> SamplingParams:
        """Return the engine's parameters. Raises: RequestError, naming the field."""
        limit, seed = self.num_predict, self.seed
        has_penalties = self.repeat_last_n != 0
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if seed == _RANDOM_SEED else seed,
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty if has_penalties else 1.0,
            "presence_penalty": self.presence_penalty if has_penalties else None,
            "frequency_penalty": self.frequency_penalty if has_penalties else None,
            "logprobs": logprobs,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=None if limit is None or limit < 0 else limit, **given)

    def note_context(self, max_model_len: int) -> None:
        """Log that a request has asked for a longer context than there is."""
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            logger.info("num_ctx %d is ignored: the context holds %d tokens", self.num_ctx, max_model_len)
