"""The state of experts against plain dictionaries, under every order of events, and step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeflow.core.errors import StorageError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.expert_states import ABSENT, LOADING, ExpertStates

NUM_LAYERS, NUM_EXPERTS, SLAB_BYTES = 2, 3, 100
TOTAL = NUM_LAYERS * NUM_EXPERTS
numbers = st.integers(0, TOTAL - 1)


class Handle:
    def __init__(self, can_cancel):
        self.can_cancel = can_cancel

    def cancel(self):
        return self.can_cancel


class Fixture:
    def __init__(self, num_slots=3):
        self.stats = CacheStats()
        self.num_dropped = 0
        self.states = ExpertStates(
            NUM_LAYERS,
            NUM_EXPERTS,
            num_slots,
            slab_bytes=SLAB_BYTES,
            stats=self.stats,
            on_dropped=self.drop,
        )

    def drop(self):
        self.num_dropped += 1

    def begin(self, *numbers, is_prefetch, can_cancel=True):
        jobs = [self.states.begin_load(n, self.states.take_free(), is_prefetch=is_prefetch) for n in numbers]
        for job in jobs:
            job.handle = Handle(can_cancel)
        return jobs

    def load(self, *numbers, is_prefetch=False):
        for job in self.begin(*numbers, is_prefetch=is_prefetch):
            self.states.end_load(job, None)


class StatesMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 6))
    def build(self, num_slots):
        self.it = Fixture(num_slots)
        self.states = self.it.states
        self.contents = {}  # of slots: experts that are there
        self.loading = {}  # expert: job
        self.leases = [0] * TOTAL
        self.awaited, self.unused = set(), set()
        self.expected = CacheStats()
        self.num_dropped = 0

    @rule(number=numbers, is_prefetch=st.booleans(), can_cancel=st.booleans())
    def begin(self, number, is_prefetch, can_cancel):
        if number in self.contents.values() or number in self.loading:
            return
        slot = self.states.take_free()
        if slot is None:
            assert len(self.contents) + len(self.loading) == self.states.num_slots
            return
        assert slot not in self.contents
        job = self.loading[number] = self.states.begin_load(number, slot, is_prefetch=is_prefetch)
        assert (job.expert, job.slot, job.is_prefetch, job.is_done) == (number, slot, is_prefetch, False)
        job.handle = Handle(can_cancel)
        if is_prefetch:
            self.awaited.add(number)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), is_joined=st.booleans())
    def arrive(self, data, is_joined):
        number = data.draw(st.sampled_from(sorted(self.loading)))
        job = self.loading.pop(number)
        job.is_joined = is_joined and job.is_prefetch
        self.states.end_load(job, None)
        assert job.is_done
        assert job.error is None
        self.contents[job.slot] = number
        if not job.is_prefetch:
            self.expected.demand_bytes += SLAB_BYTES
        else:
            self.expected.prefetched_bytes += SLAB_BYTES
            self.unused.add(number)
            if job.is_joined:
                self.count_use(number)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def fail(self, data):
        job = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        error = StorageError("broken")
        self.states.end_load(job, error)
        assert (job.is_done, job.error) == (True, error)
        self.expected.failed_loads += 1
        self.drop(job)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def cancel(self, data):
        job = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        assert self.states.cancel(job) == job.handle.can_cancel
        self.expect_cancelled([job])

    @rule()
    def cancel_unleased(self):
        idle = [job for job in self.loading.values() if not self.leases[job.expert]]
        assert self.states.cancel_unleased() == any(job.handle.can_cancel for job in idle)
        self.expect_cancelled(idle)

    @rule(first=numbers, size=st.integers(0, TOTAL), needed=st.sets(numbers))
    def end_prefetches(self, first, size, needed):
        self.states.end_prefetches(first, first + size, needed)
        reached = set(range(first, first + size))
        self.awaited -= reached
        wrong = [self.loading[number] for number in (reached - needed) & self.loading.keys()]
        self.expect_cancelled([job for job in wrong if job.is_prefetch and not job.is_joined])

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def join(self, data):
        job = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        job.is_joined = job.is_prefetch

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def abandon(self, data):
        job = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        self.states.abandon([job])
        assert job.is_done
        assert "abandoned" in str(job.error)
        self.drop(job)

    def expect_cancelled(self, jobs):
        for job in jobs:
            if job.handle.can_cancel:
                self.expected.cancelled_loads += 1
                self.drop(job)

    def drop(self, job):
        del self.loading[job.expert]
        self.awaited.discard(job.expert)
        self.num_dropped += 1

    @rule(number=numbers)
    def evict(self, number):
        if number not in self.contents.values() or self.leases[number]:
            return
        slot = self.states.evict(number)
        assert self.contents.pop(slot) == number
        self.states.give_back(slot)
        self.awaited.discard(number)
        self.expected.evictions += 1
        self.expected.wasted_bytes += SLAB_BYTES * (number in self.unused)
        self.unused.discard(number)

    @rule(number=numbers)
    def lease(self, number):
        self.states.lease(self.states.all[number])
        self.leases[number] += 1

    @rule(number=numbers)
    def unlease(self, number):
        if self.leases[number]:
            self.leases[number] -= 1
            assert self.states.unlease(self.states.all[number]) == (self.leases[number] == 0)

    @rule(number=numbers)
    def expect(self, number):
        if number in self.contents.values():
            self.states.expect(self.states.all[number])
            self.awaited.add(number)

    @rule(number=numbers)
    def use(self, number):
        self.states.use(self.states.all[number])
        self.count_use(number)

    @rule(some=st.sets(numbers))
    def use_all(self, some):
        self.states.use_all(np.array(sorted(some), np.int64))
        for number in some:
            self.count_use(number)

    def count_use(self, number):
        self.expected.used_bytes += SLAB_BYTES * (number in self.unused)
        self.unused.discard(number)

    @rule(num_slots=st.integers(1, 8))
    def resize(self, num_slots):
        if num_slots >= self.states.num_slots:
            self.states.grow(num_slots)
            return
        num_slots = self.states.min_size(max(num_slots, self.states.num_taken))
        if any(job.slot >= num_slots for job in self.loading.values()):
            return  # the cache waits for them
        leased = {slot: number for slot, number in self.contents.items() if self.leases[number]}
        self.states.shrink(num_slots, self.move)
        assert leased.items() <= self.contents.items()
        assert all(slot < num_slots for slot in self.contents)

    def move(self, source, target):
        assert target not in self.contents
        self.contents[target] = self.contents.pop(source)

    @rule()
    def publish(self):
        assert self.states.publish() == (len(self.contents) + len(self.loading) < TOTAL)
        where = {number: slot for slot, number in self.contents.items()}
        for number, slot in enumerate(self.states.table.ravel().tolist()):
            assert slot == where.get(number, LOADING if number in self.loading else ABSENT)

    @invariant()
    def states_are_those_of_the_dictionaries(self):
        states = self.states
        states.check_integrity()
        assert states.num_taken == len(self.contents) + len(self.loading)
        assert states.num_resident == len(self.contents)
        assert states.num_slots >= states.num_filled >= len(self.contents)
        assert states.num_prefetches == sum(job.is_prefetch for job in self.loading.values())
        assert set(states.awaited.nonzero()[0].tolist()) == self.awaited
        assert (self.it.stats, self.it.num_dropped) == (self.expected, self.num_dropped)
        where = {number: slot for slot, number in self.contents.items()}
        for number, state in enumerate(states.all):
            assert state.number == number
            assert state.slot == where.get(number, LOADING if number in self.loading else ABSENT)
            assert state.load is self.loading.get(number)
            assert state.num_leases == self.leases[number]
            assert state.is_unused == (number in self.unused)
            assert bool(states.evictable[number]) == (number in where and not self.leases[number])


TestStates = pytest.mark.slow(StatesMachine.TestCase)


@pytest.fixture
def it():
    return Fixture()


def test_a_leased_slot_says_how_few_there_may_be():
    it = Fixture(4)
    it.load(0, 1, 2)
    assert it.states.min_size(1) == 1
    it.states.lease(it.states.all[2])
    assert it.states.min_size(1) == 3
    assert it.states.unlease(it.states.all[2])
    assert it.states.min_size(1) == 1


def test_a_leased_load_keeps_the_slot_that_it_is_loaded_into(it):
    it.begin(0, 1, is_prefetch=False)
    it.states.lease(it.states.all[1])
    assert it.states.min_size(1) == 2
    it.states.lease(it.states.all[5])  # absent: it holds no slot
    assert it.states.min_size(1) == 2


def test_what_arrives_is_resident_and_counted(it):
    first, second = it.begin(0, is_prefetch=False) + it.begin(4, is_prefetch=True)
    assert it.states.num_prefetches == 1
    assert it.states.awaited.nonzero()[0].tolist() == [4]
    it.states.end_load(first, None)
    it.states.end_load(second, None)
    assert it.states.loads == {}
    assert [state.slot >= 0 for state in it.states.all] == [True, False, False, False, True, False]
    assert (it.stats.demand_bytes, it.stats.prefetched_bytes, it.stats.used_bytes) == (100, 100, 0)
    it.states.check_integrity()


def test_a_prefetch_that_a_pass_joined_was_right(it):
    (job,) = it.begin(1, is_prefetch=True)
    job.is_joined = True
    it.states.end_load(job, None)
    assert (it.stats.prefetched_bytes, it.stats.used_bytes) == (100, 100)


def test_what_was_prefetched_is_counted_once_as_used_or_as_wasted(it):
    it.load(0, 1, 2, is_prefetch=True)
    it.states.use(it.states.all[0])
    it.states.use_all(np.array([0, 1, 5]))
    assert it.stats.used_bytes == 200
    for number in (0, 1, 2):
        it.states.give_back(it.states.evict(number))
    assert (it.stats.used_bytes, it.stats.wasted_bytes, it.stats.evictions) == (200, 100, 3)
    assert not it.states.awaited.any()


def test_what_fails_frees_its_slot_and_keeps_its_error(it):
    (job,) = it.begin(1, is_prefetch=False)
    it.states.end_load(job, StorageError("broken"))
    assert job.is_done
    assert str(job.error) == "broken"
    assert (it.states.num_taken, it.states.loads, it.stats.failed_loads, it.num_dropped) == (0, {}, 1, 1)


def test_what_has_begun_is_not_cancelled(it):
    (job,) = it.begin(1, is_prefetch=True, can_cancel=False)
    assert not it.states.cancel(job)
    assert (it.states.num_taken, it.stats.cancelled_loads, it.num_dropped) == (1, 0, 0)


def test_what_is_not_started_yet_is_not_cancelled(it):
    job = it.states.begin_load(1, it.states.take_free(), is_prefetch=True)
    assert not it.states.cancel(job)
    assert it.states.num_taken == 1


def test_only_loads_without_a_lease_are_idle(it):
    it.begin(0, 1, is_prefetch=True)
    it.states.lease(it.states.all[1])
    assert it.states.cancel_unleased()
    assert not it.states.cancel_unleased()
    assert list(it.states.loads) == [1]


def test_wrong_are_prefetches_of_the_layer_that_are_neither_needed_nor_joined(it):
    it.begin(0, is_prefetch=False)
    _, joined = it.begin(1, 2, is_prefetch=True)
    joined.is_joined = True
    it.states.end_prefetches(3, 6, ())
    it.states.end_prefetches(0, 3, [1])
    assert list(it.states.loads) == [0, 1, 2]
    it.states.end_prefetches(0, 3, ())
    assert list(it.states.loads) == [0, 2]
    assert it.stats.cancelled_loads == 1
    assert not it.states.awaited[1]


def test_loads_that_are_abandoned_end_with_an_error_for_those_who_wait(it):
    (job,) = it.begin(0, is_prefetch=False)
    it.states.abandon([job])
    assert job.is_done
    assert "abandoned" in str(job.error)
    assert (it.states.num_taken, it.states.loads, it.stats.failed_loads) == (0, {}, 0)


def test_experts_come_into_the_table_at_once_and_all_else_when_it_is_published(it):
    assert it.states.publish()  # all are absent
    it.load(0)
    it.begin(4, is_prefetch=True)
    slot = it.states.all[0].slot
    assert it.states.table.tolist() == [[slot, ABSENT, ABSENT], [ABSENT, ABSENT, ABSENT]]
    assert it.states.publish()
    assert it.states.table.tolist() == [[it.states.all[0].slot, ABSENT, ABSENT], [ABSENT, LOADING, ABSENT]]
    assert not it.states._unpublished  # an expert published once costs nothing later
    it.states.evict(0)
    assert it.states.table[0, 0] >= 0
