"""The cache under every order of events: leased slots always hold the right expert; nothing is lost or counted twice.

Loads are played by hand: a slot holds garbage from when its load begins until it ends.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeflow.core.errors import CapacityError, StorageError
from moeflow.experts.cache.eviction import LRU
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES
from tests.experts.cache.fake_disk import NUM_EXPERTS, NUM_LAYERS, SLAB_BYTES, make_cache, use

layers = st.integers(0, NUM_LAYERS - 1)
some_experts = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=3)


class CacheMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 6), policy=st.sampled_from(list(POLICIES)), max_prefetches=st.integers(0, 4))
    def build(self, num_slots, policy, max_prefetches):
        self.cache, self.disk = make_cache(num_slots, policy, max_prefetches=max_prefetches)
        self.leases = []  # (lease, layer)
        self.num_needed = 0
        self.num_finished = {True: 0, False: 0}  # by whether it was a prefetch
        self.num_failed = 0

    def leased(self):
        return {layer * NUM_EXPERTS + expert for lease, layer in self.leases for expert in lease.slots}

    @rule(layer=layers, experts=some_experts)
    def acquire(self, layer, experts):
        wanted = self.leased() | {layer * NUM_EXPERTS + expert for expert in experts}
        begun = [load for load in self.disk.waiting() if load.has_begun and load.job.expert not in wanted]
        if len(wanted) + len(begun) > self.cache.num_slots:
            for load in begun:  # else the cache would wait for them
                self.finish(load)
        failed = any(job.error for lease, _ in self.leases for job in lease._pending.values())
        if len(wanted) > self.cache.num_slots and not failed:
            with pytest.raises(CapacityError, match="slots for experts are in use"):
                self.cache.acquire(layer, experts)
            self.num_needed += len(experts)
        elif len(wanted) <= self.cache.num_slots:
            self.leases.append((self.cache.acquire(layer, experts), layer))
            self.num_needed += len(experts)

    @rule(layer=layers, experts=some_experts)
    def prefetch(self, layer, experts):
        before = self.cache.stats()
        num_resident = self.cache.num_resident
        num_started = self.cache.prefetch(layer, experts)
        assert 0 <= num_started <= len(experts)
        assert num_resident - self.cache.num_resident == self.cache.stats().evictions - before.evictions

    @rule(numbers=st.sets(st.integers(0, NUM_LAYERS * NUM_EXPERTS - 1)))
    def prefetch_pass(self, numbers):
        resident = {number for number in numbers if self.cache._states.all[number].slot >= 0}
        assert 0 <= self.cache.prefetch_pass(sorted(numbers)) <= max(self.cache.num_slots // 2, 0)
        absent = self.cache.absent_of(frozenset(numbers))
        assert absent == numbers - resident  # none of them gave way for another
        assert self.cache._states.num_prefetches <= max(self.cache.num_slots // 2, self.cache._max_prefetches)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()
        lease.release()

    @rule(num_slots=st.integers(1, 6))
    def resize(self, num_slots):
        leased = self.leased()
        for load in self.disk.waiting():
            if load.has_begun and load.job.expert not in leased:  # else the cache would wait for them
                self.finish(load)
        have = self.cache.resize(num_slots, self.move)
        held = {slot for lease, _ in self.leases for slot in lease.slots.values()}
        states = self.cache._states.all
        held |= {states[number].taken_slot for number in leased}  # what failed for a lease may be prefetched elsewhere
        assert have == self.cache.num_slots
        assert have == num_slots or (num_slots < have and have - 1 in held)  # a failed load holds none
        assert self.cache.num_filled <= have
        self.disk.contents[have:] = ["given back"] * (len(self.disk.contents) - have)

    def move(self, source, target):
        self.disk.contents[target] = self.disk.contents[source]

    @rule()
    def begin_pass(self):
        self.cache.begin_pass()

    @precondition(lambda self: self.disk.waiting())
    @rule(data=st.data())
    def begin_load(self, data):
        data.draw(st.sampled_from(self.disk.waiting())).begin()

    @precondition(lambda self: self.disk.waiting())
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def end_load(self, data, fails):
        load = data.draw(st.sampled_from(self.disk.waiting()))
        load.begin()
        if fails:
            self.num_failed += 1
            load.finish(StorageError("the disk is broken"))
        else:
            self.finish(load)

    def finish(self, load):
        self.num_finished[load.job.is_prefetch] += 1
        load.finish()

    @invariant()
    def leased_slots_hold_what_they_should(self):
        for lease, layer in self.leases:
            for expert, slot in lease.slots.items():
                job = lease._pending.get(expert)
                if job is None or (job.is_done and job.error is None):
                    assert self.disk.contents[slot] == layer * NUM_EXPERTS + expert

    @invariant()
    def resident_experts_are_where_the_cache_says(self):
        for layer in range(NUM_LAYERS):
            for expert in range(NUM_EXPERTS):
                slot = self.cache.slot_of(layer, expert)
                assert slot is None or self.disk.contents[slot] == layer * NUM_EXPERTS + expert

    @invariant()
    def everything_agrees(self):
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.hits + stats.late + stats.misses == self.num_needed
        assert stats.demand_bytes == self.num_finished[False] * SLAB_BYTES
        assert stats.prefetched_bytes == self.num_finished[True] * SLAB_BYTES
        assert stats.used_bytes + stats.wasted_bytes <= stats.prefetched_bytes
        assert stats.failed_loads == self.num_failed
        assert stats.cancelled_loads == sum(load.is_cancelled for load in self.disk.loads)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for lease, _ in self.leases:
            lease.release()
        self.disk.finish_all()
        self.cache.drain()
        self.cache.check_integrity()
        assert self.disk.waiting() == []


TestAnyOrderOfEvents = pytest.mark.slow(CacheMachine.TestCase)
TestAnyOrderOfEvents.settings = settings(max_examples=200, stateful_step_count=40)


def test_hits_can_be_used_at_once_and_misses_when_they_arrive():
    cache, disk = make_cache(3)
    use(cache, disk, 0, [1])
    with cache.acquire(0, [0, 1, 2]) as lease:
        assert lease.hits == [1]
        arriving = lease.arriving()
        for expert, load in zip((2, 0), reversed(disk.waiting()), strict=True):
            load.begin()
            load.finish()
            assert next(arriving) == [expert]
            assert disk.contents[lease.slots[expert]] == expert
        assert list(arriving) == []
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.demand_bytes) == (1, 3, 0, 300)
    assert stats.hit_rate == 0.25


def test_a_failed_load_is_an_error_for_those_who_wait_and_can_be_tried_again():
    cache, disk = make_cache(2)
    first, second = cache.acquire(0, [0, 1]), cache.acquire(0, [1])
    one, two = disk.waiting()
    one.begin(), one.finish()
    two.begin(), two.finish(StorageError("the disk is broken"))
    for lease in (first, second):
        with pytest.raises(StorageError, match="the disk is broken"):
            lease.wait()
        lease.release()
    assert cache.slot_of(0, 0) is not None
    with cache.acquire(0, [0, 1]) as lease:
        disk.finish_all()
        lease.wait()
    cache.check_integrity()


def test_a_pass_that_gives_up_takes_its_queued_loads_back():
    cache, disk = make_cache(3)
    lease = cache.acquire(0, [0, 1, 2])
    disk.waiting()[0].begin()
    lease.release()
    assert [load.is_cancelled for load in disk.loads] == [False, True, True]
    assert cache.stats().cancelled_loads == 2
    disk.finish_all()
    assert cache.num_resident == 1


def test_a_queued_prefetch_gives_way_to_demand_for_the_same_expert():
    cache, disk = make_cache(2)
    assert cache.prefetch(0, [3]) == 1
    with cache.acquire(0, [3]):
        assert [load.job.is_prefetch for load in disk.waiting()] == [False]
        disk.finish_all()
    assert cache.stats().misses == 1


def test_a_prefetch_on_its_way_is_waited_for():
    cache, disk = make_cache(2)
    cache.prefetch(0, [3])
    disk.waiting()[0].begin()
    with cache.acquire(0, [3]) as lease:
        disk.finish_all()
        lease.wait()
    stats = cache.stats()
    assert (stats.late, stats.misses, stats.prefetched_bytes, stats.used_bytes) == (1, 0, 100, 100)


def test_wrong_prefetches_are_dropped_when_the_router_has_chosen():
    cache, disk = make_cache(4)
    cache.prefetch(1, [0, 1])
    with cache.acquire(1, [2]):
        assert [load.job.expert for load in disk.waiting()] == [NUM_EXPERTS + 2]


def test_prefetches_come_in_order_and_not_too_many():
    cache, disk = make_cache(4, max_prefetches=2)
    assert cache.prefetch(1, [3, 0, 2]) == 2
    assert [load.job.expert for load in disk.waiting()] == [NUM_EXPERTS + 3, NUM_EXPERTS]
    assert cache.prefetch(1, [1]) == 0


def test_a_prefetch_never_evicts_what_may_still_prove_right():
    cache, disk = make_cache(2)
    cache.prefetch(1, [0, 1])
    disk.finish_all()
    assert cache.prefetch(2, [0]) == 0
    with cache.acquire(1, [0]) as lease:
        assert lease.hits == [0]
    assert cache.prefetch(2, [0]) == 1  # the layer has passed: expert 1 was wrong, expert 0 is known to be in use
    stats = cache.stats()
    assert (stats.used_bytes, stats.wasted_bytes) == (100, 100)


def test_what_is_resident_and_predicted_is_not_given_to_a_prefetch():
    cache, disk = make_cache(1)
    use(cache, disk, 1, [0])
    assert cache.prefetch(1, [0]) == 0  # it is there
    assert cache.prefetch(2, [0]) == 0
    use(cache, disk, 1, [0])
    assert cache.prefetch(2, [0]) == 1  # the layer has passed


def test_demand_rather_takes_a_slot_from_others_than_from_what_was_predicted():
    cache, disk = make_cache(2)
    cache.prefetch(1, [0])
    disk.finish_all()
    use(cache, disk, 0, [0])  # used later, so that LRU would keep it
    use(cache, disk, 2, [0])
    with cache.acquire(1, [0]) as lease:
        assert lease.hits == [0]


def test_differences_of_stats_tell_about_the_time_between():
    cache, disk = make_cache(2)
    use(cache, disk, 0, [0])
    before = cache.stats()
    use(cache, disk, 0, [0])
    assert (cache.stats() - before).hits == 1
    assert (cache.stats() - before).misses == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_threads_at_once(policy):
    """Passes, prefetches and loads in threads of their own: every expert that a pass gets is the right one."""
    num_slots, num_threads = 9, 3
    contents = [-1] * num_slots
    pool = ThreadPoolExecutor(4)

    class Handle:
        def __init__(self, future):
            self.future = future

        @property
        def has_begun(self):
            return not self.future.cancelled() and (self.future.running() or self.future.done())

        def cancel(self):
            return self.future.cancel()

    def load(job, on_done):
        contents[job.slot] = -1
        threading.Event().wait(random.random() * 1e-4)
        contents[job.slot] = job.expert
        on_done(job, StorageError("broken") if random.random() < 0.02 else None)

    def start(jobs, on_done):
        return [Handle(pool.submit(load, job, on_done)) for job in jobs]

    cache = ExpertCache(
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        num_slots=num_slots,
        slab_bytes=SLAB_BYTES,
        policy=POLICIES[policy](NUM_LAYERS, NUM_EXPERTS),
        start_loads=start,
    )

    def serve(seed):
        chance = random.Random(seed)
        num_right = 0
        for step in range(300):
            layer = step % NUM_LAYERS
            cache.begin_pass()
            with cache.acquire(layer, chance.sample(range(NUM_EXPERTS), 2)) as lease:
                cache.prefetch((layer + 1) % NUM_LAYERS, chance.sample(range(NUM_EXPERTS), 2))
                try:
                    lease.wait()
                except StorageError:
                    continue
                for expert, slot in lease.slots.items():
                    assert contents[slot] == layer * NUM_EXPERTS + expert
                    num_right += 1
        return num_right

    with ThreadPoolExecutor(num_threads) as servers:
        assert all(right > 300 for right in servers.map(serve, range(num_threads)))
    cache.drain()
    cache.check_integrity()
    stats = cache.stats()
    assert stats.hits + stats.late + stats.misses == num_threads * 300 * 2
    pool.shutdown()


def test_more_than_fits_is_an_error_that_leaves_the_cache_as_it_was():
    cache, disk = make_cache(2)
    with cache.acquire(0, [0]):
        with pytest.raises(CapacityError, match=r"all 2 slots .* --memory|all 2 slots .*\(--memory\)"):
            cache.acquire(0, [1, 2])
        cache.check_integrity()
        disk.finish_all()
    use(cache, disk, 0, [1, 2])


def test_a_demand_waits_for_a_slot_that_a_begun_prefetch_has():
    cache, disk = make_cache(1)
    cache.prefetch(1, [0])
    (load,) = disk.waiting()
    load.begin()
    finished = threading.Event()

    def finish():
        finished.set()
        load.finish()

    threading.Timer(0.02, finish).start()
    with cache.acquire(0, [0]):
        assert finished.is_set()
        disk.finish_all()


def test_loads_that_cannot_be_started_leave_nothing_behind():
    refused = []

    def refuse(jobs, on_done):
        refused.extend(jobs)
        raise RuntimeError("closed")

    cache = ExpertCache(num_layers=1, num_experts=4, num_slots=2, slab_bytes=1, policy=LRU(4), start_loads=refuse)
    for attempt in (lambda: cache.acquire(0, [0, 1]), lambda: cache.prefetch(0, [0, 1])):
        with pytest.raises(RuntimeError, match="closed"):
            attempt()
        cache.check_integrity()
    assert cache.num_resident == 0
    assert len(refused) == 4
    assert all(job.is_done and "abandoned" in str(job.error) for job in refused)  # other passes may wait for them


@pytest.mark.parametrize("is_pass", [False, True])
def test_a_prefetch_that_fails_before_its_loads_start_leaves_no_expert_loading(monkeypatch, is_pass):
    """A later pass would wait without end for a load that nothing reads."""
    cache, disk = make_cache(4)
    choose, calls = cache._victims.choose, []

    def fail_later(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no memory for scores")
        return choose(*arguments, **options)

    for expert in range(4):
        use(cache, disk, 0, [expert])
    monkeypatch.setattr(cache._victims, "choose", fail_later)
    with pytest.raises(MemoryError):
        cache.prefetch_pass([NUM_EXPERTS, NUM_EXPERTS + 1]) if is_pass else cache.prefetch(1, [0, 1])
    assert not cache._states.loads
    cache.check_integrity()
    with cache.acquire(1, [0]) as lease:
        disk.finish_all()
        lease.wait()
    cache.check_integrity()


def test_the_best_stay_when_slots_go():
    cache, disk = make_cache(4)
    for expert in range(4):
        cache.begin_pass()
        use(cache, disk, 0, [expert])
    assert cache.num_filled == 4
    cache.begin_pass()
    use(cache, disk, 0, [1])
    moves = []
    lower = cache.slot_of(0, 3), cache.slot_of(0, 1)
    assert cache.resize(2, lambda source, target: moves.append((source, target))) == 2
    assert [cache.slot_of(0, expert) is not None for expert in range(4)] == [False, True, False, True]
    assert {source for source, _ in moves} == {slot for slot in lower if slot >= 2}
    assert (cache.num_slots, cache.num_resident, cache.num_filled) == (2, 2, 2)
    assert cache.resize(3, pytest.fail) == 3
    use(cache, disk, 0, [0])
    assert (cache.num_resident, cache.num_filled) == (3, 3)
    cache.check_integrity()


def test_leased_slots_are_never_taken():
    cache, disk = make_cache(4)
    lease = cache.acquire(1, [0, 1, 2])
    disk.finish_all()
    assert cache.resize(1, pytest.fail) == 3
    lease.release()
    assert cache.resize(1, lambda *_: None) == 1
    assert cache.num_resident == 1


def test_what_a_pass_will_need_is_read_in_its_order_and_keeps_what_it_needs():
    cache, disk = make_cache(6)
    for layer in (0, 1):
        use(cache, disk, layer, [0, 1, 2])
    del disk.loads[:]
    assert cache.prefetch_pass([0, 3, 4, 8, 9]) == 3  # 0 and 4 are there, and those used longest ago give way
    assert [load.job.expert for load in disk.waiting()] == [3, 8, 9]
    assert [cache.slot_of(0, expert) is not None for expert in range(3)] == [True, False, False]
    assert cache.slot_of(1, 0) is not None
    disk.finish_all()
    assert cache.prefetch_pass([10]) == 1
    stats = cache.stats()
    for layer, experts in ((0, [0, 3]), (1, [0]), (2, [0, 1])):
        with cache.acquire(layer, experts) as lease:
            assert lease.is_complete
    assert (cache.stats() - stats).misses == 0
    assert cache.stats().used_bytes == 3 * SLAB_BYTES


def test_no_more_than_half_of_the_slots_are_taken_ahead():
    cache, disk = make_cache(6)
    assert cache.prefetch_pass(list(range(12))) == 3
    assert cache.prefetch_pass(list(range(12))) == 0
    disk.finish_all()
    assert cache.prefetch_pass(list(range(12))) == 3
    disk.finish_all()
    assert cache.prefetch_pass(list(range(12))) == 0  # all that is there is awaited
    assert cache.absent_of(frozenset(range(12))) == frozenset(range(6, 12))


@pytest.mark.parametrize("number", [-1, NUM_LAYERS * NUM_EXPERTS])
def test_there_must_be_such_experts(number):
    cache, _ = make_cache(2)
    with pytest.raises(AssertionError, match="no such experts"):
        cache.prefetch_pass([number])


def test_kernels_find_what_arrives_while_they_look():
    cache, disk = make_cache(2)
    cache.prefetch_pass([1])
    assert cache.kernel_reads.begin()
    assert cache.kernel_reads.slot_table[0, 1] < 0
    disk.finish_all()
    assert disk.contents[cache.kernel_reads.slot_table[0, 1]] == 1
    cache.check_integrity()
    cache.kernel_reads.end(0, np.array([[[1]]]))
    assert cache.stats().hits == 1
    assert cache.stats().used_bytes == SLAB_BYTES
