"""The number of replicas that a load needs, over virtual minutes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from moeflow.processes.replica_target import GROW_AFTER_S, SHRINK_AFTER_S, ReplicaTarget


class Minutes:
    """A server that follows its target, one look a second."""

    def __init__(self, least: int, most: int) -> None:
        self.now_s = 0.0
        self.number = least
        self.target = ReplicaTarget(least, most, clock=lambda: self.now_s)
        self.history: list[int] = []

    def run(self, seconds: float, num_requests: Callable[[float], int], kv_blocks: float = 0.0) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            requests = num_requests(self.now_s)
            self.number = self.target.note(
                num_requests=requests, num_places=10, kv_blocks=kv_blocks, num_ready=self.number, number=self.number
            )
            self.history.append(self.number)


def test_a_lasting_queue_adds_what_it_needs_at_once_and_calm_minutes_remove_it():
    minutes = Minutes(1, 8)
    minutes.run(30, lambda _: 3)
    assert minutes.number == 1
    minutes.run(GROW_AFTER_S + 1, lambda _: 33)
    assert minutes.number == 5  # 33 requests in 80% of 10 places each
    minutes.run(SHRINK_AFTER_S - 5, lambda _: 3)
    assert minutes.number == 5
    minutes.run(10, lambda _: 3)
    assert minutes.number == 1


def test_a_burst_shorter_than_seconds_adds_nothing_and_one_in_calm_minutes_keeps_all():
    minutes = Minutes(1, 8)
    minutes.run(20, lambda _: 0)
    minutes.run(GROW_AFTER_S - 2, lambda _: 80)
    minutes.run(60, lambda _: 0)
    assert minutes.number == 1
    minutes.run(10, lambda _: 40)
    minutes.run(3 * SHRINK_AFTER_S, lambda now_s: 40 if now_s % 120 < 2 else 0)
    assert minutes.number == 5


def test_keys_and_values_of_few_long_requests_count_too():
    minutes = Minutes(1, 8)
    minutes.run(10, lambda _: 2, kv_blocks=1.0)
    assert minutes.number == 2


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 3), st.integers(3, 9))
def test_the_bounds_hold_and_no_number_swings(loads, least, most):
    minutes = Minutes(least, most)
    for load in loads:
        minutes.run(10, lambda _, load=load: load)
    assert {*minutes.history} <= {*range(least, most + 1)}
    falls = [at for at, (a, b) in enumerate(zip(minutes.history, minutes.history[1:], strict=False)) if b < a]
    rises = [at for at, (a, b) in enumerate(zip(minutes.history, minutes.history[1:], strict=False)) if b > a]
    for fall in falls:  # nothing was needed for minutes before
        assert not any(fall - SHRINK_AFTER_S + 12 < rise < fall for rise in rises)
