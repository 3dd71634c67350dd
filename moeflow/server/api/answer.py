"""Turns a generation into an HTTP answer, streamed or whole.

Works for any endpoint with a writer for its objects; knows none of their fields.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request, Response

from moeflow.engine.text.output_text import TextDelta
from moeflow.server.disconnect import while_connected
from moeflow.server.errors import ApiError, as_api_error
from moeflow.server.generation import Generation
from moeflow.server.request_log import record_of
from moeflow.server.sse import EventStream

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """How one endpoint writes what comes of one request: as events, or as one object. Each is used for one of them."""

    ping: bytes  # to send where nothing else comes for long

    def begin(self) -> bytes:
        """Return the events before anything is generated."""

    def write(self, choice: int, delta: TextDelta) -> bytes:
        """Return the events for what a pass brought to a choice."""

    def end(self) -> bytes:
        """Return the events after the end of all choices."""

    def fail(self, error: ApiError) -> bytes:
        """Return the events of a stream that ends here, for this reason."""

    def add(self, choice: int, delta: TextDelta) -> None:
        """Note what a pass brought to a choice, for the whole object."""

    def body(self) -> dict[str, Any]:
        """Return the whole object, after the end of all choices."""


class Emit(Protocol):
    """Who gets the events of a stream in which each has a name."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Take an event: its type and its other fields, which change after the call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A generation under way and how its endpoint writes what comes of it."""

    generation: Generation
    writer: Writer


async def respond(request: Request, answer: Answer, *, is_streamed: bool) -> Response | dict[str, Any]:
    """Return a response that streams events as passes bring them, or wait for the end and return the whole object.

    Raises: ClientDisconnected when nobody waits any more; ApiError, EngineError.
    """
    record_of(request.scope).work = answer.generation
    if is_streamed:
        return EventStream(_events(answer), answer.generation.close, answer.writer.ping)
    return await while_connected(request.receive, gather(answer))


async def gather(answer: Answer) -> dict[str, Any]:
    """Wait for the end, whoever asked, and return the answer's object. Raises: ApiError, EngineError."""
    try:
        async with aclosing(answer.generation.deltas()) as deltas:
            async for choice, delta in deltas:
                answer.writer.add(choice, delta)
    finally:
        answer.generation.close()
    return answer.writer.body()


async def _events(answer: Answer) -> AsyncGenerator[bytes, None]:
    generation, writer = answer.generation, answer.writer
    try:
        if begun := writer.begin():
            yield begun
        async with aclosing(generation.deltas()) as deltas:
            async for choice, delta in deltas:
                if events := writer.write(choice, delta):
                    yield events
        yield writer.end()
    except Exception as error:  # the status line is long gone: the reason goes where the client reads
        api_error = as_api_error(error)
        if api_error.code == "internal_error":
            logger.exception("a stream failed")
        generation.failure = api_error
        yield writer.fail(api_error)
