"""The fields that generating endpoints share, and how they become `SamplingParams`.

Ranges stand here for the OpenAPI document; `SamplingParams` has the last word.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from moeflow.core.sampling_params import (
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from moeflow.server.api.schema.answer_form import AnswerFormFields
from moeflow.server.api.schema.field_rules import Rule, needs_true
from moeflow.server.api.schema.model_limits import LogitBias, NumSequences, TokenId, TokenTreesWish
from moeflow.server.api.schema.strict_model import StrictModel, one_of

IGNORED = "Accepted; changes nothing."
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=0, le=2**31)] | None
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)],
    one_of(
        f"a string, or a list of at most {MAX_STOP_STRINGS} strings, "
        f"none of them empty or longer than {MAX_STOP_CHARACTERS} characters"
    ),
]


class StreamOptions(StrictModel):
    """How a stream is sent."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk that has the token counts.")


class SamplerFields(StrictModel):
    """How tokens are chosen: fields of all generating endpoints, from OpenAI and from vLLM.

    The model's defaults hold where a request leaves out temperature, top_k, top_p, min_p or repetition_penalty.
    """

    model: str | None = Field(None, description="The served model's name; may be left out.")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    logit_bias: LogitBias | None = Field(None, description="Token ids, as strings, to offsets of their logits.")

    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 or -1: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(
        None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, description="1: off; above 1: repeat less."
    )
    min_tokens: int | None = Field(None, ge=0, le=2**31, description="The most tokens go before.")
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    def sampling_params(self, *, max_tokens: int | None, **fields: Any) -> SamplingParams:
        """Return what the engine should do; `fields` are the endpoint's own, None where they are left open.

        Raises: RequestError, naming the field.
        """
        given = {name: getattr(self, name) for name in _PLAIN_FIELDS} | fields
        if given["min_tokens"] is not None and max_tokens is not None:
            given["min_tokens"] = min(given["min_tokens"], max_tokens)
        return SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=self.stop_token_ids or (),
            logit_bias={int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
            **{name: value for name, value in given.items() if value is not None},
        )


class SamplingFields(SamplerFields, AnswerFormFields):
    """Sampling, stopping, the answer's form and delivery, of completions and chat."""

    rules: ClassVar[tuple[Rule, ...]] = (*AnswerFormFields.rules, needs_true("stream_options", "stream"))

    stream_options: StreamOptions | None = None
    n: NumSequences | None = None
    max_tokens: MaxTokens = Field(None, description="The context's end is a limit, too.")
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None

    token_trees: TokenTreesWish | None = Field(
        None,
        description="Add the drafted tokens of each pass to the choices, as token_trees; needs a speculator.",
    )
    return_progress: bool | None = Field(
        None, description="Have a stream report how far the prompt is computed, as prompt_progress; llama.cpp's."
    )
    timings_per_token: bool | None = Field(
        None, description="Add tokens and times so far to each chunk or the answer, as timings; llama.cpp's."
    )

    def choice_params(self, *, max_tokens: int | None, **fields: Any) -> SamplingParams:
        """Return what the engine should do for each choice. Raises: RequestError, naming the field."""
        return self.sampling_params(
            max_tokens=max_tokens,
            stop=self.stop,
            n=self.n,
            include_stop_str_in_output=self.include_stop_str_in_output,
            token_trees=self.token_trees,
            prompt_progress=bool(self.stream and self.return_progress),
            **fields,
        )

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


_PLAIN_FIELDS = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
)
