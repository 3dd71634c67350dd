"""The engines and conversations of a server, as a front sees them: over its link."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from moeflow.core.engine_messages import Cancellation, EngineStats, ModelInfo, Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.server.fronts.messages import Found, Link, Lost, Search, State, Stored, ToFront, Tokens
from moeflow.server.response_store import History

if TYPE_CHECKING:
    from moeflow.core.observation import Question, Sight

_AGAIN_S = 0.1  # a response that another front has just stored may still be on its way


class FrontClient:
    """An `EngineClient`."""

    def __init__(self, link: Link[ToFront], model: ModelInfo) -> None:
        self.model = model
        self.state = EngineState.READY
        self.back_in_s = 0.0
        self._link = link
        self._queues: dict[str, asyncio.Queue[TokenOutput | Lost]] = {}

    def stats(self) -> EngineStats:
        """Return nothing: the server has the statistics of its engines."""
        return EngineStats()

    def replicas(self) -> list[ReplicaStatus]:
        """Return none: likewise."""
        return []

    async def look(self, question: Question) -> dict[int, Sight]:
        """Return no answer: likewise."""
        return {}

    def take(self, message: Tokens | Lost | State) -> None:
        """Take a message of the server."""
        if isinstance(message, Tokens):
            for output in message.outputs:
                if (queue := self._queues.get(output.request_id)) is not None:
                    queue.put_nowait(output)
        elif isinstance(message, State):
            self.state, self.back_in_s, self.model = message.state, message.back_in_s, message.model
        elif (queue := self._queues.get(message.request_id)) is not None:
            queue.put_nowait(message)

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        """See `EngineClient.stream`."""
        queue = self._queues[submission.request_id] = asyncio.Queue()
        is_last = False
        try:
            self._link.send(submission)
            while not is_last:
                output = await queue.get()
                if isinstance(output, Lost):
                    is_last = True
                    raise EngineError(output.reason)
                is_last = output.finish_reason is not None
                yield output
        finally:
            del self._queues[submission.request_id]
            if not is_last:
                self._link.send(Cancellation([submission.request_id]))

    async def shutdown(self, deadline_s: float) -> None:
        """Do nothing: the server ends its engines."""


class FrontConversations:
    """See `Conversations`: the server keeps them for all fronts."""

    def __init__(self, link: Link[ToFront]) -> None:
        self._link = link
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Found]] = {}

    def put(self, response: dict[str, Any], items: bytes, previous_id: str | None) -> None:
        """See `Conversations`."""
        self._link.send(Stored(msgspec.json.encode(response), items, previous_id))

    async def history(self, response_id: str) -> History | None:
        """See `Conversations`."""
        found = await self._ask(response_id)
        if found is None:
            await asyncio.sleep(_AGAIN_S)
            found = await self._ask(response_id)
        return found

    async def _ask(self, response_id: str) -> History | None:
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._link.send(Search(number, response_id))
        try:
            found = await future
        finally:
            del self._asked[number]
        return None if found.lists is None else History(found.lists, found.num_containers)

    def take(self, found: Found) -> None:
        """Take an answer of the server."""
        if (future := self._asked.get(found.number)) is not None and not future.done():
            future.set_result(found)
