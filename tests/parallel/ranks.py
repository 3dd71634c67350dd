"""Processes that are ranks and do what a test says: each reads calls of its group from a pipe and answers with results.

They live as long as the module's tests and join group after group; one that was killed is replaced for the next.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from moeflow.core.address import Address
from moeflow.core.errors import GroupError
from moeflow.parallel.group import Group
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.mesh import meet
from moeflow.parallel.tcp.tcp_group import TcpGroup
from tests.forked import forked_context

PATIENCE_S = 60.0  # for messages that must arrive
TOKEN = b"the token of the tests"


class Rank:
    """The test's end of one process."""

    def __init__(self) -> None:
        context = forked_context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def process_id(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, method: str, *arguments: Any) -> None:
        self.connection.send((method, arguments))

    def result(self) -> Any:
        """Return what the call came to: a value, or the error."""
        assert self.connection.poll(PATIENCE_S), "a rank does not answer"
        return self.connection.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Ranks:
    """The processes of a module's tests."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []

    def join(self, size: int, *, timeout_s: float = PATIENCE_S, buffer_bytes: int = 64) -> list[Rank]:
        """Have the first `size` processes make a group over shared memory."""
        ranks = self._alive(size)
        process_ids = [rank.process_id for rank in ranks]
        descriptor = make_descriptor(size, buffer_bytes)
        for idx, rank in enumerate(ranks):
            rank.send("join", idx, process_ids, timeout_s)
            reduction.send_handle(rank.connection, descriptor, rank.process_id)
        os.close(descriptor)
        assert [rank.result() for rank in ranks] == [None] * size
        return ranks

    def join_over_tcp(self, size: int, *, timeout_s: float = PATIENCE_S) -> list[Rank]:
        """Have them make a group over TCP."""
        ranks = self._alive(size)
        addresses = [("127.0.0.1", port) for port in together(ranks, "listen")]
        joined = together(ranks, "join_over_tcp", addresses, timeout_s, of_each=lambda rank: (rank,))
        assert joined == [None] * size
        return ranks

    def _alive(self, size: int) -> list[Rank]:
        """Return so many processes, with new ones in place of killed ones."""
        for idx, rank in enumerate(self._ranks):
            if not rank.process.is_alive():
                self._ranks[idx] = Rank()
        while len(self._ranks) < size:
            self._ranks.append(Rank())
        return self._ranks[:size]

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()


@contextlib.contextmanager
def all_ended(ranks: Ranks) -> Iterator[Ranks]:
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with all_ended(Ranks()) as those:
        yield those


def together(
    ranks: list[Rank], method: str, *arguments: Any, of_each: Callable[[int], tuple] = lambda rank: ()
) -> list:
    """Call a method on all ranks; return the results by rank."""
    for idx, rank in enumerate(ranks):
        rank.send(method, *arguments, *of_each(idx))
    return [rank.result() for rank in ranks]


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    group: Group | None = None
    endpoint: Endpoint | None = None
    arrivals: queue.Queue[Link] = queue.Queue()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        result = None
        try:
            if method == "listen":
                if endpoint is not None:
                    endpoint.close()
                arrivals, endpoint = queue.Queue(), Endpoint(TOKEN)
                result = endpoint.listen("127.0.0.1", 0, arrivals.put)
            elif method.startswith("join"):
                if group is not None:
                    group.close()
                if method == "join_over_tcp":
                    assert endpoint is not None
                    group = _join_over_tcp(endpoint, arrivals, *arguments)
                else:
                    group = _join(connection, *arguments)
            else:
                assert group is not None
                result = _METHODS[method](group, *arguments)
        except (GroupError, AssertionError) as error:
            result = error
        connection.send(result)


def _join(connection: Connection, *arguments: Any) -> Group:
    descriptor = reduction.recv_handle(connection)
    try:
        return SharedMemoryGroup(descriptor, *arguments)
    finally:
        os.close(descriptor)


def _join_over_tcp(
    endpoint: Endpoint, arrivals: queue.Queue[Link], addresses: list[Address], timeout_s: float, rank: int
) -> Group:
    links = meet(rank, addresses, endpoint, arrivals, PATIENCE_S)
    return TcpGroup(rank, links, timeout_s)


def _gather_lists(group: Group, name: str, rows: list) -> list:
    return [tensor.tolist() for tensor in group.all_gather(name, torch.tensor(rows, dtype=torch.int64))]


def _exchange_lists(group: Group, name: str, parts: list) -> list:
    tensors = [torch.tensor(part, dtype=torch.int64) for part in parts]
    return [tensor.tolist() for tensor in group.all_to_all(name, tensors)]


def _many(group: Group, count: int, seed: int) -> int:
    """Gather so many times, with pauses of this rank's own; return how many times the others' rows were right."""
    shared, own = random.Random(seed), random.Random(seed * 100 + group.rank)
    num_right = 0
    for step in range(count):
        lengths = [shared.choice((0, 1, 5, 8, 9, 40)) for _ in range(group.size)]
        tensors = group.all_gather("rows", torch.full((lengths[group.rank],), group.rank * count + step))
        if own.random() < 0.1:
            time.sleep(own.random() * 1e-4)  # while it has not looked yet, others go on
        want = [[rank * count + step] * length for rank, length in enumerate(lengths)]
        num_right += [tensor.tolist() for tensor in tensors] == want
    return num_right


def _abort_from_elsewhere(group: Group, name: str) -> GroupError | None:
    """Have another thread end the group while this one waits for the others."""
    timer = threading.Timer(0.2, group.abort, ["the experts of layer 3 cannot be read"])
    timer.start()
    try:
        group.barrier(name)
    except GroupError as error:
        return error
    finally:
        timer.join()
    return None


def _timed(call: Callable[..., Any]) -> Callable[..., tuple[float, Any]]:
    def run(*arguments: Any) -> tuple[float, Any]:
        begin = time.monotonic()
        try:
            result = call(*arguments)
        except GroupError as error:
            result = error
        return time.monotonic() - begin, result

    return run


def _method(name: str) -> Callable[..., Any]:
    return lambda group, *arguments: getattr(group, name)(*arguments)


_METHODS: dict[str, Callable[..., Any]] = {
    "gather_lists": _gather_lists,
    "exchange_lists": _exchange_lists,
    "many": _many,
    "gather": _method("all_gather"),
    "barrier": _method("barrier"),
    "use_one_core": lambda group: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]),
    "use_all_cores": lambda group: os.sched_setaffinity(0, range(os.cpu_count() or 1)),
    "timed_barrier": _timed(_method("barrier")),
    "abort": _method("abort"),
    "abort_from_elsewhere": _abort_from_elsewhere,
}
