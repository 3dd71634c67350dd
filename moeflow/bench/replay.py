"""Sends synthetic traffic to a server, each request when it is due, and records the replies and their times.

An open loop: a request never waits for the answer to another, so a server that falls behind is seen to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from moeflow.bench.metrics import Served
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import EngineError, RequestError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineClient
from moeflow.workload.poisson import Arrival


class ReplayTarget(Protocol):
    """Somebody who generates tokens."""

    def generate(self, request_id: str, arrival: Arrival) -> AsyncGenerator[int, None]:
        """Yield how many tokens have come, each time some have; the first time is the first token's.

        Raises: RequestError or EngineError if the request fails.
        """


class EngineTarget:
    """An engine, spoken to in token ids."""

    def __init__(self, client: EngineClient, *, is_batch: bool = False) -> None:
        """Take an engine; `is_batch` makes the traffic that of a batch job."""
        self._client = client
        self._is_batch = is_batch

    async def generate(self, request_id: str, arrival: Arrival) -> AsyncGenerator[int, None]:
        """See `ReplayTarget`."""
        sampling = SamplingParams(max_tokens=arrival.num_new, temperature=0.0, ignore_eos=True)
        submission = Submission(request_id, arrival.prompt_token_ids, sampling, seed=0, is_batch=self._is_batch)
        async with aclosing(self._client.stream(submission)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise EngineError(output.error)
                yield len(output.token_ids)


async def replay(target: ReplayTarget, arrivals: Sequence[Arrival], on_done: Callable[[], None]) -> list[Served]:
    """Return how each request fared, in order of arrival. `on_done` is called whenever one has ended.

    Cancelling the task that awaits this cancels every request.
    """
    start = time.perf_counter()

    async def send(number: int, arrival: Arrival) -> Served:
        served = await _send(target, f"bench-{number}", arrival, start)
        on_done()
        return served

    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(max(start + arrival.at_s - time.perf_counter(), 0))
            tasks.append(group.create_task(send(number, arrival)))
    return [task.result() for task in tasks]


async def _send(target: ReplayTarget, request_id: str, arrival: Arrival, start: float) -> Served:
    first_s = None
    num_new = 0
    error = None
    try:
        async with aclosing(target.generate(request_id, arrival)) as counts:
            async for count in counts:
                first_s = time.perf_counter() - start if first_s is None else first_s
                num_new += count
    except (RequestError, EngineError) as problem:
        error = str(problem)
    end_s = time.perf_counter() - start
    if error is None and num_new != arrival.num_new:
        error = f"asked for {arrival.num_new} tokens, got {num_new}"
    return Served(arrival.at_s, first_s, end_s, len(arrival.prompt_token_ids), num_new, error)
