"""Loads under way, one by one; in every order of events they are tested with the cache."""

from __future__ import annotations

import threading

import pytest

from moeflow.core.errors import StorageError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.inflight_loads import InflightLoads
from moeflow.experts.cache.occupancy import Occupancy
from moeflow.experts.cache.prefetches import Prefetches


class Handle:
    def __init__(self, can_cancel):
        self.can_cancel = can_cancel

    def cancel(self):
        return self.can_cancel


class Fixture:
    """Six experts in two layers, three slots; loads end when `done` is called for them."""

    def __init__(self):
        self.stats = CacheStats()
        self.occupancy = Occupancy(2, 3, 3)
        self.prefetches = Prefetches(6, 100, self.stats)
        self.changed = threading.Condition()
        self.can_cancel = True
        self.loads = InflightLoads(
            self.occupancy, self.prefetches, self.start, self.changed, slab_bytes=100, stats=self.stats
        )

    def start(self, jobs, on_done):
        self.done = on_done
        return [Handle(self.can_cancel) for _ in jobs]

    def begin(self, *numbers, is_prefetch):
        with self.changed:
            jobs = [self.loads.place(number, self.occupancy.take_free(), is_prefetch=is_prefetch) for number in numbers]
            self.loads.start(jobs)
        return jobs


@pytest.fixture
def it():
    return Fixture()


def test_what_arrives_is_resident_and_counted(it):
    first, second = it.begin(0, is_prefetch=False) + it.begin(4, is_prefetch=True)
    assert it.loads.num_prefetches == 1
    assert it.prefetches.awaited.nonzero()[0].tolist() == [4]
    it.done(first, None)
    it.done(second, None)
    assert it.loads.jobs == {}
    assert [it.occupancy.is_resident[number] for number in range(6)] == [True, False, False, False, True, False]
    assert (it.stats.demand_bytes, it.stats.prefetched_bytes, it.stats.used_bytes) == (100, 100, 0)
    it.occupancy.check_integrity()


def test_a_prefetch_that_somebody_joined_was_right(it):
    (job,) = it.begin(1, is_prefetch=True)
    job.is_joined = True
    it.done(job, None)
    assert (it.stats.prefetched_bytes, it.stats.used_bytes) == (100, 100)


def test_what_fails_frees_its_slot_and_keeps_its_error(it):
    (job,) = it.begin(1, is_prefetch=False)
    it.done(job, StorageError("broken"))
    assert job.is_done
    assert str(job.error) == "broken"
    assert (it.occupancy.num_taken, it.loads.jobs, it.stats.failed_loads) == (0, {}, 1)


def test_what_has_begun_is_not_cancelled(it):
    it.can_cancel = False
    (job,) = it.begin(1, is_prefetch=True)
    with it.changed:
        assert not it.loads.cancel(job)
    assert (it.occupancy.num_taken, it.stats.cancelled_loads) == (1, 0)


def test_only_loads_without_a_lease_are_idle(it):
    it.begin(0, 1, is_prefetch=True)
    it.occupancy.lease(1)
    with it.changed:
        assert it.loads.cancel_unleased()
        assert not it.loads.cancel_unleased()
    assert list(it.loads.jobs) == [1]


def test_wrong_are_prefetches_of_the_layer_that_are_neither_needed_nor_joined(it):
    it.begin(0, is_prefetch=False)
    _, joined = it.begin(1, 2, is_prefetch=True)
    joined.is_joined = True
    with it.changed:
        it.loads.cancel_wrong(3, 6, ())
        it.loads.cancel_wrong(0, 3, [1])
        assert list(it.loads.jobs) == [0, 1, 2]
        it.loads.cancel_wrong(0, 3, ())
    assert list(it.loads.jobs) == [0, 2]
    assert it.stats.cancelled_loads == 1
    assert not it.prefetches.awaited[1]


def test_loads_that_cannot_be_started_end_with_an_error_for_those_who_wait(it):
    def refuse(jobs, on_done):
        raise RuntimeError("closed")

    it.loads._start_loads = refuse
    with it.changed:
        job = it.loads.place(0, it.occupancy.take_free(), is_prefetch=False)
        with pytest.raises(RuntimeError, match="closed"):
            it.loads.start([job])
    assert job.is_done
    assert "given up" in str(job.error)
    assert (it.occupancy.num_taken, it.loads.jobs) == (0, {})
