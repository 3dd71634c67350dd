"""What `/v1/completions` takes and gives, in OpenAI's words."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from moeflow.core.sampling_params import MAX_LOGPROBS, SamplingParams
from moeflow.server.api.logprobs import CompletionLogprobs
from moeflow.server.api.prompt_progress import Progress
from moeflow.server.api.schema.field_rules import Rule, not_all
from moeflow.server.api.schema.prompts import Prompt, prompts_of
from moeflow.server.api.schema.sampling_fields import SamplingFields
from moeflow.server.api.schema.strict_model import one_of
from moeflow.server.api.schema.token_trees import TokenTrees
from moeflow.server.api.timings import Timings
from moeflow.server.api.usage import TokenUsage


class CompletionRequest(SamplingFields):
    """Continue a text."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *SamplingFields.rules,
        not_all(
            "n",
            "a stream that echoes log-probabilities can have one completion only",
            {"stream": (None, False), "echo": (None, False), "logprobs": (None,), "n": (None, 1)},
        ),
    )

    prompt: Prompt
    echo: bool | None = Field(None, description="Begin each choice with its prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: Annotated[Annotated[int, Field(ge=1, le=1)], one_of("1: completions are not ranked")] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        return prompts_of(self.prompt)

    def to_sampling_params(self) -> SamplingParams:
        """Return what the engine should do. Raises: RequestError, naming the field."""
        return self.choice_params(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class CompletionChoice(BaseModel):
    """One completion."""

    index: int  # prompt number * n + completion number
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_trees: TokenTrees = None


class CompletionResponse(BaseModel):
    """All completions of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage
    timings: Timings = None


class CompletionChunkChoice(BaseModel):
    """What a pass added to one completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_trees: TokenTrees = None


class CompletionChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: TokenUsage | None = None
    prompt_progress: Progress = None
    timings: Timings = None
