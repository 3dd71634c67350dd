"""Turns a generation into an HTTP answer, streamed or whole.

Works for any endpoint with a writer for its objects; knows none of their fields.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fastapi import Request, Response

from moeflow.server.api.stream_dialect import StreamDialect
from moeflow.server.disconnect import while_connected
from moeflow.server.errors import ApiError, as_api_error
from moeflow.server.generation import Generation
from moeflow.server.guard.body import keep_reserved
from moeflow.server.request_log import RequestRecord, record_of
from moeflow.server.sse import EventStream, is_done_soon
from moeflow.server.stories.stories import Stories
from moeflow.text.output_text import TextDelta

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """How one endpoint writes the result of a request: as events, or as one object. Each is used for one of them."""

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
    """The receiver of a stream of named events."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Take an event: its type and its other fields, which change after the call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A running generation and the writer of its endpoint."""

    generation: Generation
    writer: Writer


async def respond(
    request: Request, starting: Coroutine[Any, Any, Answer], dialect: StreamDialect, *, is_streamed: bool
) -> Response | dict[str, Any]:
    """Return a response that streams events as passes bring them, or wait for the end and return the whole object.

    A start that takes long, because a model is loaded or a grammar compiled, is part of the stream. An error that comes
    before has a status of its own.

    Raises: ClientDisconnected when the client has gone; ApiError, RequestError, ChatTemplateError, EngineError.
    """
    starting = _noted(starting, record_of(request.scope), request.app.state.service.stories)
    if not is_streamed:
        return await while_connected(request.receive, gather(await starting))
    start = asyncio.create_task(starting)
    try:
        if await is_done_soon(start):
            start.result()
        else:
            keep_reserved(request, start)
    except BaseException:
        _end(start)
        raise
    return EventStream(_events(request, start, dialect), partial(_end, start), dialect.ping, dialect.media_type)


async def _noted(starting: Coroutine[Any, Any, Answer], record: RequestRecord, stories: Stories) -> Answer:
    """Start an answer, and have the request's record show its work."""
    answer = await starting
    stories.begin(record, answer.generation)
    return answer


def _end(start: asyncio.Task[Answer]) -> None:
    """End a start, or close the generation that it has led to."""
    if not start.done():
        start.cancel()
    elif not start.cancelled() and start.exception() is None:
        start.result().generation.close()


async def gather(answer: Answer) -> dict[str, Any]:
    """Wait for the end and return the answer's object. Raises: ApiError, EngineError."""
    try:
        async with aclosing(answer.generation.deltas()) as deltas:
            async for choice, delta in deltas:
                answer.writer.add(choice, delta)
    finally:
        answer.generation.close()
    return answer.writer.body()


async def _events(request: Request, start: asyncio.Task[Answer], dialect: StreamDialect) -> AsyncGenerator[bytes, None]:
    try:
        answer = await start
    except Exception as error:
        api_error = _failure(error)
        request.app.state.service.metrics.count_refusal(api_error)
        record_of(request.scope).error = api_error
        yield dialect.failure(api_error)
        return
    generation, writer = answer.generation, answer.writer
    try:
        if begun := writer.begin():
            yield begun
        async with aclosing(generation.deltas()) as deltas:
            async for choice, delta in deltas:
                if events := writer.write(choice, delta):
                    yield events
        yield writer.end()
    except Exception as error:
        generation.failure = _failure(error)
        yield writer.fail(generation.failure)


def _failure(error: Exception) -> ApiError:
    """Return what to send, in an event, for an error of a stream whose headers are sent."""
    api_error = as_api_error(error)
    if api_error.code == "internal_error":
        logger.error("a stream failed", exc_info=error)
    return api_error
