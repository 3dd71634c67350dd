"""A server's end for one front: gives its requests to the engines, and keeps its responses and counts."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from moeflow.core.engine_messages import Cancellation, Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.engine.client import EngineClient
from moeflow.server.fronts.messages import (
    AskRunning,
    Attached,
    Counts,
    Found,
    FromFront,
    Link,
    Logged,
    Lost,
    Running,
    Search,
    Started,
    State,
    Stored,
    Tokens,
    Told,
)
from moeflow.server.log_ring import log_ring
from moeflow.server.service import Service
from moeflow.server.stories.story import Story

logger = logging.getLogger(__name__)
_ANSWER_S = 1.0  # a front that answers later hangs


class Desk:
    """Serves one life of a front."""

    def __init__(self, number: int, link: Link[FromFront], service: Service, on_work: Callable[[], None]) -> None:
        """`on_work` is called when the front takes requests, and at each request."""
        self.link = link
        self._number = number
        self._service = service
        self._on_work = on_work
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outputs: list[TokenOutput] = []  # of this pass
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[list[Story]]] = {}
        self._shown: State | None = None
        if service.loaded is not None:
            self.attach(service.loaded.client)

    async def serve(self) -> None:
        """Serve until the front is gone; its requests are then cancelled in the engines."""
        leave = self._service.stories.ask_also(self._running)
        try:
            while (message := await self.link.receive()) is not None:
                self._take(message)
        finally:
            leave()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.link.close()
            self._service.metrics.others.end(self._number)

    def attach(self, client: EngineClient) -> None:
        """The model is loaded."""
        self.link.send(Attached(client.model))
        self.show_state(client)

    def show_state(self, client: EngineClient) -> None:
        """Report the engines' state if it has changed."""
        state = State(client.state, client.back_in_s, client.model)
        if state != self._shown:
            self._shown = state
            self.link.send(state)

    def _take(self, message: FromFront) -> None:
        if isinstance(message, Submission):
            self._on_work()
            relaying = self._tasks[message.request_id] = asyncio.create_task(self._relay(message))
            relaying.add_done_callback(lambda _: self._tasks.pop(message.request_id))
        elif isinstance(message, Cancellation):
            for request_id in message.request_ids:
                if (task := self._tasks.get(request_id)) is not None:
                    task.cancel()
        elif isinstance(message, Stored):
            response = msgspec.json.decode(message.response)
            self._service.responses.put(response, message.items, message.previous_id)
        elif isinstance(message, Search):
            history = self._service.responses.history(message.response_id)
            found = Found(message.number, None)
            if history is not None:
                found = Found(message.number, history.lists, history.num_containers)
            self.link.send(found)
        elif isinstance(message, Started):
            self._on_work()
        else:
            self._note(message)

    def _note(self, message: Running | Told | Counts | Logged) -> None:
        """Take a report of the front's own work."""
        if isinstance(message, Counts):
            self._service.metrics.others.note(self._number, message.counts)
        elif isinstance(message, Told):
            self._service.stories.keep(message.story)
        elif isinstance(message, Logged):
            log_ring().take(message.lines)
        elif (asked := self._asked.get(message.number)) is not None and not asked.done():
            asked.set_result(message.stories)

    async def _running(self) -> list[Story]:
        """Return the stories of what runs in the front; none if it does not answer soon."""
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self.link.send(AskRunning(number))
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._asked[number]
        except TimeoutError:
            return []
        finally:
            del self._asked[number]

    async def _relay(self, submission: Submission) -> None:
        """Send what the engines bring for a request."""
        assert self._service.loaded is not None, "a front knows the model before it submits"
        client = self._service.loaded.client
        try:
            async with aclosing(client.stream(submission)) as outputs:
                async for output in outputs:
                    self._collect(output)
        except Exception as error:  # any: the front waits for the request's end
            if not isinstance(error, EngineError):
                logger.exception("request %s of front %d failed", submission.request_id, self._number)
            self._flush()
            self.show_state(client)
            self.link.send(Lost(submission.request_id, str(error)))

    def _collect(self, output: TokenOutput) -> None:
        """Send an output with all others of its pass: their tasks run before the event loop's next turn."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        if self._outputs:
            self.link.send(Tokens(self._outputs))
            self._outputs = []
