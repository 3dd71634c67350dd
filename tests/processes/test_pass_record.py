"""What an engine leaves behind in the memory that it shares with its parent."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from moeflow.processes.pass_record import PassRecord, make_descriptor


@pytest.fixture
def sides() -> Iterator[tuple[PassRecord, PassRecord]]:
    """The engine's and the parent's."""
    descriptor = make_descriptor(200)
    both = PassRecord(os.dup(descriptor)), PassRecord(descriptor)
    yield both
    for side in both:
        side.close()


def test_the_parent_sees_heartbeats_and_the_pass_under_way(sides):
    engine, parent = sides
    assert (parent.beat, parent.in_pass()) == (0, {})
    engine.tick()
    engine.tick()
    assert parent.beat == 2
    requests = {f"chatcmpl-{number:032x}-0-0": 100_000 * number for number in range(200)}
    engine.begin(requests)
    assert parent.in_pass() == requests
    engine.end()
    assert parent.in_pass() == {}
    engine.begin({"r": 0})
    assert parent.in_pass() == {"r": 0}
    assert parent.beat == 2


def test_what_has_no_room_names_nobody(sides):
    engine, parent = sides
    engine.begin({"x" * 10**6: 1})
    assert parent.in_pass() == {}


def test_a_record_is_no_larger_than_it_has_to_be():
    descriptor = make_descriptor(32)
    assert os.fstat(descriptor).st_size <= 8192
    os.close(descriptor)
