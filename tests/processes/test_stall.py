"""When an engine is taken to be stuck, on a clock of the test's own."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from moeflow.processes.stall import LOST_S, SILENCE_S, SLOWER_THAN_SEEN, STALLED_SHARE, StallWatch, foreseen_pass_s
from tests.shapes import ENGINE, INFO


class Process:
    """A watched process: seconds with or without heartbeats, with or without work."""

    def __init__(self, timeout_s: float = 300.0, foreseen_s: float = 0.0) -> None:
        self.watch = StallWatch(timeout_s, foreseen_s)
        self.beat = 1

    def runs(self, seconds: int, *, has_work: bool) -> None:
        for _ in range(seconds):
            self.beat += 1
            self.watch.tick(1.0, self.beat, has_work=has_work)

    def is_silent(self, seconds: int, *, has_work: bool) -> None:
        for _ in range(seconds):
            self.watch.tick(1.0, self.beat, has_work=has_work)


@pytest.mark.parametrize("has_work", [False, True])
def test_a_process_that_stops_is_stalled_until_it_goes_on(has_work):
    process = Process()
    process.runs(5, has_work=has_work)
    process.is_silent(int(SILENCE_S) - 1, has_work=has_work)
    assert not process.watch.problem
    process.is_silent(1, has_work=has_work)
    assert "has not run" in process.watch.problem
    assert not process.watch.is_overdue
    process.runs(1, has_work=has_work)
    assert not process.watch.problem
    process.is_silent(300, has_work=has_work)
    assert process.watch.is_overdue


def test_a_process_without_a_host_is_ended_sooner():
    for timeout_s, want in ((300.0, LOST_S), (3.0, 3.0), (0.0, None)):
        watch = StallWatch(timeout_s)
        ended_s = None
        for second in range(1, 400):
            watch.tick(1.0, 1, has_work=False, is_lost=True)
            if watch.is_overdue and ended_s is None:
                ended_s = second
        assert ended_s == want


def test_a_process_that_has_not_begun_to_beat_is_not_silent():
    watch = StallWatch(300.0)
    for _ in range(100):
        watch.tick(1.0, 0, has_work=False)
    assert not watch.problem


def test_a_pass_that_does_not_end_is_noticed_though_the_process_beats():
    process = Process(timeout_s=100.0)
    process.runs(1000, has_work=False)
    assert not process.watch.problem
    process.runs(int(STALLED_SHARE * 100) - 1, has_work=True)
    assert not process.watch.problem
    process.runs(1, has_work=True)
    assert "no pass has ended" in process.watch.problem
    process.watch.note_message()
    assert not process.watch.problem
    process.runs(99, has_work=True)
    assert not process.watch.is_overdue
    process.runs(101, has_work=True)
    assert process.watch.is_overdue


def test_who_is_slow_is_given_more_time():
    process = Process(timeout_s=100.0)
    process.runs(90, has_work=True)
    process.watch.note_message()
    process.runs(int(STALLED_SHARE * SLOWER_THAN_SEEN * 90) - 1, has_work=True)
    assert not process.watch.problem
    assert not process.watch.is_overdue
    process.runs(int(SLOWER_THAN_SEEN * 90), has_work=True)
    assert process.watch.is_overdue


def test_the_time_of_a_stopped_process_is_no_measure_of_its_passes():
    process = Process(timeout_s=100.0)
    process.is_silent(60, has_work=True)
    process.runs(1, has_work=True)
    process.watch.note_message()
    assert process.watch.pass_limit_s == 100.0


def test_a_pass_that_was_foreseen_is_waited_for():
    process = Process(timeout_s=100.0, foreseen_s=1000.0)
    process.runs(int(STALLED_SHARE * 1000) - 1, has_work=True)
    assert not process.watch.problem
    assert not process.watch.is_overdue


def test_without_a_timeout_nothing_is_ended():
    process = Process(timeout_s=0.0)
    process.runs(30, has_work=True)
    assert not process.watch.problem
    process.is_silent(10_000, has_work=True)
    assert process.watch.problem
    assert not process.watch.is_overdue


def test_large_models_and_few_threads_are_foreseen_to_be_slow():
    small = foreseen_pass_s(ENGINE, INFO)
    assert small < 1.0
    large = msgspec.structs.replace(INFO, num_parameters=47 * 10**9, num_active_parameters=13 * 10**9)
    slow = foreseen_pass_s(ENGINE, large)
    assert slow > 600.0  # 188 GB from a disk of 100 MB/s and more than 10 TFLOP
    assert foreseen_pass_s(dataclasses.replace(ENGINE, num_threads=8), large) < slow
