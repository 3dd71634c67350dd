"""The thread of a lender's link: which connections make trials of lenders begin again."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from moeflow.core.errors import CapacityError, GroupError
from moeflow.experts.remote import remote_lender
from moeflow.experts.remote.borrowing import LinkRates
from moeflow.experts.remote.lender_costs import ExpertSize
from moeflow.experts.remote.remote_experts import RemoteExperts
from moeflow.experts.remote.remote_lender import RemoteLender
from moeflow.experts.remote.worth import LendingMove
from moeflow.parallel.remote.lending import Borrowing
from tests.experts.remote.lenders import wait_for

NUM_PLACED = 2
BORROWING = Borrowing(
    software="",
    processor="",
    cpu_isa="",
    hidden=8,
    width=8,
    weight_format="float32",
    is_wide=False,
    num_layers=1,
    num_experts=4,
    num_wanted=4,
)


class Placing:
    """Gives a lender two experts, and counts the changes of speed."""

    def __init__(self):
        self.num_new_speeds = 0

    def next_move(self, held, num_slots):
        return LendingMove(int(held.sum()), None) if held.sum() < NUM_PLACED else None

    def read(self, number, into):
        pass

    def has_changed(self):
        pass

    def has_new_speed(self):
        self.num_new_speeds += 1


def begin_links(monkeypatch, connections) -> threading.Event:
    """Replace links by these: round trip, bytes a second and slots, or an error. Return what a filled lender sets."""
    is_idle = threading.Event()
    waiting = iter(connections)

    class Borrowed:
        def __init__(self, *_):
            found = next(waiting)
            if isinstance(found, Exception):
                raise found
            self.round_trip_s, self.bytes_per_s, self.num_slots = found

        def measure(self):
            return LinkRates(self.round_trip_s, self.bytes_per_s)

        def client(self, on_end):
            return self

        def send_expert(self, *_):
            pass

        def say_here(self):
            is_idle.set()

        def end(self, reason):
            pass

        def close(self):
            pass

    monkeypatch.setattr(remote_lender, "Borrowed", Borrowed)
    monkeypatch.setattr(remote_lender, "_FIRST_PAUSE_S", 0.001)
    return is_idle


@pytest.mark.parametrize(
    ("connections", "expected"),
    [
        ([(1e-3, 1e8, 4), (1.4e-3, 0.7e8, 4), (0.8e-3, 1.3e8, 3)], [2, 2, 2]),  # measurements of one link
        ([(1e-3, 1e8, 4), (1e-3, 1e8, 4), (1e-3, 4e8, 4)], [2, 2, 4]),
        ([(1e-3, 1e8, 4), (3e-3, 1e8, 4), (3e-3, 1e8, 4)], [2, 4, 4]),
        ([(1e-3, 1e8, 2), (1e-3, 1e8, 4), (1e-3, 1e8, 4)], [2, 4, 4]),
    ],
)
def test_trials_begin_again_only_if_a_link_has_another_speed_and_once_the_lender_is_filled(
    monkeypatch, connections, expected
):
    """A link that is cut again and again would otherwise make passes pay for the same trial each time."""
    is_idle = begin_links(monkeypatch, connections)
    placing, found = Placing(), []
    lender = RemoteLender(("host", 1), b"", BORROWING, ExpertSize(16, 8, 8), placing)
    for number in range(1, len(connections) + 1):
        wait_for(is_idle.is_set)
        found.append(placing.num_new_speeds)
        if number < len(connections):
            is_idle.clear()
            lender.lose()
    lender.close()
    assert found == expected


@pytest.mark.parametrize("error", [OSError("no memory for a buffer"), CapacityError("full"), GroupError("lost")])
def test_a_lender_is_tried_again_after_any_error_of_its_link(monkeypatch, error):
    """Its thread must not end: nothing else connects."""
    is_idle = begin_links(monkeypatch, [error, (1e-3, 1e8, 4)])
    lender = RemoteLender(("host", 1), b"", BORROWING, ExpertSize(16, 8, 8), Placing())
    wait_for(is_idle.is_set)
    assert lender.state == "connected"
    lender.close()


def test_lenders_that_slow_passes_down_cost_less_than_a_percent():
    cache = SimpleNamespace(use_counts=lambda: None, is_elsewhere=np.zeros(4, bool))
    remote = RemoteExperts([], b"", BORROWING, ExpertSize(16, 8, 8), cache, lambda *_: None)
    remote.placed[:] = True
    total_s, num_used = 0.0, 0
    for _ in range(120):
        remote.begin_pass()
        is_used = remote._uses_lenders(1)
        num_used += is_used
        seconds = 1.16 if is_used else 1.0
        remote.end_pass(seconds)
        total_s += seconds
    assert num_used > 1
    assert 120 / total_s >= 0.99
