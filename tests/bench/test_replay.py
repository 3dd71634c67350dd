"""Traffic against stand-ins: sent when due, never held up by slow answers, failures told apart."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from moeflow.bench.replay import EngineTarget, replay
from moeflow.core.engine_messages import TokenOutput
from moeflow.core.errors import EngineError, RequestError
from moeflow.core.request import FinishReason
from moeflow.workload.poisson import Arrival


class SlowTarget:
    """Gives the first token after a while and then the others at once; some requests fail."""

    def __init__(self, wait_s: float = 0.0, failing: dict[int, Exception] | None = None, lost: int = 0) -> None:
        self.wait_s = wait_s
        self.failing = failing or {}
        self.lost = lost
        self.started: list[float] = []
        self.num_open = 0

    async def generate(self, request_id, arrival):
        self.started.append(time.perf_counter())
        self.num_open += 1
        try:
            await asyncio.sleep(self.wait_s)
            number = int(request_id.removeprefix("bench-"))
            if number in self.failing:
                raise self.failing[number]
            yield 1
            yield arrival.num_new - 1 - self.lost
        finally:
            self.num_open -= 1


def arrivals(*times: float) -> list[Arrival]:
    return [Arrival(at_s, [1, 2, 3], 5) for at_s in times]


class CrowdTarget:
    """Answers no client before three have asked."""

    def __init__(self) -> None:
        self.started: list[float] = []
        self.is_crowd = asyncio.Event()

    async def generate(self, request_id, arrival):
        self.started.append(time.perf_counter())
        if len(self.started) == 3:
            self.is_crowd.set()
        await self.is_crowd.wait()
        yield arrival.num_new


def test_requests_are_sent_when_due_even_while_others_wait():
    target, done = CrowdTarget(), []
    served = asyncio.run(asyncio.wait_for(replay(target, arrivals(0.0, 0.02, 0.04), lambda: done.append(1)), 10))
    assert all(a < b for a, b in itertools.pairwise(target.started))
    assert target.started[2] - target.started[0] >= 0.03  # not before they are due
    assert [each.at_s for each in served] == [0.0, 0.02, 0.04]
    assert served[0].latency_s >= 0.04  # it had to wait for the third
    assert [(each.num_prompt, each.num_new, each.error) for each in served] == [(3, 5, None)] * 3
    assert len(done) == 3


def test_failures_are_noted_one_by_one():
    target = SlowTarget(failing={0: RequestError("refused"), 2: EngineError("gone")})
    served = asyncio.run(replay(target, arrivals(0.0, 0.0, 0.0), lambda: None))
    assert [each.error for each in served] == ["refused", None, "gone"]


def test_an_answer_of_the_wrong_length_is_a_failure():
    (served,) = asyncio.run(replay(SlowTarget(lost=2), arrivals(0.0), lambda: None))
    assert served.error == "asked for 5 tokens, got 3"


def test_cancelling_closes_every_request():
    async def body():
        target = SlowTarget(wait_s=30)
        task = asyncio.create_task(replay(target, arrivals(0.0, 0.0, 60.0), lambda: None))
        await asyncio.sleep(0.05)
        assert target.num_open == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert target.num_open == 0

    asyncio.run(asyncio.wait_for(body(), 10))


class TwoTokenClient:
    """An engine that answers with two passes' outputs, or an error."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.submissions = []

    async def stream(self, submission):
        self.submissions.append(submission)
        yield TokenOutput(request_id=submission.request_id, token_ids=[4, 5])
        if self.error:
            yield TokenOutput(request_id=submission.request_id, finish_reason=FinishReason.ERROR, error=self.error)
        else:
            yield TokenOutput(request_id=submission.request_id, token_ids=[6], finish_reason=FinishReason.LENGTH)


def test_an_engine_gets_exactly_what_is_to_be_generated():
    client = TwoTokenClient()
    (served,) = asyncio.run(replay(EngineTarget(client), [Arrival(0.0, [7, 8], 3)], lambda: None))
    (submission,) = client.submissions
    assert (submission.prompt_token_ids, submission.sampling.max_tokens) == ([7, 8], 3)
    assert submission.sampling.ignore_eos
    assert submission.sampling.temperature == 0.0
    assert (served.num_new, served.error) == (3, None)


def test_an_engines_error_is_the_requests():
    (served,) = asyncio.run(replay(EngineTarget(TwoTokenClient("boom")), [Arrival(0.0, [7], 3)], lambda: None))
    assert served.error == "boom"
