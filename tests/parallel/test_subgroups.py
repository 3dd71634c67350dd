"""Subgroups and channels of a group of three, through shared memory and over TCP, between threads of one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.parallel.group import Group
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from moeflow.parallel.tcp.tcp_group import TcpGroup
from moeflow.parallel.timed_group import TimedGroup
from tests.parallel.links import all_linked

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
LONG_S = 30.0  # far beyond the time of an immediate reaction
SIZE = 3
PAIRS = ((0, 1), (0, 2), (1, 2))
LIKE = torch.empty(0, 5)


@contextlib.contextmanager
def in_shared_memory(timeout_s: float) -> Iterator[list[Group]]:
    groups = []
    descriptors = [make_descriptor(number, buffer_bytes=64) for number in (SIZE, *map(len, PAIRS))]
    for rank in range(SIZE):
        group = SharedMemoryGroup(descriptors[0], rank, [os.getpid()] * SIZE, timeout_s)
        for ranks, descriptor in zip(PAIRS, descriptors[1:], strict=True):
            if rank in ranks:
                group.add_subgroup(ranks, descriptor)
        groups.append(group)
    for descriptor in descriptors:
        os.close(descriptor)
    yield groups
    for group in groups:
        group.close()


@contextlib.contextmanager
def over_tcp(timeout_s: float) -> Iterator[list[Group]]:
    with all_linked(SIZE) as links:
        yield [TcpGroup(rank, links[rank], timeout_s) for rank in range(SIZE)]


@pytest.fixture(params=[in_shared_memory, over_tcp])
def make(request):
    return request.param


def together(*calls):
    """Run calls at the same time; return what each returns, or its error."""

    def result(call):
        try:
            return call()
        except GroupError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(result, calls))


def test_a_channel_brings_tensors_one_after_another_in_their_order(make):
    tensors = [torch.randn(number, 5) for number in (3, 0, 40, 1)]

    def send(group):
        for number, tensor in enumerate(tensors):
            group.channel(2).send(f"rows {number}", tensor)
        return group.channel(2).receive("answer", LIKE)

    def receive(group):
        channel = group.channel(0)
        found = [channel.receive(f"rows {number}", LIKE) for number in range(len(tensors))]
        channel.send("answer", found[0])
        return found

    with make(LONG_S) as groups:
        answer, found = together(lambda: send(groups[0]), lambda: receive(groups[2]))
        assert all(torch.equal(got, want) for got, want in zip(found, tensors, strict=True))
        assert torch.equal(answer, tensors[0])


def test_a_subgroup_counts_from_zero_and_leaves_the_others_alone(make):
    with make(LONG_S) as groups:
        parts = [groups[rank].subgroup((1, 2)) for rank in (1, 2)]
        assert [(part.rank, part.size) for part in parts] == [(0, 2), (1, 2)]
        rows = [torch.full((rank, 2), rank) for rank in (1, 2)]
        for found in together(*(lambda i=i: parts[i].all_gather("rows", rows[i]) for i in range(2))):
            assert [part.tolist() for part in found] == [row.tolist() for row in rows]
        whole = together(
            *(lambda group=group: group.all_gather("ranks", torch.tensor([group.rank])) for group in groups)
        )
        assert all([part.tolist() for part in each] == [[0], [1], [2]] for each in whole)


def test_who_waits_elsewhere_hears_why_a_subgroup_has_ended(make):
    """Rank 2 fails; rank 1 waits for it, and rank 0 for rank 1."""
    with make(LONG_S) as groups:
        errors = together(
            lambda: groups[0].channel(1).receive("rows", LIKE),
            lambda: groups[1].channel(2).receive("rows", LIKE),
            lambda: groups[2].subgroup((0, 2)).abort("the disk is full"),
        )
        assert all("the disk is full" in str(error) for error in errors[:2])
        with pytest.raises(GroupError):
            groups[0].subgroup((0, 2)).barrier("later")


def test_what_two_ranks_do_differently_is_an_error_that_names_both(make):
    with make(LONG_S) as groups:
        errors = together(
            lambda: groups[1].channel(2).send("micro-batch 1 of 2", torch.zeros(1, 5)),
            lambda: groups[2].channel(1).receive("micro-batch 2 of 2", LIKE),
        )
        told = str(errors[1])
        assert "ranks do different things" in told
        assert all(each in told for each in ("rank 1", "rank 2", "micro-batch 1 of 2", "micro-batch 2 of 2"))


def test_a_channel_has_a_deadline(make):
    with make(0.05) as groups, pytest.raises(GroupError, match=r"rank 2 did not .*within 0.05 s"):
        groups[1].channel(2).receive("rows", LIKE)


def test_waiting_in_subgroups_and_channels_is_counted(make):
    with make(0.05) as groups:
        group = TimedGroup(groups[1])
        with pytest.raises(GroupError):
            group.channel(2).receive("rows", LIKE)
        assert group.clock.waited_s >= 0.05
        with pytest.raises(GroupError):
            group.subgroup((1, 2)).barrier("later")
        assert group.clock.waited_s > 0.05
