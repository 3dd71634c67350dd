"""Connections that wait or leave, with any arrivals in any order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moeflow.parallel.tcp.pending_connections import MAX_WAITING, PendingConnections


def test_an_address_with_many_connections_loses_its_oldest_one():
    pending: PendingConnections[tuple[str, int]] = PendingConnections()
    assert pending.enter(("rank", 0), "rank") is None
    for number in range(MAX_WAITING - 1):
        assert pending.enter(("flood", number), "flood") is None
    pending.leave(("flood", 0))
    assert pending.enter(("rank", 1), "rank") is None
    assert pending.enter(("rank", 2), "rank") == ("flood", 1)
    assert pending.enter(("flood", -1), "flood") == ("flood", 2)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=2 * MAX_WAITING))
def test_nothing_is_lost_or_kept_twice(steps):
    pending: PendingConnections[int] = PendingConnections()
    waiting: dict[int, str] = {}
    for number, (address, enters) in enumerate(steps):
        if enters:
            waiting[number] = address
            victim = pending.enter(number, address)
            if victim is not None:
                largest = max(Counter(waiting.values()).values())
                assert Counter(waiting.values())[waiting.pop(victim)] == largest
        elif waiting:
            pending.leave(waiting.popitem()[0])
        pending.leave(-1)
        assert len(pending) == len(waiting) <= MAX_WAITING
        assert all(each in pending for each in waiting)
