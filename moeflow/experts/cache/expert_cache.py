"""Which experts are resident: hits at once, misses loaded, what a pass uses never evicted.

A pass takes a *lease* on the experts of a layer that its tokens chose. Until it ends, these keep their slots. Loads run
in other threads (`StartLoads`); here it is decided what to load in which slot, and what waits. The state of each expert
is in `expert_states.py`, the choice of victims in `eviction_selector.py`; both are used under the one lock of this
class. Prefetches take a slot only from experts without a lease, and never from another prefetch that may still prove
right. Nothing of this changes what is computed, only when.

Kernels that run over several layers take no lease: they read in `slot_table` what is resident. While they do, between
`begin_read` and `end_read`, nothing is evicted here. They may be lent slots, to fill by themselves in the order that is
decided here; what they did is in a journal, and is done again to the records afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import CapacityError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.eviction import EvictionPolicy, Scores
from moeflow.experts.cache.eviction_selector import EvictionSelector
from moeflow.experts.cache.expert_states import ABSENT, ExpertState, ExpertStates
from moeflow.experts.cache.journal import Event, Fetcher, Journal
from moeflow.experts.cache.lease import Lease
from moeflow.experts.cache.load_job import LoadJob, StartLoads


@dataclass(frozen=True, slots=True)
class ScannedLayer:
    """The experts that a scan needs of a layer."""

    kept: list[int]  # resident from earlier passes
    read_ahead: list[int]  # resident since they were read for this one
    absent: list[int]  # those being loaded first


class ExpertCache:
    """The experts of all layers over a fixed number of slots."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        slab_bytes: int,
        policy: EvictionPolicy,
        start_loads: StartLoads,
        max_prefetches: int = 8,
        wait: Callable[[threading.Condition], object] = threading.Condition.wait,
    ) -> None:
        """Start with empty slots. At most `max_prefetches` are under way at once.

        `wait` returns when a load may have ended; a simulator advances its clock there.
        """
        self.fetcher: Fetcher | None = None  # who can be lent slots, and is asked for loads that have ended
        self.num_experts = num_experts  # of a layer
        self._num_layers = num_layers
        self._max_prefetches = max_prefetches
        self._start_loads = start_loads
        self._wait = wait
        self._stats = CacheStats()
        self._changed = threading.Condition()  # its lock is reentrant
        self._states = ExpertStates(
            num_layers,
            num_experts,
            num_slots,
            slab_bytes=slab_bytes,
            stats=self._stats,
            on_dropped=self._changed.notify_all,
        )
        self._victims = EvictionSelector(policy, num_layers, num_experts)
        self._first_numbers = np.arange(0, num_layers * num_experts, num_experts).reshape(-1, 1, 1)  # of each layer
        self._is_read = False  # the table, by kernels
        self._is_lent = False  # slots, to kernels: then they alone change who is where
        self.is_elsewhere = np.zeros(num_layers * num_experts, bool)  # not worth reading ahead: others compute with it

    @property
    def num_slots(self) -> int:
        """How many slots are used now."""
        return self._states.num_slots

    def begin_pass(self) -> None:
        """Count a pass: the unit of age for policies."""
        with self._changed:
            self._victims.begin_pass()

    def acquire(self, layer: int, experts: Sequence[int]) -> Lease:
        """Take a lease on distinct experts of a layer; those that are absent start loading.

        Where a pass needs more than there are slots, it takes them in portions, each before it computes on the last.

        Blocks: while all other slots are taken by prefetches that have begun.
        Raises: CapacityError if leases leave too few slots.
        """
        first = layer * self.num_experts
        numbers = [first + expert for expert in experts]
        with self._up_to_date():
            if self._victims.scan is None:
                self._states.end_prefetches(first, first + self.num_experts, numbers)
            self._victims.on_use(np.array(numbers, np.int64))
            needed = [self._states.all[number] for number in numbers]
            for state in needed:
                self._states.lease(state)
            try:
                jobs = self._load_absent(needed)
            except BaseException:
                self._release(needed)
                raise
            slots = [jobs[state.number].slot if state.number in jobs else state.slot for state in needed]
        pending = {expert: jobs[first + expert] for expert in experts if first + expert in jobs} if jobs else jobs
        return Lease(self, needed, dict(zip(experts, slots, strict=True)), pending)

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        """Start loading experts that a layer will probably need, likeliest first; return how many were started."""
        with self._up_to_date():
            room = self._max_prefetches - self._states.num_prefetches
            return self._load_ahead(self._absent_of(layer, experts), room)

    def prefetch_pass(self, numbers: Sequence[int]) -> int:
        """Start loading what the next pass will probably need; return how many were started.

        `numbers` are those of experts of all layers, in the order in which the pass will need them. What is resident of
        them is awaited first, so that none of them gives way for another; half of the slots stay as they are.
        """
        assert all(0 <= number < len(self._states.all) for number in numbers), "there are no such experts"
        with self._up_to_date():
            absent = [number for number in numbers if self._is_to_load(self._states.all[number])]
            return self._load_ahead(iter(absent), self.num_slots // 2 - self._states.num_prefetches)

    def scan(self, layer: int, experts: Sequence[int], *, window: int) -> ScannedLayer:
        """Begin or continue a scan: the pass needs nearly all experts of each layer, and now these of this one.

        Until the next pass eviction looks ahead, and keeps all slots but `window` for what later passes need.
        """
        with self._up_to_date():
            self._victims.scan_at(layer, num_kept=self.num_slots - window)
            first = layer * self.num_experts
            rank = {expert: place for place, expert in enumerate(self._victims.best_first(layer))}
            states, awaited = self._states.all[first : first + self.num_experts], self._states.awaited[first:]
            found = ScannedLayer(
                kept=[expert for expert in experts if states[expert].slot >= 0 and not awaited[expert]],
                read_ahead=[expert for expert in experts if states[expert].slot >= 0 and awaited[expert]],
                absent=sorted(
                    (expert for expert in experts if states[expert].slot < 0),
                    key=lambda expert: (states[expert].slot == ABSENT, rank[expert]),
                ),
            )
            self._states.end_prefetches(first, first + self.num_experts, [first + expert for expert in experts])
            return found

    def read_ahead(self, at_most: int) -> None:
        """Start loading what a scan needs next, the best by the policy first, until so many are awaited."""
        with self._up_to_date():
            assert self._victims.scan is not None
            room = at_most - int(self._states.awaited.sum())
            if room > 0:
                self._load_ahead(self._absent_after(self._victims.scan.layer), room)

    @property
    def slot_table(self) -> NDArray[np.int32]:
        """The slot of each expert, [layers, experts], read-only; ABSENT or LOADING: it was at the last `begin_read`.

        An expert that arrives enters it at once.
        """
        return self._states.table

    def begin_read(self) -> bool:
        """Bring the table up to date and evict nothing until `end_read`; return whether an expert is absent."""
        with self._up_to_date():
            self._is_read = True
            return self._states.publish()

    def lend(self, at_most: int, *, max_needed: int) -> None:
        """Let the fetcher fill slots until `end_read`: free ones, then those of experts that it evicts, as here.

        Not in a scan. Unless there are `at_most` free slots, beside those for prefetches, it may evict. A layer that
        needs more experts than `max_needed` is not for it.
        """
        with self._changed:
            if self.fetcher is None or self._victims.scan is not None:
                return
            assert self._is_read, "slots are lent while kernels run"
            room = max(self._max_prefetches - self._states.num_prefetches, 0)
            free = self._states.last_free(at_most + room)
            worth = self._victims.worth(self._states) if len(free) < at_most + room else None
            self._is_lent = True
            self.fetcher.begin(free, worth, max_prefetches=room, max_needed=max_needed)

    def end_read(self, first_layer: int, topk_ids: NDArray[np.int64]) -> None:
        """Count what kernels found in the table on their way through layers: as many as `topk_ids` [layers, T, K] has.

        Takes the place of a lease on the experts of each of them. What the fetcher did is done here, too.
        """
        size, end_layer = self.num_experts, first_layer + len(topk_ids)
        is_used = np.zeros(self._num_layers * size, bool)
        is_used[topk_ids + self._first_numbers[first_layer:end_layer]] = True
        numbers = np.flatnonzero(is_used)
        with self._changed:
            num_absent = 0 if self.fetcher is None else self._catch_up(self.fetcher, self.fetcher.end())
            self._is_read = self._is_lent = False
            self._stats.hits += len(numbers) - num_absent
            self._victims.on_use(numbers)
            self._states.use_all(numbers)
            self._states.end_prefetches(first_layer * size, end_layer * size, ())
            self._changed.notify_all()

    def use_elsewhere(self, layer: int, experts: Sequence[int]) -> None:
        """Count experts that a pass needs and that others compute with."""
        first = layer * self.num_experts
        with self._changed:
            if self._victims.scan is None:
                self._states.end_prefetches(first, first + self.num_experts, ())
            self._victims.on_use(first + np.array(experts, np.int64))

    def use_counts(self) -> Scores:
        """Return how often each expert of all layers was used lately, since this was first asked."""
        with self._changed:
            return self._victims.use_counts()

    def is_there(self, first_layer: int, end_layer: int) -> NDArray[np.bool_]:
        """Return which experts of some layers are resident, or will be in a moment: [layers, experts]."""
        first, end = first_layer * self.num_experts, end_layer * self.num_experts
        with self._up_to_date():
            return self._states.present[first:end].reshape(-1, self.num_experts).copy()

    @property
    def has_free_slot(self) -> bool:
        """Whether an expert can come without another's leaving."""
        with self._up_to_date():
            return self._states.num_taken < self.num_slots

    def resize(self, num_slots: int, move: Callable[[int, int], None]) -> int:
        """Use so many slots, or as few as leases allow; return how many are used now.

        The worst experts by the policy leave. Those that stay and whose slots go are moved, by `move(from, to)`.

        Blocks: while loads that have begun and that no lease waits for write into slots that go.
        """
        with self._up_to_date():
            if num_slots < self.num_slots:
                self._shrink(num_slots, move)
            else:
                self._states.grow(num_slots)
            return self.num_slots

    def stats(self) -> CacheStats:
        """Return the counters as they are now."""
        with self._up_to_date():
            return replace(self._stats)

    @property
    def stall_s(self) -> float:
        """How long passes have waited for loads, in seconds."""
        return self._stats.stall_s

    def absent_of(self, numbers: frozenset[int]) -> frozenset[int]:
        """Return which of some experts, numbered over all layers, are not resident, or not yet."""
        with self._up_to_date():
            return frozenset(number for number in numbers if self._states.all[number].slot < 0)

    @property
    def num_resident(self) -> int:
        """How many experts are resident."""
        with self._up_to_date():
            return self._states.num_resident

    @property
    def num_filled(self) -> int:
        """How many slots have held an expert since they came into use: their memory is taken."""
        with self._up_to_date():
            return self._states.num_filled

    def slot_of(self, layer: int, expert: int) -> int | None:
        """Return an expert's slot if it is resident."""
        with self._up_to_date():
            slot = self._states.all[layer * self.num_experts + expert].slot
            return slot if slot >= 0 else None

    def drain(self) -> None:
        """Cancel what no lease waits for and wait for the rest; then nothing is written into slots any more."""
        with self._changed:
            self._states.cancel_unleased()
            while self._states.loads:
                self._wait_for_load()

    def check_integrity(self) -> None:
        """Check that slots, leases and loads agree; for tests."""
        with self._changed:
            self._states.check_integrity()
            if self._is_read:
                for state, slot in zip(self._states.all, self.slot_table.ravel().tolist(), strict=True):
                    assert slot < 0 or state.slot == slot

    @contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """Hold the lock, with loads that have ended taken into account; those of a pass under way are its own."""
        with self._changed:
            if not self._is_read:
                self._take_ended()
            yield

    # Below, the lock is held.

    def _catch_up(self, fetcher: Fetcher, journal: Journal) -> int:
        """Do to the records what the fetcher did; return how many experts passes needed and did not find."""
        states = self._states
        for event, number, slot in journal.entries:
            if event in (Event.EVICTED, Event.RETIRED):
                if event == Event.RETIRED:
                    states.use(states.all[number])
                states.give_back(states.evict(number))
            elif event in (Event.LOADING, Event.PREFETCHING):
                states.take(slot)
                job = self._begin_load(number, slot, is_prefetch=event == Event.PREFETCHING)
                job.handle = fetcher.adopt(job, self._on_done)
            elif event == Event.JOINED:
                job = states.loads[number]
                job.is_joined = job.is_prefetch
            elif event == Event.CANCELLED:
                fetcher.drop(states.loads[number])
                states.drop_cancelled(states.loads[number])
            else:
                job = states.loads[number]
                states.end_load(job, fetcher.outcome(job, is_right=event == Event.ARRIVED))
        self._stats.late += journal.num_late
        self._stats.misses += journal.num_misses
        self._stats.stall_s += journal.stall_s
        return journal.num_late + journal.num_misses

    def _load_absent(self, needed: Sequence[ExpertState]) -> dict[int, LoadJob]:
        """Count hits and misses, find slots for the absent and start their loads; return all loads to wait for."""
        absent = []
        jobs = {}
        for state in needed:
            job = state.load
            if state.slot >= 0:
                self._stats.hits += 1
                self._states.use(state)
            elif job is not None and not (job.is_prefetch and not job.is_joined and self._states.cancel(job)):
                self._stats.late += 1
                job.is_joined = job.is_prefetch
                jobs[state.number] = job
            else:  # perhaps because its prefetch waited in the queue: demand goes first
                self._stats.misses += 1
                absent.append(state)
        if absent:
            jobs |= self._load_now(absent)
        return jobs

    def _load_now(self, absent: Sequence[ExpertState]) -> dict[int, LoadJob]:
        """Start loads and return them; another thread may start the same ones while this one waits for a slot."""
        jobs = {}
        placed = []
        try:
            for state in absent:
                slot = self._find_slot()
                if state.slot == ABSENT:
                    jobs[state.number] = self._begin_load(state.number, slot, is_prefetch=False)
                    placed.append(jobs[state.number])
                    continue
                self._states.give_back(slot)
                if state.load is not None:
                    jobs[state.number] = state.load
                    state.load.is_joined = state.load.is_prefetch
        except BaseException:
            self._states.abandon(placed)
            raise
        self._start(placed)
        return jobs

    def _begin_load(self, number: int, slot: int, *, is_prefetch: bool) -> LoadJob:
        self._victims.on_load(number)
        return self._states.begin_load(number, slot, is_prefetch=is_prefetch)

    def _start(self, jobs: Sequence[LoadJob]) -> None:
        """Start loads that were begun."""
        if not jobs:
            return
        try:
            handles = self._start_loads(jobs, self._on_done)
        except BaseException:
            self._states.abandon(jobs)
            raise
        for job, handle in zip(jobs, handles, strict=True):
            job.handle = handle

    def _absent_of(self, layer: int, experts: Sequence[int]) -> Iterator[int]:
        """Yield the numbers of those experts of a layer that are absent, and await those that are resident."""
        for expert in experts:
            state = self._states.all[layer * self.num_experts + expert]
            if self._is_to_load(state):
                yield state.number

    def _is_to_load(self, state: ExpertState) -> bool:
        """Return whether an expert that is predicted is worth loading; if it is resident, await it."""
        if state.slot >= 0:
            self._states.expect(state)
        return state.slot == ABSENT and not self.is_elsewhere[state.number]

    def _absent_after(self, layer: int) -> Iterator[int]:
        """Yield the numbers of the absent experts of the layers after this one, the best of each first."""
        for following in range(layer + 1, self._num_layers):
            for expert in self._victims.best_first(following):
                number = following * self.num_experts + expert
                if self._states.all[number].slot == ABSENT and not self.is_elsewhere[number]:
                    yield number

    def _load_ahead(self, numbers: Iterator[int], room: int) -> int:
        """Start loading absent experts in this order while there is room and a spare slot; return how many."""
        jobs: list[LoadJob] = []
        for number in numbers:
            slot = self._spare_slot() if len(jobs) < room else None
            if slot is None:
                break
            jobs.append(self._begin_load(number, slot, is_prefetch=True))
        self._start(jobs)
        return len(jobs)

    def _find_slot(self) -> int:
        """Return a slot for what a pass needs. Raises: CapacityError if leases have all."""
        while self._is_lent or (slot := self._states.take_free()) is None:
            if self._is_read:
                self._wait_for_change()
                continue
            slot = self._evict(for_demand=True)
            if slot is not None:
                return slot
            if self._states.cancel_unleased():
                continue
            if all(self._states.all[number].num_leases for number in self._states.loads):
                raise CapacityError(
                    f"all {self.num_slots} slots for experts are in use, and one more is needed. Raise the memory "
                    "limit (--memory), or take a smaller weight format"
                )
            self._wait_for_change()
        return slot

    def _spare_slot(self) -> int | None:
        """Return a slot for a prefetch; None if all are of more use as they are."""
        if self._is_lent:
            return None
        slot = self._states.take_free()
        return self._evict(for_demand=False) if slot is None else slot

    def _evict(self, *, for_demand: bool) -> int | None:
        """Evict an expert and return its slot; None if none may be evicted, or kernels may be reading any."""
        if self._is_read:
            return None
        number = self._victims.choose(self._states, for_demand=for_demand)
        return None if number is None else self._states.evict(number)

    def _shrink(self, num_slots: int, move: Callable[[int, int], None]) -> None:
        """Empty the slots from `num_slots` on, but for those that leases hold."""
        states = self._states
        states.cancel_unleased()
        while self._is_read or any(
            job.slot >= num_slots and not states.all[number].num_leases for number, job in states.loads.items()
        ):
            self._wait_for_change()
        num_slots = states.min_size(num_slots)
        while states.num_taken > num_slots:
            slot = self._evict(for_demand=True)
            assert slot is not None, "all but leased experts and loads that no lease waits for can be evicted"
            states.give_back(slot)
        states.shrink(num_slots, move)

    def _release(self, held: Sequence[ExpertState]) -> None:
        for state in held:
            if self._states.unlease(state) and state.load is not None:
                self._states.cancel(state.load)
        self._changed.notify_all()

    def _wait_for_change(self) -> None:
        start = time.perf_counter()
        self._wait_for_load()
        self._stats.stall_s += time.perf_counter() - start

    def _wait_for_load(self) -> None:
        if self._is_read:  # loads that end are for the pass under way to see
            self._changed.wait()
            return
        self._wait(self._changed)
        self._take_ended()

    def _take_ended(self) -> None:
        if self.fetcher is not None:
            self.fetcher.poll()

    # Called from elsewhere, without the lock.

    def wait_for_any(self, jobs: Sequence[LoadJob]) -> None:
        """Wait until one of the loads is done, well or badly."""
        with self._changed:
            while not any(job.is_done for job in jobs):
                self._wait_for_change()

    def release(self, held: Sequence[ExpertState]) -> None:
        """End a lease; loads that it alone waited for are cancelled if they have not begun."""
        with self._changed:
            self._release(held)

    def _on_done(self, job: LoadJob, error: Exception | None) -> None:
        """Receive the end of a load, from any thread."""
        with self._changed:
            self._states.end_load(job, error)
            self._changed.notify_all()
