"""Messages over loopback: every sent message arrives, whole and in order, and the end of a link has a reason."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.link import PIECE_BYTES, Kind, Message
from tests.parallel.links import PATIENCE_S, in_thread, two_ends


def test_messages_of_all_sizes_arrive_in_order():
    sizes = [0, 1, 65536, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 1000000]
    sent = [random.Random(size).randbytes(size) for size in sizes]
    with two_ends() as ends:
        for one, other in (ends, ends[::-1]):
            for data in sent:
                one.send_message("greeting", data)
            assert [other.receive_message("greeting", PATIENCE_S) for _ in sent] == sent


def test_memory_may_change_once_it_is_sent():
    data = bytearray(8 << 20)
    with two_ends() as (one, other):
        one.send_message("zeros", data)
        data[:] = b"x" * len(data)
        assert not any(other.receive_message("zeros", PATIENCE_S))


def test_threads_that_wait_for_different_links_get_their_messages():
    with two_ends() as (one, other), two_ends() as (more, _):
        assert one.endpoint is not more.endpoint
        received: list[bytes] = []
        threads = [in_thread(lambda: received.append(other.receive_message("a", PATIENCE_S))) for _ in range(3)]
        for number in range(3):
            one.send_message("a", b"%d" % number)
        for thread in threads:
            thread.join()
        assert sorted(received) == [b"0", b"1", b"2"]


@given(st.sampled_from(Kind), st.text(), st.lists(st.binary(max_size=9), max_size=3))
def test_frames_are_read_as_they_were_written(kind, label, pieces):
    message = Message(kind, label, sum(map(len, pieces)), [memoryview(piece) for piece in pieces])
    found = Message.of(message.frames())
    assert (found.kind, found.label, found.num_bytes) == (kind, label, message.num_bytes)
    assert found.payload() == b"".join(pieces)
    for frames in ([memoryview(b"abc")], [*message.frames(), memoryview(b"x")]):
        with pytest.raises(GroupError, match="a message"):
            Message.of(frames)


def test_another_message_than_expected_is_an_error():
    with two_ends() as (one, other):
        one.send_message("farewell", b"")
        with pytest.raises(GroupError, match="sends 'farewell' where message 'greeting' is expected"):
            other.receive_message("greeting", PATIENCE_S)


def test_the_end_of_a_link_has_a_reason_and_comes_after_its_messages():
    with two_ends() as (one, other):
        assert not other.has_ended()
        one.send_message("greeting", b"hello")
        one.close()
        assert other.receive_message("greeting", PATIENCE_S) == b"hello"
        with pytest.raises(GroupError, match="has closed the connection"):
            other.receive_message("greeting", PATIENCE_S)
        assert other.has_ended()
    with two_ends() as (one, other):
        other.say_farewell("the disk is full" + "ä" * 1000)
        with pytest.raises(GroupError, match=r"ended the group: the disk is fullä{400,500}$"):
            one.receive_message("greeting", PATIENCE_S)
        with pytest.raises(GroupError, match="the disk is full"):
            other.receive_message("greeting", PATIENCE_S)
    with two_ends() as (one, other):
        one.endpoint.close()
        with pytest.raises(GroupError, match="has closed the connection"):
            other.receive_message("greeting", PATIENCE_S)


def look_for_long(end):
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        end.check_idle()


@pytest.mark.parametrize(
    ("leave", "complaint"),
    [
        (lambda end: end.close(), "has closed the connection"),
        (lambda end: end.say_farewell("the disk is full"), "ended the group: the disk is full"),
        (lambda end: end.send_message("greeting", b""), "sends 'greeting' where nothing is expected"),
    ],
    ids=["closes", "says farewell", "speaks"],
)
def test_of_an_idle_end_it_is_noticed_when_it(leave, complaint):
    with two_ends() as (one, other):
        for _ in range(3):
            other.check_idle()
        one.send_message("greeting", b"hello")
        assert other.receive_message("greeting", PATIENCE_S) == b"hello"
        other.check_idle()
        leave(one)
        with pytest.raises(GroupError, match=complaint):
            look_for_long(other)


def test_who_says_nothing_is_waited_for_so_long():
    with two_ends() as (one, _), pytest.raises(GroupError, match=r"has not sent message 'greeting' within 0.05 s"):
        one.receive_message("greeting", 0.05)


def test_waiting_ends_when_the_own_endpoint_closes():
    errors: list[GroupError] = []
    with two_ends() as (one, _):

        def wait() -> None:
            try:
                one.receive_message("greeting", None)
            except GroupError as error:
                errors.append(error)

        thread = in_thread(wait)
        one.endpoint.close()
        thread.join()
    assert len(errors) == 1
