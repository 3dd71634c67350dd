"""Lanes: urgent work first, in order otherwise, all of it once; in the end nothing is left undone, and no thread."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.priority import DEMAND, PREFETCH
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Label, Trace


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class Gate:
    """Work that occupies a thread until it is opened."""

    def __init__(self, lane: Lane) -> None:
        self.is_in, self._open = threading.Event(), threading.Event()
        self.future = lane.submit(self._hold, priority=-1)
        assert self.is_in.wait(60)

    def _hold(self) -> None:
        self.is_in.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


def test_results_and_errors_come_back():
    def divide(a: int, b: int) -> float:
        return a / b

    with Lane("disk", 3) as lane:
        futures = [lane.submit(divide, i, 2) for i in range(20)]
        assert [f.result() for f in futures] == [i / 2 for i in range(20)]
        with pytest.raises(ZeroDivisionError):
            lane.submit(divide, 1, 0).result()
        with pytest.raises(SystemExit):
            lane.submit(sys.exit).result()
        assert lane.submit(divide, 1, 1).result() == 1


@given(priorities=st.lists(st.integers(0, 3), max_size=30))
@settings(max_examples=50)
def test_the_urgent_first_and_first_come_first_served_otherwise(priorities):
    order: list[int] = []
    with Lane("link") as lane:
        gate = Gate(lane)
        futures = [lane.submit(order.append, i, priority=p) for i, p in enumerate(priorities)]
        gate.open()
        for future in futures:
            future.result()
    assert order == sorted(range(len(priorities)), key=lambda i: priorities[i])


@given(cancelled=st.sets(st.integers(0, 19)))
@settings(max_examples=30)
def test_what_is_queued_can_be_cancelled_and_the_rest_runs(cancelled):
    ran: list[int] = []
    with Lane("link") as lane:
        gate = Gate(lane)
        futures = [lane.submit(ran.append, i, priority=i % 2) for i in range(20)]
        assert all(futures[i].cancel() for i in cancelled)
        assert not gate.future.cancel()
        gate.open()
        for i in set(range(20)) - cancelled:
            futures[i].result()
    assert sorted(ran) == sorted(set(range(20)) - cancelled)
    assert all(isinstance(futures[i].error, CancelledError) for i in cancelled)


def test_closing_cancels_what_is_queued():
    ran: list[int] = []
    lane = Lane("link")
    gate = Gate(lane)
    futures = [lane.submit(ran.append, i) for i in range(5)]
    closer = threading.Thread(target=lane.close)
    closer.start()
    while not all(future.is_done for future in futures):
        time.sleep(0.001)
    gate.open()
    closer.join()
    assert gate.future.is_done
    assert ran == []
    assert all(future.is_done for future in futures)
    with pytest.raises(CancelledError):
        lane.submit(ran.append, 9).result(timeout_s=60)
    lane.close()


def test_several_threads_work_at_once():
    barrier = threading.Barrier(4)
    with Lane("disk", 4) as lane:
        for future in [lane.submit(barrier.wait, 60) for _ in range(4)]:
            future.result()


def test_no_future_is_left_undone_when_it_is_closed_under_those_who_submit():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            lane, futures, is_over = Lane("disk", 2), [[], [], []], threading.Event()

            def submit(mine: list[Future[int]], lane: Lane = lane, is_over: threading.Event = is_over) -> None:
                while not is_over.is_set() and len(mine) < 3000:
                    mine.append(lane.submit(int))

            submitters = [threading.Thread(target=submit, args=(mine,)) for mine in futures]
            for submitter in submitters:
                submitter.start()
            time.sleep(0.001)
            lane.close()
            is_over.set()
            for submitter in submitters:
                submitter.join()
            assert all(future.is_done for mine in futures for future in mine)
    finally:
        sys.setswitchinterval(interval)


def test_a_lost_ring_delays_nothing_but_its_own_work():
    """An interrupt inside `submit` may come between the queue and the bell."""
    with Lane("link") as lane:
        gate = Gate(lane)
        put, lane._bell = lane._bell, threading  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            lane.submit(int)
        lane._bell = put
        gate.open()
        gate.future.result()
        assert lane.submit(int, "5").result(timeout_s=60) == 5


def test_each_thread_has_a_row_in_the_trace():
    trace = Trace()
    with Lane("disk", 2, trace=trace) as lane, Lane("link", trace=trace) as link:
        labels = [Label("read", layer=i, num_bytes=100) for i in range(10)]
        for future in [lane.submit(time.sleep, 0.001, label=label, priority=PREFETCH) for label in labels]:
            future.result()
        with pytest.raises(ZeroDivisionError):
            link.submit(divmod, 1, 0, label=Label("bad"), priority=DEMAND).result()
    assert [row.name for row in trace.rows] == ["disk 0", "disk 1", "link"]
    spans = [span for row in trace.rows[:2] for span in row.spans]
    assert sorted(span.label for span in spans) == labels
    assert all(span.end_ns - span.start_ns >= 1_000_000 and not span.is_blocked for span in spans)
    assert [span.label.name for span in trace.rows[2].spans] == ["bad"]
