"""Replicas for a target of the time to the first token, over virtual hours of prompts that arrive at random."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque

import pytest

from moeflow.core.engine_messages import NO_TOKENS, Submission, TokenOutput
from moeflow.core.sampling_params import SamplingParams
from moeflow.processes.first_tokens import WINDOW_S, FirstTokens
from moeflow.processes.replica_target import GROW_AFTER_S, SHRINK_AFTER_S, ReplicaTarget

LOAD_S = 20.0


def submission(name: str, **more) -> Submission:
    return Submission(name, [1], SamplingParams(), 0, **more)


class Prompts:
    """Engines that compute one prompt at a time from one queue, and follow their target with a look a second."""

    def __init__(self, prompt_s: float, target_s: float, most: int = 16) -> None:
        self.now_s = 0.0
        self.target = ReplicaTarget(1, most, target_s, lambda: self.now_s)
        self.prompt_s = prompt_s
        self.number = 1
        self.ready_at: list[float] = []  # of replicas that load
        self.queue: deque[tuple[float, str]] = deque()
        self.computed: list[tuple[float, float, str]] = []  # heap of ends, with arrival and name
        self.num_arrived = 0
        self.random = random.Random(1)
        self.times: list[float] = []
        self.numbers: list[int] = []  # at each look

    @property
    def num_ready(self) -> int:
        return self.number - len(self.ready_at)

    def run(self, seconds: float, per_s: float) -> None:
        self.times, self.numbers = [], []
        end_s, look_s = self.now_s + seconds, self.now_s + 1
        arrival_s = self.now_s + self.random.expovariate(per_s)
        while look_s <= end_s:
            first_end_s = self.computed[0][0] if self.computed else math.inf
            self.now_s = min(arrival_s, first_end_s, look_s)
            if self.now_s == first_end_s:
                self.finish()
            elif self.now_s == arrival_s:
                self.arrive()
                arrival_s += self.random.expovariate(per_s)
            else:
                self.look()
                look_s += 1
            self.begin()

    def arrive(self) -> None:
        self.num_arrived += 1
        name = f"{self.num_arrived}"
        self.target.first_tokens.note_arrival(submission(name))
        self.queue.append((self.now_s, name))

    def begin(self) -> None:
        while self.queue and len(self.computed) < self.num_ready:
            heapq.heappush(self.computed, (self.now_s + self.prompt_s, *self.queue.popleft()))

    def finish(self) -> None:
        _, arrived_s, name = heapq.heappop(self.computed)
        self.times.append(self.now_s - arrived_s)
        self.target.first_tokens.note_output(TokenOutput(request_id=name, token_ids=[7]))

    def look(self) -> None:
        self.ready_at = [at_s for at_s in self.ready_at if at_s > self.now_s]
        number = self.target.note(
            num_requests=0, num_places=10, kv_blocks=0.0, num_ready=self.num_ready, number=self.number
        )
        self.ready_at += [self.now_s + LOAD_S] * (number - self.number)
        self.number = number
        self.numbers.append(number)

    def high_s(self) -> float:
        return sorted(self.times)[math.ceil(0.9 * len(self.times)) - 1]


@pytest.mark.parametrize("per_s", [0.5, 2.0, 5.0, 9.0])
def test_a_constant_load_gets_what_meets_the_target_and_no_number_swings(per_s):
    prompts = Prompts(prompt_s=0.5, target_s=1.5)
    prompts.run(900, per_s)
    most = max(prompts.numbers)
    fallen = prompts.numbers[prompts.numbers.index(most) :]
    assert fallen == sorted(fallen, reverse=True)  # a backlog may need more for a while
    prompts.run(3000, per_s)
    assert prompts.numbers in (sorted(prompts.numbers), sorted(prompts.numbers, reverse=True))
    assert per_s * 0.5 < prompts.number <= math.ceil(per_s * 0.5) + 2
    assert prompts.high_s() <= 1.5


def test_replicas_end_while_fewer_still_meet_the_target():
    prompts = Prompts(prompt_s=0.5, target_s=1.5)
    prompts.run(900, 8.0)
    most = prompts.number
    assert most >= 4
    prompts.run(2 * SHRINK_AFTER_S, 0.8)
    few = prompts.number
    assert few < most
    prompts.run(1800, 0.8)
    assert prompts.numbers == sorted(prompts.numbers, reverse=True)
    assert prompts.high_s() <= 1.5


def test_one_replica_is_added_at_a_time_and_its_effect_awaited():
    prompts = Prompts(prompt_s=1.0, target_s=2.0)
    prompts.run(200, 5.0)
    rises = [at_s for at_s, (a, b) in enumerate(itertools.pairwise(prompts.numbers)) if b == a + 1]
    assert len(rises) == prompts.number - 1 >= 4
    assert all(b - a >= LOAD_S + GROW_AFTER_S - 1 for a, b in itertools.pairwise(rises))


def test_a_burst_of_seconds_adds_nothing():
    prompts = Prompts(prompt_s=0.1, target_s=0.5)
    prompts.run(60, 1.0)
    prompts.run(2, 15.0)
    prompts.run(120, 1.0)
    assert prompts.number == 1


def test_an_idle_engine_that_is_slower_than_the_target_gets_no_help():
    prompts = Prompts(prompt_s=8.0, target_s=1.0)
    prompts.run(600, 0.01)
    assert prompts.number == 1


def test_requests_that_wait_count_and_those_without_first_tokens_do_not():
    now_s = 0.0
    times = FirstTokens(1.0, lambda: now_s)
    times.need(1, 1)
    times.note_arrival(submission("batch", is_batch=True))
    times.note_arrival(Submission("vector", [1], NO_TOKENS, 0))
    times.note_arrival(submission("left"))
    times.forget("left")
    now_s = 9.0
    assert times.need(1, 1) == 1
    times.note_arrival(submission("waits"))
    times.note_arrival(submission("waits too"))
    now_s = 18.0
    assert times.need(1, 1) == 2
    assert times.need(2, 1) == 2  # one is on its way
    times.note_output(TokenOutput(request_id="waits"))  # progress of its prompt
    assert times.need(1, 1) == 2
    times.forget("waits too")
    assert times.need(1, 1) == 1  # one alone would not be faster
    times.note_output(TokenOutput(request_id="waits", token_ids=[7]))
    now_s += WINDOW_S + 1
    assert times.need(1, 1) == 1
