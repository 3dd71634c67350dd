"""What models that guess know of the next pass is read ahead, as long as passes are faster for it."""

from __future__ import annotations

import pytest

from moeflow.core.trial import NOT_TRIED, Trial
from moeflow.experts.look_ahead import LookAhead


class Machine:
    """Passes on a virtual clock, each after two guesses, of which the first takes longer beside reads."""

    def __init__(self, gain: float, loss: float = 0.0) -> None:
        self.gain, self.loss = gain, loss
        self.now_s = 0.0
        self.lacks = True
        self.asked: list[list[int]] = []
        self.ahead = LookAhead(self, Trial("guesses", starts_on=True), lambda: self.now_s)

    def absent_of(self, numbers):
        return numbers if self.lacks else frozenset()

    def prefetch_pass(self, numbers):
        self.asked.append(numbers)

    def run(self) -> None:
        self.ahead.begin_guessing()
        self.now_s += 0.05 + (self.loss if self.ahead.is_on else 0.0)
        self.ahead.begin_guessing()  # another one guesses, too
        self.ahead.expect(frozenset({7, 3}))
        self.now_s += 0.05 + (1 - self.gain if self.ahead.is_on else 1.0)
        self.ahead.end_pass(1)


def test_what_pays_is_read_in_the_order_of_layers():
    machine = Machine(0.5)
    for _ in range(50):
        machine.run()
    assert machine.ahead.is_on
    assert "less time" in machine.ahead.trial.reason
    machine.asked.clear()
    machine.run()
    assert machine.asked == [[3, 7]]


@pytest.mark.parametrize(("gain", "loss"), [(-0.5, 0.0), (0.0, 0.0), (0.5, 0.6)])
def test_what_does_not_pay_is_left_alone(gain, loss):
    machine = Machine(gain, loss)
    for _ in range(600):
        machine.run()
    assert not machine.ahead.is_on
    machine.asked.clear()
    for _ in range(100):
        machine.run()
    assert machine.asked == []


def test_only_guessed_passes_are_asked_about_and_failed_ones_are_forgotten():
    machine = Machine(0.0)
    assert not machine.ahead.is_asked
    machine.ahead.begin_guessing()
    assert machine.ahead.is_asked
    machine.ahead.drop_pass()
    assert not machine.ahead.is_asked
    machine.now_s += 1000
    machine.run()  # the time before has no part in it
    assert machine.ahead.trial.reason == NOT_TRIED
    assert not machine.ahead.is_asked


def test_passes_that_lack_nothing_are_not_judged():
    machine = Machine(0.5)
    for _ in range(50):
        machine.run()
    machine.lacks, machine.gain = False, -100.0
    for _ in range(2000):
        machine.run()
    assert machine.ahead.is_on
