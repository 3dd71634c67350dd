"""What `/api/chat` and `/api/generate` give, whole or as lines of a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from moeflow.server.api.logprobs import TokenLogprob

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaAnsweredFunction(BaseModel):
    """A function that the model calls."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaAnsweredCall(BaseModel):
    """A call in an answer."""

    id: str
    function: OllamaAnsweredFunction


class OllamaAnswerMessage(BaseModel):
    """A message of the model, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaAnsweredCall] | None = None


class OllamaAnswer(BaseModel):
    """The fields of all answers. Times are in nanoseconds, and come with the end, as counts do."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[TokenLogprob] | None = None


class OllamaChatResponse(OllamaAnswer):
    """An answer of `/api/chat`, or a line of it."""

    message: OllamaAnswerMessage


class OllamaGenerateResponse(OllamaAnswer):
    """An answer of `/api/generate`, or a line of it."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None
