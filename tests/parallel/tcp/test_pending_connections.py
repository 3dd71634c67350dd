"""Connections that wait, begin a handshake or leave, with any arrivals in any order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moeflow.parallel.tcp.pending_connections import (
    MAX_HANDSHAKES,
    MAX_HANDSHAKES_OF_ADDRESS,
    MAX_WAITING,
    PendingConnections,
)


def test_an_address_with_many_connections_loses_its_oldest_silent_one():
    pending: PendingConnections[tuple[str, int]] = PendingConnections()
    for number in range(MAX_WAITING - 1):
        assert pending.enter(("flood", number), "flood", 5.0) is None
    assert pending.enter(("rank", 0), "rank", 5.0) is None
    pending.greet(("flood", 0))
    assert pending.enter(("rank", 1), "rank", 5.0) == ("flood", 1), "the first one has greeted"
    assert pending.enter(("flood", -1), "flood", 5.0) == ("flood", 2)
    assert pending.next() == ("flood", 0)


def test_handshakes_are_shared_among_addresses():
    pending: PendingConnections[tuple[str, int]] = PendingConnections()
    addresses = [*"abcdef"]
    for number in range(2 * MAX_HANDSHAKES_OF_ADDRESS):
        for address in addresses:
            pending.enter((address, number), address, 5.0)
            pending.greet((address, number))
    begun = Counter()
    while (connection := pending.next()) is not None:
        begun[connection[0]] += 1
    assert begun.total() == MAX_HANDSHAKES
    assert max(begun.values()) - min(begun[address] for address in addresses) <= 1
    pending.finish("f")
    assert pending.next() == ("f", begun["f"])


def test_one_address_does_not_take_all_handshakes():
    pending: PendingConnections[int] = PendingConnections()
    for number in range(MAX_HANDSHAKES):
        pending.enter(number, "a", 5.0)
        pending.greet(number)
    assert [pending.next() for _ in range(MAX_HANDSHAKES_OF_ADDRESS + 1)][-2:] == [MAX_HANDSHAKES_OF_ADDRESS - 1, None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["enter", "greet", "next", "finish", "wait"]))))
def test_nothing_is_lost_or_kept_twice(steps):
    pending: PendingConnections[int] = PendingConnections()
    waiting: dict[int, tuple[str, float]] = {}
    running: list[str] = []
    now_s = 0.0
    for number, (address, step) in enumerate(steps):
        if step == "enter":
            waiting[number] = address, now_s + 3
            pending.enter(number, address, now_s + 3)
        elif step == "greet" and waiting:
            pending.greet(next(iter(waiting)))
        elif step == "next" and (begun := pending.next()) is not None:
            running.append(waiting.pop(begun)[0])
        elif step == "finish" and running:
            pending.finish(running.pop())
        elif step == "wait":
            now_s += 1
            late = pending.overdue(now_s)
            assert late == [one for one, (_, deadline_s) in waiting.items() if deadline_s <= now_s]
            for one in late:
                del waiting[one]
        assert pending.next_deadline_s() == next((deadline_s for _, deadline_s in waiting.values()), None)
    assert sorted(pending.empty()) == sorted(waiting)
