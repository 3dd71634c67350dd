"""Turns a generation into an HTTP answer, streamed or whole.

Works for any endpoint with a writer for its objects; knows no field of a choice.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response

from moeflow.core.request import FinishReason
from moeflow.engine.text.guessed_passes import GuessedPass
from moeflow.engine.text.output_text import TextDelta, TokenText
from moeflow.server.api.schema.sampling_fields import SamplingFields
from moeflow.server.api.usage import usage
from moeflow.server.disconnect import while_connected
from moeflow.server.errors import as_api_error
from moeflow.server.generation import Generation
from moeflow.server.request_log import record_of
from moeflow.server.sse import DONE, EventStream, event

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Choice:
    """One completion, gathered from its deltas."""

    index: int
    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)  # empty unless log-probabilities were asked for
    prompt_tokens: tuple[TokenText | None, ...] = ()  # likewise; on a prompt's first completion only
    guessed_passes: list[GuessedPass] = field(default_factory=list)  # empty unless token trees were asked for
    finish_reason: FinishReason | None = None

    def add(self, delta: TextDelta) -> None:
        """Append what one pass brought."""
        self.text += delta.text
        self.tokens += delta.logprobs or ()
        self.prompt_tokens = self.prompt_tokens or delta.prompt_logprobs or ()
        self.guessed_passes += [] if delta.guessed_pass is None else [delta.guessed_pass]
        self.finish_reason = delta.finish_reason or self.finish_reason


class Writer(Protocol):
    """How one endpoint writes its objects."""

    def chunk_choices(self, choice: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choice objects to stream for a delta, each an event of its own; none if it shows nothing."""

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return the choice object of an unstreamed answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A generation under way and how its endpoint writes what comes of it."""

    generation: Generation
    writer: Writer
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer has in common."""

    id: str
    created: int
    model: str
    kind: str  # the `object` field of a whole answer
    chunk_kind: str  # the same of a chunk

    def head(self, kind: str) -> dict[str, Any]:
        """Return the common fields."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def token_trees(passes: Sequence[GuessedPass]) -> dict[str, Any]:
    """Return what was guessed as a field of a choice; no field if it is not asked for, or if there is nothing yet."""
    return {"token_trees": msgspec.to_builtins(passes)} if passes else {}


async def respond(request: Request, answer: Answer, body: SamplingFields) -> Response | dict[str, Any]:
    """Return a response that streams chunks as passes bring them, or wait for all choices and return the whole object.

    Raises: ClientDisconnected when nobody waits any more; ApiError, EngineError.
    """
    record_of(request.scope).work = answer.generation
    if body.stream:
        return EventStream(_events(answer, with_usage=body.wants_usage), answer.generation.close)
    return await while_connected(request.receive, gather(answer))


async def gather(answer: Answer) -> dict[str, Any]:
    """Wait for all choices, whoever asked for them, and return the answer's object. Raises: ApiError, EngineError."""
    try:
        choices = await _gather_choices(answer.generation)
    finally:
        answer.generation.close()
    body = answer.envelope.head(answer.envelope.kind)
    body["choices"] = [answer.writer.choice(choice) for choice in choices]
    body["usage"] = usage(answer.generation)
    return body


async def _gather_choices(generation: Generation) -> list[Choice]:
    choices = [Choice(index) for index in range(len(generation.prompts) * generation.n)]
    async with aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            choices[index].add(delta)
    for choice in choices:  # the engine reports a prompt's log-probabilities once
        choice.prompt_tokens = choices[choice.index - choice.index % generation.n].prompt_tokens
    return choices


async def _events(answer: Answer, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    generation, writer = answer.generation, answer.writer
    head = answer.envelope.head(answer.envelope.chunk_kind)
    tail: dict[str, Any] = {"usage": None} if with_usage else {}
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for index, delta in deltas:
                chunks = [event({**head, "choices": [choice], **tail}) for choice in writer.chunk_choices(index, delta)]
                if chunks:
                    yield b"".join(chunks)
        if with_usage:
            yield event({**head, "choices": [], "usage": usage(generation)})
        yield DONE
    except Exception as error:  # the status line is long gone: the reason goes where the client reads
        api_error = as_api_error(error)
        if api_error.code == "internal_error":
            logger.exception("a stream failed")
        generation.failure = api_error.code
        yield event(api_error.body)
