"""Work that lasts as long as it is to, on a clock that tests move."""

from __future__ import annotations

import pytest

from moeflow.pipeline.devices.pace import Pace


class Clock:
    """Time that passes while somebody sleeps, a little longer than asked for."""

    def __init__(self, oversleep: float = 0.0) -> None:
        self.now = 100.0
        self.oversleep = oversleep

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.oversleep


@pytest.fixture
def clock():
    return Clock()


def make(clock) -> Pace:
    return Pace(clock=clock, sleep=clock.sleep)


def test_quick_work_is_slowed_down(clock):
    pace = make(clock)
    with pace.lasting(2.0):
        clock.now += 0.5
    assert clock.now == pytest.approx(102.0, abs=2e-3)
    assert (pace.charged_s, pace.late_s) == (2.0, 0.0)


def test_slow_work_is_late_and_the_next_does_not_pay_for_it(clock):
    pace = make(clock)
    with pace.lasting(1.0):
        clock.now += 5.0
    assert pace.late_s == pytest.approx(4.0, abs=2e-3)
    with pace.lasting(1.0):
        pass
    assert clock.now == pytest.approx(106.0, abs=2e-3)


def test_sleeps_that_end_late_do_not_add_up():
    clock = Clock(oversleep=2e-4)
    pace = make(clock)
    for _ in range(1000):
        with pace.lasting(0.01):
            pass
    assert clock.now == pytest.approx(110.0, abs=3e-3)
    assert pace.late_s == 0


def test_idle_time_is_not_saved_up(clock):
    pace = make(clock)
    clock.now += 50
    with pace.lasting(1.0):
        pass
    assert clock.now == pytest.approx(151.0, abs=2e-3)


def test_what_is_to_take_no_time_is_not_paced(clock):
    pace = make(clock)
    with pace.lasting(0.0):
        clock.now += 3
    assert (clock.now, pace.late_s) == (103.0, 0.0)
