"""Who waits, who begins a handshake, and who leaves: with any arrivals, in any order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moeflow.parallel.tcp.waiting_room import MAX_HANDSHAKES, MAX_HANDSHAKES_OF_ADDRESS, MAX_WAITING, WaitingRoom


def test_an_address_with_many_connections_loses_its_oldest_silent_one():
    room: WaitingRoom[tuple[str, int]] = WaitingRoom()
    for number in range(MAX_WAITING - 1):
        assert room.enter(("flood", number), "flood", 5.0) is None
    assert room.enter(("rank", 0), "rank", 5.0) is None
    room.greet(("flood", 0))
    assert room.enter(("rank", 1), "rank", 5.0) == ("flood", 1), "the first one has greeted"
    assert room.enter(("flood", -1), "flood", 5.0) == ("flood", 2)
    assert room.next() == ("flood", 0)


def test_handshakes_are_shared_among_addresses():
    room: WaitingRoom[tuple[str, int]] = WaitingRoom()
    addresses = [*"abcdef"]
    for number in range(2 * MAX_HANDSHAKES_OF_ADDRESS):
        for address in addresses:
            room.enter((address, number), address, 5.0)
            room.greet((address, number))
    begun = Counter()
    while (connection := room.next()) is not None:
        begun[connection[0]] += 1
    assert begun.total() == MAX_HANDSHAKES
    assert max(begun.values()) - min(begun[address] for address in addresses) <= 1
    room.finish("f")
    assert room.next() == ("f", begun["f"])


def test_one_address_does_not_take_all_handshakes():
    room: WaitingRoom[int] = WaitingRoom()
    for number in range(MAX_HANDSHAKES):
        room.enter(number, "a", 5.0)
        room.greet(number)
    assert [room.next() for _ in range(MAX_HANDSHAKES_OF_ADDRESS + 1)][-2:] == [MAX_HANDSHAKES_OF_ADDRESS - 1, None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["enter", "greet", "next", "finish", "wait"]))))
def test_nothing_is_lost_or_kept_twice(steps):
    room: WaitingRoom[int] = WaitingRoom()
    waiting: dict[int, tuple[str, float]] = {}
    running: list[str] = []
    now_s = 0.0
    for number, (address, step) in enumerate(steps):
        if step == "enter":
            waiting[number] = address, now_s + 3
            room.enter(number, address, now_s + 3)
        elif step == "greet" and waiting:
            room.greet(next(iter(waiting)))
        elif step == "next" and (begun := room.next()) is not None:
            running.append(waiting.pop(begun)[0])
        elif step == "finish" and running:
            room.finish(running.pop())
        elif step == "wait":
            now_s += 1
            late = room.overdue(now_s)
            assert late == [one for one, (_, deadline_s) in waiting.items() if deadline_s <= now_s]
            for one in late:
                del waiting[one]
        assert room.next_deadline_s() == next((deadline_s for _, deadline_s in waiting.values()), None)
    assert sorted(room.empty()) == sorted(waiting)
