"""Which lane computes a mask, and that none of them waits for another lane."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from threading import Event, get_native_id

import pytest

from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request, RequestStatus
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_mask import TokenMask
from moeflow.engine.constraints import mask_lanes
from moeflow.engine.constraints.mask_lanes import NUM_SLOW, MaskLanes

WAIT_S = 60.0


class Fake:
    """A constraint that ends when it may."""

    def __init__(self, *, is_slow: bool = False, may_end: bool = True) -> None:
        self.is_slow = is_slow
        self.may_end, self.has_begun = Event(), Event()
        self.priority: int | None = None
        if may_end:
            self.may_end.set()

    def masks(self, token_ids, paths):
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        self.priority = os.getpriority(os.PRIO_PROCESS, get_native_id())
        return [TokenMask(bytes(token_ids))]


def entry(status: RequestStatus = RequestStatus.RUNNING) -> BatchEntry:
    request = Request("r", [1], SamplingParams(), 9, output_token_ids=[7, 8], status=status)
    return BatchEntry(request, 0, 1, (0,), samples=True)


@pytest.fixture
def lanes():
    with closing(MaskLanes()) as lanes:
        yield lanes


def begin(lanes: MaskLanes, **fields):
    constraint = Fake(**fields)
    return lanes.begin(entry(), constraint), constraint


def test_slow_masks_do_not_hold_up_quick_ones(lanes):
    held = [begin(lanes, is_slow=True, may_end=False) for _ in range(NUM_SLOW + 3)]
    quick, _ = begin(lanes)
    assert quick.masks.result(WAIT_S) == [TokenMask(bytes([7, 8]))]
    for _, constraint in held:
        constraint.may_end.set()
    for job, constraint in held:
        job.masks.result(WAIT_S)
        assert sys.platform != "linux" or constraint.priority == 10


def test_another_thread_takes_over_from_one_that_is_held_up(lanes, monkeypatch):
    monkeypatch.setattr(mask_lanes, "HELD_UP_S", 0.0)
    first, held = begin(lanes, may_end=False)
    behind, quick = begin(lanes)
    assert held.has_begun.wait(WAIT_S)
    assert not behind.masks.done()
    lanes.relieve()
    behind.masks.result(WAIT_S)
    held.may_end.set()
    first.masks.result(WAIT_S)
    assert sys.platform != "linux" or (held.priority, quick.priority) == (10, 0)


def test_a_thread_that_is_idle_or_quick_stays(lanes):
    lanes.relieve()
    job, _ = begin(lanes)
    job.masks.result(WAIT_S)
    before = lanes._worker
    lanes.relieve()
    assert lanes._worker is before


def test_the_mask_of_a_request_that_has_ended_is_not_computed(lanes):
    constraint = Fake()
    lanes.begin(entry(RequestStatus.FINISHED), constraint)
    begin(lanes)[0].masks.result(WAIT_S)
    assert not constraint.has_begun.is_set()
