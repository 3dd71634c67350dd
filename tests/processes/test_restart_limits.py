"""How often an engine is started again."""

from __future__ import annotations

from moeflow.processes.restart_limits import MAX_FRUITLESS, RestartLimits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_crashes_in_a_row_without_progress_are_bounded_and_ever_slower():
    limits = RestartLimits()
    delays = []
    for _ in range(MAX_FRUITLESS):
        assert limits.note_death(is_from_outside=False) == ""
        delays.append(limits.delay_s)
    assert delays[0] == 0.0
    assert delays == sorted(delays)
    assert delays[-1] > delays[1] > 0.0
    assert "in a row" in limits.note_death(is_from_outside=False)
    assert limits.num_restarts == MAX_FRUITLESS


def test_progress_makes_up_for_crashes():
    limits = RestartLimits()
    for _ in range(4 * MAX_FRUITLESS):
        assert limits.note_death(is_from_outside=False) == ""
        assert limits.delay_s == 0.0
        limits.note_progress()


def test_who_ends_it_from_outside_is_waited_for_no_longer():
    limits = RestartLimits()
    for _ in range(4 * MAX_FRUITLESS):
        assert limits.note_death(is_from_outside=True) == ""
        assert limits.delay_s == 0.0


def test_the_restarts_of_an_hour_are_bounded():
    clock = Clock()
    limits = RestartLimits(3, clock)
    for _ in range(3):
        clock.now += 600.0
        assert limits.note_death(is_from_outside=True) == ""
        limits.note_progress()
    assert "3 restarts within an hour" in limits.note_death(is_from_outside=True)
    clock.now += 2401.0  # the first is more than an hour ago
    assert limits.note_death(is_from_outside=True) == ""
    assert limits.note_death(is_from_outside=True) != ""


def test_none_may_be_allowed():
    assert RestartLimits(0).note_death(is_from_outside=True) != ""
