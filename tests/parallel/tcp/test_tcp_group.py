"""The special cases of a group over TCP: ranks that end, hang, are cut off or send unexpected data."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time

import pytest
import torch

from moeflow.cli.chaos.proxy import Proxy
from moeflow.core.errors import GroupError
from moeflow.parallel.tcp import mesh
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.parallel.tcp.link import Kind, Link
from moeflow.parallel.tcp.mesh import meet
from moeflow.parallel.tcp.tcp_group import TcpGroup
from moeflow.processes.nodes.rank_port import RankPort
from tests.parallel.links import TOKEN, connected, in_thread, two_ends
from tests.parallel.ranks import ranks, together

__all__ = ["ranks"]  # a fixture

LONG_S = 30.0  # far beyond the time of an immediate reaction
AT_ONCE_S = 10.0  # on a busy machine


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
        link.send(Kind.COLLECTIVE, label, memoryview(bytes(num_bytes)))
        with pytest.raises(GroupError, match=complaint):
            group.all_gather("rows", torch.zeros(3, 4))
        assert link.next("a part", LONG_S).num_bytes == 48  # rank 0 had sent it before it noticed
        with pytest.raises(GroupError, match=r"ended the group: all_gather 'rows' of torch.float32 .* failed"):
            link.receive_message("any", LONG_S)


def test_a_message_in_a_collectives_place_is_an_error():
    with group_and_link() as (group, link):
        link.send_message("pass", b"")
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


def test_an_abort_comes_from_any_thread():
    with group_and_link() as (group, link):
        thread = in_thread(lambda: (time.sleep(0.1), group.abort("the experts of layer 3 cannot be read")))
        with pytest.raises(GroupError, match=r"^the group ended before barrier 'morning' did: the experts of layer 3"):
            group.barrier("morning")
        thread.join()
        assert link.next("a part", LONG_S).num_bytes == 0
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
    arrivals: queue.Queue[Link] = queue.Queue()
    with contextlib.closing(Endpoint(TOKEN)) as one, contextlib.closing(Endpoint(TOKEN)) as other:
        port = one.listen("127.0.0.1", 0, arrivals.put)
        proxy = None if through is None else through(port)
        addresses = [("127.0.0.1", port if proxy is None else proxy.port), ("127.0.0.1", 1)]
        found: list[dict[int, Link]] = []
        thread = in_thread(lambda: found.append(meet(0, addresses, one, arrivals, LONG_S)))
        links = meet(1, addresses, other, queue.Queue(), LONG_S)
        thread.join()
        try:
            yield [TcpGroup(rank, found, timeouts_s) for rank, found in enumerate((found[0], links))], proxy
        finally:
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


def test_only_missing_ranks_are_taken_and_the_log_names_them(monkeypatch, caplog):
    monkeypatch.setattr(mesh, "_PATIENCE_S", 0.05)
    arrivals: queue.Queue[Link] = queue.Queue()
    with contextlib.closing(Endpoint(TOKEN)) as one:
        address = ("127.0.0.1", one.listen("127.0.0.1", 0, arrivals.put))
        for words in (b"\xc1", b"\x00", b"\x02"):
            with connected(address[1]) as stranger:
                stranger.send_message("meeting", words)
                with pytest.raises(
                    GroupError, match=r"rank 1 \(127.0.0.1:.*\) did not connect within 0.3 s: all machines"
                ):
                    meet(0, [address, address], one, arrivals, 0.3)
                with pytest.raises(GroupError, match="closed the connection"):
                    stranger.receive_message("any", LONG_S)
    complaint = r"rank 0 is not found: cannot connect to .* all machines of a cluster"
    with contextlib.closing(Endpoint(TOKEN)) as other, pytest.raises(GroupError, match=complaint):
        meet(1, [address, address], other, queue.Queue(), 0.3)
    assert [caplog.text.count(f"waiting for rank {rank} (127.0.0.1:") for rank in (0, 1)] == [1, 3]


def test_ranks_meet_in_any_order():
    """The second one tries again until the first one listens."""
    first, second = (RankPort("127.0.0.1") for _ in range(2))
    addresses, found = [first.address, second.address], {}

    def join(rank: int) -> None:
        arrivals: queue.Queue[Link] = queue.Queue()
        with contextlib.closing(Endpoint(TOKEN)) as endpoint:
            endpoint.listen(*addresses[rank], arrivals.put)
            group = TcpGroup(rank, meet(rank, addresses, endpoint, arrivals, LONG_S), LONG_S)
            found[rank] = group.all_gather("ranks", torch.tensor([rank])), group.barrier("end")

    late = in_thread(join, 1)
    time.sleep(0.3)  # it has been refused by then
    join(0)
    late.join()
    for port in (first, second):
        port.close()
    assert [torch.cat(gathered).tolist() for gathered, _ in found.values()] == [[0, 1]] * 2
