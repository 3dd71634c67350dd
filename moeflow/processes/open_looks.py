"""Questions to one engine that wait for their answers. No question waits longer than `ANSWER_S`. Knows no process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from moeflow.core.engine_messages import Look, Seen
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.core.observation import Question, Sight

with on_demand(__name__):
    from moeflow.core import observation

logger = logging.getLogger(__name__)

ANSWER_S: Final = 2.0


class OpenLooks:
    """The open questions, by their numbers."""

    def __init__(self, send: Callable[[Look], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Seen | None]] = {}

    async def ask(self, question: Question) -> Sight | None:
        """Send a question and return its answer; None: there is none in time, or the engine cannot answer."""
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Look(number, msgspec.msgpack.encode(question)))
            seen = await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            return None
        finally:
            del self._waiting[number]
        if seen is None:
            return None
        if not seen.sight:
            logger.error("the engine cannot answer a question about its passes: %s", seen.error)
            return None
        sight: Sight = msgspec.msgpack.decode(seen.sight, type=observation.Sight)
        return sight

    def take(self, seen: Seen) -> None:
        """Take an answer; one that comes too late is dropped."""
        future = self._waiting.get(seen.number)
        if future is not None and not future.done():
            future.set_result(seen)

    def end(self) -> None:
        """The engine has ended: no open question gets an answer."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
