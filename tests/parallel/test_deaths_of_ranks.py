"""What the others of a group see when a rank is killed, stopped or gives up."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.parallel import shared_memory_group
from moeflow.parallel.shared_memory_group import STOPPED_S, SharedMemoryGroup, make_descriptor
from tests.parallel.ranks import Ranks, all_ended, ranks, together

__all__ = ["ranks"]  # a fixture

pytestmark = [
    pytest.mark.slow,  # processes that import torch
    pytest.mark.skipif(not extension.is_available(), reason="needs the extension"),
]

LONG_S = 30.0  # far beyond the time of an immediate reaction
AT_ONCE_S = 10.0  # on a busy machine


def test_a_killed_rank_is_named_at_once(ranks):
    first, second, third = group = ranks.join(3, timeout_s=LONG_S)
    together(group, "barrier", "all are here")
    for rank in (first, second):
        rank.send("timed_barrier", "after lunch")
    time.sleep(0.2)  # both sleep
    os.kill(third.process_id, signal.SIGKILL)
    for rank in (first, second):
        seconds, error = rank.result()
        assert isinstance(error, GroupError)
        assert "rank 2 did not reach barrier 'after lunch'" in str(error)
        assert f"process {third.process_id} has ended" in str(error)
        assert seconds < AT_ONCE_S


def test_a_rank_that_went_before_is_named(ranks):
    first, second = ranks.join(2, timeout_s=LONG_S)
    second.process.kill()
    second.process.join()
    first.send("timed_barrier", "morning")
    seconds, error = first.result()
    assert f"rank 1 did not reach barrier 'morning' (it is gone: process {second.process_id} has ended)" in str(error)
    assert seconds < AT_ONCE_S


def test_a_rank_that_comes_and_goes_while_others_look_is_not_missed(monkeypatch):
    descriptor = make_descriptor(2)
    first, second = (SharedMemoryGroup(descriptor, rank, [os.getpid()] * 2, LONG_S) for rank in range(2))
    os.close(descriptor)

    def come_and_go() -> None:
        second._exchange.start("barrier 'last'", [], True)
        first._peers[1].has_ended = True

    monkeypatch.setattr(first._peers[1], "look", come_and_go)
    first.barrier("last")


def test_a_stopped_rank_is_late(ranks):
    first, second, third = ranks.join(3, timeout_s=0.5)
    os.kill(second.process_id, signal.SIGSTOP)
    try:
        for rank in (first, third):
            rank.send("timed_barrier", "morning")
        for rank in (first, third):
            seconds, error = rank.result()
            assert (
                f"rank 1 did not reach barrier 'morning' within 0.5 s (process {second.process_id} is still there)"
                in str(error)
            )
            assert seconds < AT_ONCE_S
    finally:
        os.kill(second.process_id, signal.SIGCONT)
    second.send("barrier", "morning")
    assert "the group ended before barrier 'morning' did: rank" in str(second.result())


def test_a_rank_that_stays_stopped_counts_as_lost(ranks):
    first, second = ranks.join(2, timeout_s=LONG_S)
    first.send("timed_barrier", "morning")
    os.kill(second.process_id, signal.SIGSTOP)
    try:
        seconds, error = first.result()
    finally:
        os.kill(second.process_id, signal.SIGCONT)
    assert f"rank 1 did not reach barrier 'morning' (process {second.process_id} has been stopped for" in str(error)
    assert STOPPED_S <= seconds < LONG_S


def test_a_rank_that_does_nothing_counts_as_lost(monkeypatch):
    monkeypatch.setattr(shared_memory_group, "IDLE_S", 0.3)
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        descriptor = make_descriptor(2)
        group = SharedMemoryGroup(descriptor, 0, [os.getpid(), sleeping.pid], LONG_S)
        os.close(descriptor)
        with pytest.raises(GroupError, match=rf"rank 1 .* \(process {sleeping.pid} hangs: it has not computed"):
            group.barrier("morning")
        sleeping.kill()


def test_all_that_are_late_are_named(ranks):
    first, *_ = ranks.join(3, timeout_s=0.1)
    (error,) = together([first], "barrier", "morning")
    assert "ranks 1, 2 did not reach barrier 'morning' within 0.1 s" in str(error)


def test_abort_ends_the_wait_of_all(ranks):
    first, second, third = ranks.join(3, timeout_s=LONG_S)
    for rank in (first, second):
        rank.send("timed_barrier", "morning")
    time.sleep(0.2)
    third.send("abort", "the experts of layer 3 cannot be read")
    assert third.result() is None
    for rank in (first, second):
        seconds, error = rank.result()
        assert str(error) == (
            "the group ended before barrier 'morning' did: rank 2: the experts of layer 3 cannot be read"
        )
        assert seconds < AT_ONCE_S
    assert "rank 2: the experts" in str(together([third], "barrier", "noon")[0])


def test_a_long_reason_is_cut(ranks):
    first, second = ranks.join(2)
    first.send("abort", "ä" * 2000)
    assert first.result() is None
    (error,) = together([second], "barrier", "morning")
    assert "ä" * 500 in str(error)
    assert "ä" * 600 not in str(error)


def test_nothing_is_left_when_all_are_killed():
    with all_ended(Ranks()) as those:
        group = those.join(2, buffer_bytes=1 << 20)
        assert "moeflow-group" in Path(f"/proc/{group[0].process_id}/maps").read_text()
    assert [file for file in Path("/dev/shm").iterdir() if "moeflow" in file.name] == []
    assert all(not rank.process.is_alive() for rank in group)
    assert "moeflow-group" not in Path("/proc/self/maps").read_text()


def test_closing_unmaps_the_memory():
    descriptor = make_descriptor(1)
    group = SharedMemoryGroup(descriptor, 0, [os.getpid()], 1.0)
    os.close(descriptor)
    group.barrier("morning")
    assert "moeflow-group" in Path("/proc/self/maps").read_text()
    group.close()
    gc.collect()
    assert "moeflow-group" not in Path("/proc/self/maps").read_text()


def test_memory_of_another_group_is_refused():
    descriptor = make_descriptor(2)
    with pytest.raises(GroupError, match="no rank 2"):
        SharedMemoryGroup(descriptor, 2, [os.getpid()] * 3, 1.0)
    with pytest.raises(GroupError, match="that of 2 ranks, and there are 3"):
        SharedMemoryGroup(descriptor, 1, [os.getpid()] * 3, 1.0)
    os.close(descriptor)
    descriptor = os.memfd_create("nothing")
    os.ftruncate(descriptor, 1 << 20)
    with pytest.raises(GroupError, match="no segment"):
        SharedMemoryGroup(descriptor, 0, [os.getpid()], 1.0)
    os.close(descriptor)
