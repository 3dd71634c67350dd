"""Frames over loopback: every sent frame arrives, and nothing else passes for one."""

from __future__ import annotations

import random
import select
import socket
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.frames import FrameHead, Kind
from moeflow.parallel.tcp.tcp_link import _drop
from tests.parallel.links import end_and_wire, in_thread, two_ends

PATIENCE_S = 10.0


def test_messages_of_all_sizes_arrive_in_order():
    sizes = [0, 1, 15, 16, 17, 65535, 65536, 65537, 262143, 262144, 262145, 1000000]
    sent = [random.Random(size).randbytes(size) for size in sizes]
    with two_ends() as (one, other):

        def send_all() -> None:
            for data in sent:
                one.send_message("greeting", data, PATIENCE_S)

        thread = in_thread(send_all)
        assert [other.receive_message("greeting", PATIENCE_S) for _ in sent] == sent
        thread.join()


def test_both_ends_may_send_more_than_fits_at_once():
    data = random.Random(0).randbytes(8 << 20)
    with two_ends() as ends:
        received = [bytearray(len(data)), bytearray(len(data))]
        for end in ends:
            end.start_sending(Kind.COLLECTIVE, "rows", memoryview(data))
        waiting = {0, 1}
        while waiting:
            pushed = [end.push() for end in ends]
            waiting -= {idx for idx in waiting if ends[idx].pull(lambda _, idx=idx: memoryview(received[idx]))}
        assert pushed == [True, True]
        assert received == [data, data]


@given(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_what_is_sent_is_dropped_and_the_rest_stays(buffers, data):
    whole = b"".join(buffers)
    num_bytes = data.draw(st.integers(0, len(whole)))
    rest = [memoryview(buffer) for buffer in buffers]
    _drop(rest, num_bytes)
    assert b"".join(rest) == whole[num_bytes:]
    assert all(rest)


def wire_of(name: str, data: bytes, times: int = 1) -> bytes:
    """Return the bytes of messages."""
    with end_and_wire() as (link, wire):
        for _ in range(times):
            link.send_message(name, data, PATIENCE_S)
        link.close()
        found = b""
        while piece := wire.recv(1 << 16):
            found += piece
    return found


def receive(data: bytes, times: int = 1) -> bytes:
    """Return the last of so many messages that a link takes from these bytes."""
    with two_ends() as (one, other):
        one._connection.sendall(data)
        one.close()
        for _ in range(times):
            message = other.receive_message("greeting", PATIENCE_S)
    return message


def test_each_changed_byte_is_noticed():
    whole = wire_of("greeting", b"good morning")
    assert receive(whole) == b"good morning"
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        with pytest.raises(GroupError, match=r"not authentic|has closed the connection"):
            receive(bytes(changed))


def test_what_is_repeated_left_out_or_swapped_is_noticed():
    whole = wire_of("greeting", b"good morning", times=3)
    frames = [whole[start : start + len(whole) // 3] for start in range(0, len(whole), len(whole) // 3)]
    assert receive(whole, times=3) == b"good morning"
    for changed in (frames[0] + frames[0], frames[1], frames[0] + frames[2]):
        with pytest.raises(GroupError, match="not authentic"):
            receive(changed, times=2)


def test_what_is_sent_back_is_noticed():
    with end_and_wire() as (link, wire):
        link.send_message("greeting", b"good morning", PATIENCE_S)
        wire.sendall(wire.recv(1 << 16))
        with pytest.raises(GroupError, match="not authentic"):
            link.receive_message("greeting", PATIENCE_S)


def test_an_impossible_label_is_not_waited_for():
    with end_and_wire() as (link, wire):
        wire.sendall(struct.pack("<BHQ", 2, 65535, 1 << 60))
        with pytest.raises(GroupError, match="not authentic"):
            link.receive_message("greeting", PATIENCE_S)


def test_who_receives_says_where_a_payload_goes_or_that_it_is_not_expected():
    heads: list[FrameHead] = []

    def refuse(head: FrameHead) -> memoryview:
        heads.append(head)
        raise GroupError("too much")

    with two_ends() as (one, other):
        one.start_sending(Kind.COLLECTIVE, "rows", memoryview(bytes(1000)))
        assert one.push()
        poll = select.poll()
        poll.register(other, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000)
        with pytest.raises(GroupError, match="too much"):
            other.pull(refuse)
    assert heads == [FrameHead(Kind.COLLECTIVE, "rows", 1000)]


def test_another_message_than_expected_is_an_error():
    with two_ends() as (one, other):
        one.send_message("farewell", b"", PATIENCE_S)
        with pytest.raises(GroupError, match="sends 'farewell' where message 'greeting' is expected"):
            other.receive_message("greeting", PATIENCE_S)


def test_an_end_that_closes_or_says_farewell_is_noticed():
    with two_ends() as (one, other):
        assert not other.has_ended()
        one.close()
        with pytest.raises(GroupError, match="has closed the connection"):
            other.receive_message("greeting", PATIENCE_S)
        assert other.has_ended()
    with two_ends() as (one, other):
        one.say_farewell("the disk is full" + "ä" * 1000)
        with pytest.raises(GroupError, match=r"ended the group: the disk is fullä{400,500}$"):
            other.receive_message("greeting", PATIENCE_S)
        with pytest.raises(GroupError, match="closed the connection"):
            one.receive_message("greeting", PATIENCE_S)


def look_for_long(end):
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        end.check_idle()


@pytest.mark.parametrize(
    ("leave", "complaint"),
    [
        (lambda end: end.close(), "has closed the connection"),
        (lambda end: end.say_farewell("the disk is full"), "ended the group: the disk is full"),
        (lambda end: end.send_message("greeting", b"", PATIENCE_S), "sends 'greeting' where nothing is expected"),
    ],
    ids=["closes", "says farewell", "speaks"],
)
def test_of_an_idle_end_it_is_noticed_when_it(leave, complaint):
    with two_ends() as (one, other):
        for _ in range(3):
            other.check_idle()
        one.send_message("greeting", b"hello", PATIENCE_S)
        assert other.receive_message("greeting", PATIENCE_S) == b"hello"
        other.check_idle()
        leave(one)
        with pytest.raises(GroupError, match=complaint):
            look_for_long(other)


def test_a_connection_that_is_reset_is_noticed():
    with end_and_wire() as (link, wire):
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no farewell of the kernel's
        wire.close()
        with pytest.raises(GroupError, match=r"is gone|closed the connection"):
            link.receive_message("greeting", PATIENCE_S)


def test_who_says_nothing_or_takes_nothing_is_waited_for_so_long():
    with end_and_wire() as (link, _):
        with pytest.raises(GroupError, match=r"has not sent message 'greeting' within 0.05 s"):
            link.receive_message("greeting", 0.05)
        with pytest.raises(GroupError, match=r"has not taken message 'greeting' within 0.05 s"):
            link.send_message("greeting", bytes(32 << 20), 0.05)
