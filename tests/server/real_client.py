"""A real engine in this process as an `EngineClient`. Tiny models alone: their passes hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import EngineStats, Submission, TokenOutput
from moeflow.core.observation import Question, Sight
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.engine.engine import Engine


class RealClient:
    def __init__(self, config: EngineConfig) -> None:
        self._engine = Engine.load(config)
        self.model = self._engine.model
        self.state, self.back_in_s = EngineState.READY, 0.0
        self._queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self._stepping: asyncio.Task[None] | None = None

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def replicas(self) -> list[ReplicaStatus]:
        return [ReplicaStatus(self.state, self.stats())]

    async def look(self, question: Question) -> dict[int, Sight]:
        return {0: self._engine.look(question)}  # between passes, which are computed in this loop

    async def stream(self, submission: Submission) -> AsyncIterator[TokenOutput]:
        queue = self._queues[submission.request_id] = asyncio.Queue()
        self._engine.submit(submission)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        is_last = False
        while not is_last:
            output = await queue.get()
            is_last = output.finish_reason is not None
            yield output

    async def _step(self) -> None:
        while self._engine.has_work:
            for output in self._engine.step():
                self._queues[output.request_id].put_nowait(output)
            await asyncio.sleep(0)

    async def shutdown(self, deadline_s: float) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()
