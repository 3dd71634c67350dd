"""Two computations of each rank alternate: their collectives give what brute force gives, in one order on all ranks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.parallel import timed_group
from moeflow.parallel.alternating_group import AlternatingGroup
from moeflow.parallel.group import OverlappingGroup
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from moeflow.parallel.tcp.tcp_group import TcpGroup
from moeflow.parallel.timed_group import TimedGroup, WaitClock
from tests.parallel.links import all_linked

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
LONG_S = 30.0  # far beyond the time of an immediate reaction
SIZE = 3
LENGTH = 12  # collectives of each computation


@contextlib.contextmanager
def in_shared_memory() -> Iterator[list[OverlappingGroup]]:
    everyone = tuple(range(SIZE))
    descriptors = [make_descriptor(SIZE, buffer_bytes=64) for _ in range(2)]
    groups = [SharedMemoryGroup(descriptors[0], rank, [os.getpid()] * SIZE, LONG_S) for rank in everyone]
    for group in groups:
        group.add_subgroup(everyone, descriptors[1])
    for descriptor in descriptors:
        os.close(descriptor)
    yield list(groups)
    for group in groups:
        group.close()


@contextlib.contextmanager
def over_tcp() -> Iterator[list[OverlappingGroup]]:
    with all_linked(SIZE) as links:
        yield [TcpGroup(rank, links[rank], LONG_S) for rank in range(SIZE)]


@pytest.fixture(params=[in_shared_memory, over_tcp])
def groups(request):
    with request.param() as made, contextlib.ExitStack() as undo:
        alternating = [AlternatingGroup(group, WaitClock()) for group in made]
        for group in alternating:
            undo.callback(group.close)
        yield alternating


def on_each(groups, work):
    """Return what each rank's work returns, or its error."""

    def result(group):
        try:
            return work(group)
        except GroupError as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(result, groups))


def part(lane, step, source, target):
    """Return what a rank sends to another one: rows whose number depends on all of these."""
    num_rows = (lane + 2 * step + 3 * source + target) % 5
    return torch.full((num_rows, 3), float(((lane * LENGTH + step) * SIZE + source) * SIZE + target))


def computation(group, lane, trace):
    """Exchange by turns in both ways, and keep what came."""
    found = []
    for step in range(LENGTH):
        trace.append((lane, step))
        name = f"step {step}"
        if step % 2:
            found += group.all_gather(name, part(lane, step, group.rank, 0))
        else:
            found += group.all_to_all(name, [part(lane, step, group.rank, target) for target in range(SIZE)])
    return found


def expected(lane, rank):
    return [part(lane, step, source, 0 if step % 2 else rank) for step in range(LENGTH) for source in range(SIZE)]


def test_both_get_what_other_ranks_sent_to_the_same_one_of_them(groups):
    def work(group):
        trace = []
        both = group.run(*(lambda lane=lane: computation(group, lane, trace) for lane in range(2)))
        return both, trace

    for _ in range(2):
        for rank, (both, trace) in enumerate(on_each(groups, work)):
            assert trace == [(lane, step) for step in range(LENGTH) for lane in range(2)]  # by turns, the first ahead
            for lane, found in enumerate(both):
                assert all(map(torch.equal, found, expected(lane, rank)))
        alone = on_each(groups, lambda group: computation(group, 0, []))  # outside of `run`, as any group
        assert all(
            torch.equal(*pair) for rank in range(SIZE) for pair in zip(alone[rank], expected(0, rank), strict=True)
        )


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_ends_the_other_and_all_ranks(groups, failing):
    def work(group):
        def compute(lane):
            for step in range(3):
                group.barrier(f"step {step}")
                if group.rank == 1 and (lane, step) == (failing, 1):
                    raise GroupError("this one fails")

        return group.run(*(lambda lane=lane: compute(lane) for lane in range(2)))

    def and_abort(group):
        try:
            return work(group)
        except GroupError as error:
            group.abort(str(error))  # as engines do
            raise

    errors = on_each(groups, and_abort)
    assert str(errors[1]) == "this one fails"
    assert all(isinstance(error, GroupError) for error in errors)


def test_only_one_of_them_computes_at_a_time_and_waits_of_one_do_not_count_the_others_work(monkeypatch):
    now = threading.local()  # each rank has a clock of its own, which only moves while it computes
    seconds = [0.0] * SIZE
    monkeypatch.setattr(timed_group.time, "perf_counter", lambda: seconds[now.rank])
    running = [0] * SIZE
    clocks = [WaitClock() for _ in range(SIZE)]

    with in_shared_memory() as made:
        raw = [AlternatingGroup(group, clock) for group, clock in zip(made, clocks, strict=True)]

        def work(group):
            timed = TimedGroup(group, clocks[group.rank])

            def compute():
                now.rank = group.rank
                for step in range(4):
                    running[group.rank] += 1
                    assert running[group.rank] == 1
                    seconds[group.rank] += 1.0
                    running[group.rank] -= 1
                    timed.barrier(f"step {step}")

            group.run(compute, compute)
            group.close()

        assert on_each(raw, work) == [None] * SIZE
    assert seconds == [8.0] * SIZE
    assert [clock.waited_s for clock in clocks] == [0.0] * SIZE
