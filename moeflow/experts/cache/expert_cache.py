"""Which experts are resident: hits at once, misses loaded, what a pass uses never evicted.

A pass takes a *lease* on the experts of a layer that its tokens chose. Until it ends, their slots are theirs. Loads are
done by others, in other threads (`StartLoads`); here it is decided what to load in whose place, and who waits.
`occupancy.py` keeps the books of slots, `loads.py` those of what is on its way. Prefetches take a slot only from
experts that nobody uses and never one from another prefetch that may still prove right. Nothing of this changes what
is computed, only when.

Kernels that run over several layers take no lease: they read in `slot_table` what is resident. While they do, between
`begin_read` and `end_read`, nobody is evicted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import CapacityError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.eviction import EvictionPolicy
from moeflow.experts.cache.eviction_selector import EvictionSelector
from moeflow.experts.cache.inflight_loads import InflightLoads
from moeflow.experts.cache.lease import Lease
from moeflow.experts.cache.load_job import LoadJob, StartLoads
from moeflow.experts.cache.occupancy import Occupancy
from moeflow.experts.cache.prefetches import Prefetches


@dataclass(frozen=True, slots=True)
class ScannedLayer:
    """The experts that a scan needs of a layer."""

    kept: list[int]  # resident from earlier passes
    read_ahead: list[int]  # resident since they were read for this one
    absent: list[int]  # those on their way first


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
        total = num_layers * num_experts
        self.num_experts = num_experts  # of a layer
        self._num_layers = num_layers
        self._max_prefetches = max_prefetches
        self._wait = wait
        self._stats = CacheStats()
        self._changed = threading.Condition()  # its lock may be taken again by who has it
        self._occupancy = Occupancy(num_layers, num_experts, num_slots)
        self._prefetches = Prefetches(total, slab_bytes, self._stats)
        self._victims = EvictionSelector(policy, num_layers, num_experts)
        self._loads = InflightLoads(
            self._occupancy, self._prefetches, start_loads, self._changed, slab_bytes=slab_bytes, stats=self._stats
        )
        self._first_numbers = np.arange(0, total, num_experts).reshape(-1, 1, 1)  # of each layer
        self._is_read = False  # the table, by kernels

    @property
    def num_slots(self) -> int:
        """How many slots are used now."""
        return self._occupancy.num_slots

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
        numbers = [layer * self.num_experts + expert for expert in experts]
        with self._changed:
            if self._victims.scan is None:
                self._drop_wrong_prefetches(layer, numbers)
            self._victims.on_use(np.array(numbers, np.int64))
            for number in numbers:
                self._occupancy.lease(number)
            try:
                jobs = self._load_absent(numbers)
            except BaseException:
                self._release(numbers)
                raise
            slots = [jobs[number].slot if number in jobs else self._occupancy.slots[number] for number in numbers]
        pending = {expert: jobs[number] for expert, number in zip(experts, numbers, strict=True) if number in jobs}
        return Lease(self, numbers, dict(zip(experts, slots, strict=True)), pending)

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        """Start loading experts that a layer will probably need, likeliest first; return how many were started."""
        with self._changed:
            jobs: list[LoadJob] = []
            room = self._max_prefetches - self._loads.num_prefetches
            for expert in experts:
                number = layer * self.num_experts + expert
                if self._occupancy.slots[number] >= 0:
                    self._prefetches.awaited[number] |= self._occupancy.is_resident[number]
                    continue
                if len(jobs) >= room:
                    break
                slot = self._spare_slot()
                if slot is None:
                    break
                jobs.append(self._place(number, slot, is_prefetch=True))
            self._loads.start(jobs)
            return len(jobs)

    def scan(self, layer: int, experts: Sequence[int], *, window: int) -> ScannedLayer:
        """Note that the pass needs nearly all experts of each layer and has come to this one, with these to compute.

        Until the next pass eviction looks ahead, and keeps all slots but `window` for what later passes will find.
        """
        with self._changed:
            self._victims.scan_at(layer, num_kept=self.num_slots - window)
            first = layer * self.num_experts
            rank = {expert: place for place, expert in enumerate(self._victims.best_first(layer))}
            resident = [expert for expert in experts if self._occupancy.is_resident[first + expert]]
            absent = [expert for expert in experts if not self._occupancy.is_resident[first + expert]]
            found = ScannedLayer(
                kept=[expert for expert in resident if not self._prefetches.awaited[first + expert]],
                read_ahead=[expert for expert in resident if self._prefetches.awaited[first + expert]],
                absent=sorted(absent, key=lambda expert: (self._occupancy.slots[first + expert] < 0, rank[expert])),
            )
            self._drop_wrong_prefetches(layer, [first + expert for expert in experts])
            return found

    def read_ahead(self, at_most: int) -> None:
        """Start loading what a scan comes to next, the best by the policy first, until so many lie there unused."""
        with self._changed:
            assert self._victims.scan is not None
            room = at_most - int(self._prefetches.awaited.sum())
            jobs: list[LoadJob] = []
            for layer in range(self._victims.scan.layer + 1, self._num_layers):
                if len(jobs) >= room:
                    break
                for expert in self._victims.best_first(layer):
                    number = layer * self.num_experts + expert
                    if self._occupancy.slots[number] >= 0:
                        continue
                    slot = self._spare_slot() if len(jobs) < room else None
                    if slot is None:
                        room = 0
                        break
                    jobs.append(self._place(number, slot, is_prefetch=True))
            self._loads.start(jobs)

    @property
    def slot_table(self) -> NDArray[np.int32]:
        """The slot of each expert, or what `slot_table.py` says of those without: [layers, experts], read-only."""
        return self._occupancy.table.slots

    def begin_read(self) -> bool:
        """Bring the table up to date and evict nobody until `end_read`; return whether an expert is absent."""
        with self._changed:
            self._occupancy.table.publish()
            self._is_read = True
            return self._occupancy.table.has_absent

    def end_read(self, first_layer: int, topk_ids: NDArray[np.int64]) -> None:
        """Count what kernels found in the table on their way through layers: as many as `topk_ids` [layers, T, K] has.

        Takes the place of a lease on the experts of each of them.
        """
        size, end_layer = self.num_experts, first_layer + len(topk_ids)
        is_used = np.zeros(self._num_layers * size, bool)
        is_used[topk_ids + self._first_numbers[first_layer:end_layer]] = True
        numbers = np.flatnonzero(is_used)
        with self._changed:
            self._is_read = False
            self._stats.hits += len(numbers)
            self._victims.on_use(numbers)
            self._prefetches.on_uses(numbers)
            self._drop_prefetches(first_layer * size, end_layer * size)
            self._changed.notify_all()

    def resize(self, num_slots: int, move: Callable[[int, int], None]) -> int:
        """Use so many slots, or as few as leases allow; return how many are used now.

        The worst experts by the policy leave. Those that stay and whose slots go are moved, by `move(from, to)`.

        Blocks: while loads that have begun and that nobody waits for write into slots that go.
        """
        with self._changed:
            if num_slots < self.num_slots:
                self._shrink(num_slots, move)
            else:
                self._occupancy.grow(num_slots)
            return self.num_slots

    def stats(self) -> CacheStats:
        """Return the counters as they are now."""
        with self._changed:
            return replace(self._stats)

    @property
    def stall_s(self) -> float:
        """How long passes have waited for loads, in seconds."""
        return self._stats.stall_s

    @property
    def num_resident(self) -> int:
        """How many experts are resident."""
        with self._changed:
            return self._occupancy.num_taken - len(self._loads.jobs)

    @property
    def num_filled(self) -> int:
        """How many slots have held an expert since they came into use: their memory is taken."""
        with self._changed:
            return self._occupancy.num_filled

    def slot_of(self, layer: int, expert: int) -> int | None:
        """Return an expert's slot if it is resident."""
        number = layer * self.num_experts + expert
        with self._changed:
            return self._occupancy.slots[number] if self._occupancy.is_resident[number] else None

    def drain(self) -> None:
        """Cancel what nobody waits for and wait for the rest; then nothing is written into slots any more."""
        with self._changed:
            self._loads.cancel_unleased()
            self._changed.wait_for(lambda: not self._loads.jobs)

    def check_integrity(self) -> None:
        """Prove that slots, leases and loads agree; for tests."""
        with self._changed:
            self._occupancy.check_integrity()
            table = self.slot_table.ravel().tolist()
            for number, slot in enumerate(self._occupancy.slots):
                is_resident = self._occupancy.is_resident[number]
                assert (number in self._loads.jobs) == (slot >= 0 and not is_resident)
                assert not self._is_read or table[number] < 0 or (is_resident and table[number] == slot)

    # Below, the lock is held.

    def _load_absent(self, numbers: Sequence[int]) -> dict[int, LoadJob]:
        """Count hits and misses, find slots for the absent and start their loads; return all loads to wait for."""
        absent = []
        jobs = {}
        for number in numbers:
            job = self._loads.jobs.get(number)
            if self._occupancy.is_resident[number]:
                self._stats.hits += 1
                self._prefetches.on_use(number)
            elif job is not None and not (job.is_prefetch and not job.is_joined and self._loads.cancel(job)):
                self._stats.late += 1
                job.is_joined = job.is_prefetch
                jobs[number] = job
            else:  # perhaps because its prefetch waited in the queue: demand goes first
                self._stats.misses += 1
                absent.append(number)
        if absent:
            jobs |= self._load_now(absent)
        return jobs

    def _load_now(self, numbers: Sequence[int]) -> dict[int, LoadJob]:
        """Start loads and return them; another thread may start the same ones while this one waits for a slot."""
        jobs = {}
        placed = []
        try:
            for number in numbers:
                slot = self._find_slot()
                if self._occupancy.slots[number] < 0:
                    jobs[number] = self._place(number, slot, is_prefetch=False)
                    placed.append(jobs[number])
                    continue
                self._occupancy.give_back(slot)
                if number in self._loads.jobs:
                    jobs[number] = self._loads.jobs[number]
                    jobs[number].is_joined = jobs[number].is_prefetch
        except BaseException:
            self._loads.abandon(placed)
            raise
        self._loads.start(placed)
        return jobs

    def _find_slot(self) -> int:
        """Return a slot for what a pass needs. Raises: CapacityError if leases have all."""
        while (slot := self._occupancy.take_free()) is None:
            if self._is_read:
                self._wait_for_change()
                continue
            slot = self._evict(for_demand=True)
            if slot is not None:
                return slot
            if self._loads.cancel_unleased():
                continue
            if all(self._occupancy.num_leases[number] for number in self._loads.jobs):
                raise CapacityError(
                    f"all {self.num_slots} slots for experts are in use, and one more is needed. Raise the memory "
                    "limit (--memory), or take a smaller weight format"
                )
            self._wait_for_change()
        return slot

    def _spare_slot(self) -> int | None:
        """Return a slot for a prefetch; None if all are of more use as they are."""
        slot = self._occupancy.take_free()
        return self._evict(for_demand=False) if slot is None else slot

    def _evict(self, *, for_demand: bool) -> int | None:
        """Free a slot and return it; None if nobody may go, or kernels may be reading any."""
        if self._is_read:
            return None
        number = self._victims.choose(self._occupancy, self._prefetches.awaited, for_demand=for_demand)
        if number is None:
            return None
        self._stats.evictions += 1
        self._prefetches.on_eviction(number)
        return self._occupancy.vacate(number)

    def _place(self, number: int, slot: int, *, is_prefetch: bool) -> LoadJob:
        self._victims.on_load(number)
        return self._loads.place(number, slot, is_prefetch=is_prefetch)

    def _shrink(self, num_slots: int, move: Callable[[int, int], None]) -> None:
        """Empty the slots from `num_slots` on, but for those that leases hold."""
        occupancy = self._occupancy
        self._loads.cancel_unleased()
        while self._is_read or any(
            job.slot >= num_slots and not occupancy.num_leases[job.expert] for job in self._loads.jobs.values()
        ):
            self._wait_for_change()
        num_slots = occupancy.min_size(num_slots)
        while occupancy.num_taken > num_slots:
            slot = self._evict(for_demand=True)
            assert slot is not None, "all but leased experts and loads that nobody waits for can be evicted"
            occupancy.give_back(slot)
        occupancy.shrink(num_slots, move)

    def _drop_wrong_prefetches(self, layer: int, needed: Sequence[int]) -> None:
        """A pass has reached the layer: what was prefetched for it has proved right or wrong."""
        self._drop_prefetches(layer * self.num_experts, (layer + 1) * self.num_experts, needed)

    def _drop_prefetches(self, first: int, end: int, needed: Sequence[int] = ()) -> None:
        """Forget that prefetches for experts of these numbers were hoped for; cancel those that are not needed."""
        self._prefetches.awaited[first:end] = False
        self._loads.cancel_wrong(first, end, needed)

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._occupancy.unlease(number) and number in self._loads.jobs:
                self._loads.cancel(self._loads.jobs[number])
        self._changed.notify_all()

    def _wait_for_change(self) -> None:
        start = time.perf_counter()
        self._wait(self._changed)
        self._stats.stall_s += time.perf_counter() - start

    # Called from elsewhere, without the lock.

    def wait_for_any(self, jobs: Sequence[LoadJob]) -> None:
        """Wait until one of the loads is done, well or badly."""
        with self._changed:
            while not any(job.is_done for job in jobs):
                self._wait_for_change()

    def release(self, numbers: Sequence[int]) -> None:
        """End a lease; loads that it alone wanted are cancelled if they have not begun."""
        with self._changed:
            self._release(numbers)
