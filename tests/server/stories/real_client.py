"""A real engine behind the asyncio protocol, in this process: passes run in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from moeflow import LLM
from moeflow.core.engine_messages import EngineStats, Submission, TokenOutput
from moeflow.core.observation import Question, Sight
from moeflow.engine.client import EngineState, ReplicaStatus


class RealClient:
    """An `EngineClient`."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm._engine
        self.model = self._engine.model
        self.state = EngineState.READY
        self.back_in_s = 0.0
        self.is_paused_after: int | None = None  # passes
        self._num_passes = 0
        self._queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self._running: asyncio.Task[None] | None = None

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        queue = self._queues[submission.request_id] = asyncio.Queue()
        self._engine.submit(submission)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        is_last = False
        while not is_last:
            output = await queue.get()
            is_last = output.finish_reason is not None
            yield output

    async def _run(self) -> None:
        self._num_passes = 0
        while self._engine.has_work:
            while self.is_paused_after is not None and self._num_passes >= self.is_paused_after:
                await asyncio.sleep(0.002)
            for output in self._engine.step():
                self._queues[output.request_id].put_nowait(output)
            self._num_passes += 1
            await asyncio.sleep(0)

    async def look(self, question: Question) -> dict[int, Sight]:
        return {0: self._engine.look(question)}

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def replicas(self) -> list[ReplicaStatus]:
        return [ReplicaStatus(self.state, self.stats())]

    async def shutdown(self, deadline_s: float) -> None:
        self.state = EngineState.GONE
