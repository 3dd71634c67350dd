"""The special cases of a group over TCP: ranks that end, hang, are cut off or send unexpected data."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time

import pytest
import torch

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.connecting import Acceptor, connect, listen
from moeflow.parallel.tcp.frames import Kind
from moeflow.parallel.tcp.mesh import Meeting, meet
from moeflow.parallel.tcp.tcp_group import TcpGroup
from moeflow.parallel.tcp.tcp_link import TcpLink
from tests.parallel.links import Proxy, in_thread, two_ends
from tests.parallel.ranks import ranks, together

__all__ = ["ranks"]  # a fixture

LONG_S = 30.0  # far beyond the time of an immediate reaction
AT_ONCE_S = 10.0  # on a busy machine
TOKEN = b"the token of the tests"


@contextlib.contextmanager
def group_and_link(timeout_s: float = LONG_S):
    """Yield the group of rank 0 and the link that another process would have to it as rank 1."""
    with two_ends() as (ours, theirs):
        ours.peer = "rank 1 (there)"
        yield TcpGroup(0, {1: ours}, timeout_s), theirs


@pytest.mark.parametrize(
    ("label", "num_bytes", "complaint"),
    [
        ("all_gather 'rows' of torch.float32 [*, 4]", 12, r"rank 1 \(there\) sends 12 bytes, no rows of 16"),
        (
            "all_gather 'rows' of torch.float32 [*, 8]",
            32,
            r"rank 0 is at all_gather 'rows' of torch.float32 \[\*, 4\];",
        ),
        ("all_gather 'rows' of torch.int32 [*, 4]", 32, r"rank 1 \(there\) is at all_gather 'rows' of torch.int32"),
        ("all_to_all 'rows' of torch.float32 [*, 4]", 32, r"rank 1 \(there\) is at all_to_all 'rows'"),
        ("all_gather 'cols' of torch.float32 [*, 4]", 32, r"rank 1 \(there\) is at all_gather 'cols'"),
    ],
)
def test_what_does_not_fit_is_an_error_on_both_sides(label, num_bytes, complaint):
    with group_and_link() as (group, link):
        link.start_sending(Kind.COLLECTIVE, label, memoryview(bytes(num_bytes)))
        assert link.push()
        with pytest.raises(GroupError, match=complaint):
            group.all_gather("rows", torch.zeros(3, 4))
        link.pull(lambda head: memoryview(bytearray(head.num_bytes)))  # what rank 0 had sent before it noticed
        with pytest.raises(GroupError, match=r"ended the group: all_gather 'rows' of torch.float32 .* failed"):
            link.receive_message("any", LONG_S)


def test_more_than_a_pass_can_have_is_refused_before_there_is_memory_for_it(monkeypatch):
    monkeypatch.setattr("moeflow.parallel.tcp.tcp_group._MAX_PART_BYTES", 1000)
    with group_and_link() as (group, link):
        link.start_sending(Kind.COLLECTIVE, "all_gather 'rows' of torch.uint8 [*]", memoryview(bytes(1001)))
        assert link.push()
        monkeypatch.setattr(torch, "empty", None)
        with pytest.raises(GroupError, match="sends 1001 bytes"):
            group.all_gather("rows", torch.zeros(3, dtype=torch.uint8))


def test_a_message_in_a_collectives_place_is_an_error():
    with group_and_link() as (group, link):
        link.send_message("pass", b"", LONG_S)
        with pytest.raises(GroupError, match=r"rank 0 is at barrier 'morning'; rank 1 .there. is at pass"):
            group.barrier("morning")


def test_who_is_late_is_named_with_what_to_look_for():
    with group_and_link(0.1) as (group, _):
        with pytest.raises(GroupError) as caught:
            group.barrier("morning")
        assert str(caught.value) == (
            "barrier 'morning' failed: rank 1 (there) did not come to it within 0.1 s: a process is stopped or much "
            "slower than this one, or the network between is cut"
        )
        with pytest.raises(GroupError, match="the group ended before barrier 'noon' did: barrier 'morning' failed"):
            group.barrier("noon")


def test_who_takes_nothing_is_late_too():
    with group_and_link(0.2) as (group, link):
        link.start_sending(Kind.COLLECTIVE, "all_gather 'rows' of torch.uint8 [*]", memoryview(b""))
        assert link.push()
        with pytest.raises(GroupError, match=r"rank 1 \(there\) did not come to it within 0.2 s"):
            group.all_gather("rows", torch.zeros(64 << 20, dtype=torch.uint8))


def test_an_abort_comes_from_any_thread():
    with group_and_link() as (group, link):
        thread = in_thread(lambda: (time.sleep(0.1), group.abort("the experts of layer 3 cannot be read")))
        with pytest.raises(GroupError, match=r"^the group ended before barrier 'morning' did: the experts of layer 3"):
            group.barrier("morning")
        thread.join()
        link.pull(lambda head: memoryview(bytearray(head.num_bytes)))
        with pytest.raises(GroupError, match="ended the group: the experts of layer 3 cannot be read"):
            link.receive_message("any", LONG_S)


@pytest.mark.slow
def test_a_killed_rank_is_named_at_once(ranks):
    first, second, third = group = ranks.join_over_tcp(3, timeout_s=LONG_S)
    together(group, "barrier", "all are here")
    for rank in (first, second):
        rank.send("timed_barrier", "after lunch")
    time.sleep(0.2)  # both wait
    third.process.kill()
    third.process.join()
    errors = []
    for rank in (first, second):
        seconds, error = rank.result()
        assert isinstance(error, GroupError)
        assert seconds < AT_ONCE_S
        errors.append(str(error))
    assert any("barrier 'after lunch' failed: rank 2 (127.0.0.1:" in error for error in errors)
    assert all("rank 2 (127.0.0.1:" in error for error in errors)


@pytest.mark.slow
def test_a_stopped_rank_is_late(ranks):
    first, second, third = ranks.join_over_tcp(3, timeout_s=0.5)
    os.kill(second.process_id, signal.SIGSTOP)
    try:
        for rank in (first, third):
            rank.send("timed_barrier", "morning")
        for rank in (first, third):
            seconds, error = rank.result()
            assert "rank 1 (127.0.0.1:" in str(error)
            assert "did not come to it within 0.5 s" in str(error)
            assert seconds < AT_ONCE_S
    finally:
        os.kill(second.process_id, signal.SIGCONT)
    second.send("barrier", "morning")  # for which the others had sent all
    assert second.result() is None
    second.send("barrier", "noon")
    assert "barrier 'noon' failed: rank" in str(second.result())


@contextlib.contextmanager
def meeting(timeouts_s: float, through: type[Proxy] | None = None):
    """Yield the groups of two ranks in this process, and the proxy between them."""
    arrivals: queue.Queue[TcpLink] = queue.Queue()
    acceptor = Acceptor(listen("127.0.0.1", 0), TOKEN, arrivals.put)
    proxy = None if through is None else through(acceptor.port)
    address = ("127.0.0.1", acceptor.port if proxy is None else proxy.port)
    found: list[dict[int, TcpLink]] = []
    addresses = [address, ("127.0.0.1", 1)]
    thread = in_thread(lambda: found.append(meet(Meeting(b"g", 0), addresses, TOKEN, {}, arrivals, LONG_S)))
    links = meet(Meeting(b"g", 1), addresses, TOKEN, {}, queue.Queue(), LONG_S)
    thread.join()
    groups = [TcpGroup(rank, found, timeouts_s) for rank, found in enumerate((found[0], links))]
    try:
        yield groups, proxy
    finally:
        acceptor.close()
        for group in groups:
            group.close()
        if proxy is not None:
            proxy.close()


def test_ranks_exchange_rows_in_uneven_numbers():
    with meeting(LONG_S) as (groups, _):
        found: list = [None, None]

        def exchange(rank: int) -> None:
            rows = torch.full((3 * rank + 1, 2), rank, dtype=torch.bfloat16)
            parts = [torch.full((2 * rank + other, 3), 10 * rank + other) for other in range(2)]
            found[rank] = groups[rank].all_gather("rows", rows), groups[rank].all_to_all("parts", parts)

        thread = in_thread(exchange, 1)
        exchange(0)
        thread.join()
        for rank, (gathered, received) in enumerate(found):
            assert [tensor.tolist() for tensor in gathered] == [[[0, 0]], [[1, 1]] * 4]
            assert [tensor.tolist() for tensor in received] == [
                [[10 * source + rank] * 3] * (2 * source + rank) for source in range(2)
            ]


def test_a_cut_link_is_late_on_both_sides():
    with meeting(0.3, Proxy) as ((first, second), proxy):
        thread = in_thread(first.barrier, "morning")
        second.barrier("morning")
        thread.join()
        proxy.cut()
        errors = []

        def wait(group: TcpGroup) -> None:
            try:
                group.barrier("noon")
            except GroupError as error:
                errors.append(str(error))

        threads = [in_thread(wait, group) for group in (first, second)]
        for thread in threads:
            thread.join()
        assert len(errors) == 2
        assert all("within 0.3 s" in error and "the network between is cut" in error for error in errors)


def test_ranks_of_another_group_are_not_taken():
    arrivals: queue.Queue[TcpLink] = queue.Queue()
    acceptor = Acceptor(listen("127.0.0.1", 0), TOKEN, arrivals.put)
    try:
        address = ("127.0.0.1", acceptor.port)
        stranger = meet(Meeting(b"other", 1), [address, address], TOKEN, {}, queue.Queue(), LONG_S)
        with pytest.raises(GroupError, match=r"rank 1 \(127.0.0.1:.*\) did not connect within 0.3 s: all machines"):
            meet(Meeting(b"g", 0), [address, address], TOKEN, {}, arrivals, 0.3)
        with pytest.raises(GroupError, match="closed the connection"):
            stranger[0].receive_message("any", LONG_S)
        stranger[0].close()
        with contextlib.closing(connect(*address, TOKEN)) as confused:
            confused.send_message("meeting", b"\xc1", LONG_S)
            with pytest.raises(GroupError, match="did not connect"):
                meet(Meeting(b"g", 0), [address, address], TOKEN, {}, arrivals, 0.3)
    finally:
        acceptor.close()
    with pytest.raises(GroupError, match=r"rank 0 is not found: cannot connect to .* all machines of a cluster"):
        meet(Meeting(b"g", 1), [address, address], TOKEN, {}, queue.Queue(), LONG_S)
