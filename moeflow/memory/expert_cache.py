"""Which experts are resident, and in which slots: hits at once, misses loaded, what a pass uses never evicted.

A pass takes a *lease* on the experts of a layer that its tokens chose. Until it ends, their slots are theirs. Loads are
done by others, in other threads (`StartLoads`); here it is decided what to load where, and who waits. Prefetches take
a slot only from experts that nobody uses and never one from another prefetch that may still prove right. Nothing of
this changes what is computed, only when.

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

from moeflow.core.errors import CapacityError, StorageError
from moeflow.memory.cache_stats import CacheStats
from moeflow.memory.eviction import EvictionPolicy, choose_victim
from moeflow.memory.lease import Lease
from moeflow.memory.load_job import LoadJob, StartLoads
from moeflow.memory.scan import Scan
from moeflow.memory.slot_table import ABSENT, LOADING, SlotTable


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
        self.num_slots = num_slots
        self.num_experts = num_experts  # of a layer
        self._num_layers = num_layers
        self._slab_bytes = slab_bytes
        self._policy = policy
        self._start_loads = start_loads
        self._max_prefetches = max_prefetches
        self._wait = wait
        total = num_layers * num_experts
        self._slots: list[int] = [-1] * total  # of those resident or loading
        self._num_leases: list[int] = [0] * total
        self._is_resident: list[bool] = [False] * total
        self._jobs: dict[int, LoadJob] = {}  # of those loading
        self._evictable = np.zeros(total, bool)  # resident and without a lease
        self._awaited = np.zeros(total, bool)  # prefetched for a layer that no pass has reached since
        self._unused: set[int] = set()  # prefetched and not needed so far
        self._held = np.zeros(num_layers, np.int64)  # slots of each layer
        self._scan: Scan | None = None  # of a pass that needs nearly all experts
        self._free = list(range(num_slots - 1, -1, -1))
        self._filled = bytearray(num_slots)  # 1 for slots that have held an expert
        self._first_numbers = np.arange(0, total, num_experts).reshape(-1, 1, 1)  # of each layer
        self._table = SlotTable(num_layers, num_experts)
        self._is_read = False  # the table, by kernels
        self._now = 0
        self._stats = CacheStats()
        self._changed = threading.Condition()  # its lock may be taken again by who has it

    def begin_pass(self) -> None:
        """Count a pass: the unit of age for policies."""
        with self._changed:
            self._now += 1
            self._scan = None

    def acquire(self, layer: int, experts: Sequence[int]) -> Lease:
        """Take a lease on distinct experts of a layer; those that are absent start loading.

        Where a pass needs more than there are slots, it takes them in portions, each before it computes on the last.

        Blocks: while all other slots are taken by prefetches that have begun.
        Raises: CapacityError if leases leave too few slots.
        """
        numbers = [layer * self.num_experts + expert for expert in experts]
        with self._changed:
            if self._scan is None:
                self._drop_wrong_prefetches(layer, numbers)
            self._policy.on_use(np.array(numbers, np.int64), self._now)
            for number in numbers:
                self._num_leases[number] += 1
                self._evictable[number] = False
            try:
                jobs = self._load_absent(numbers)
            except BaseException:
                self._release(numbers)
                raise
            slots = [jobs[number].slot if number in jobs else self._slots[number] for number in numbers]
        pending = {expert: jobs[number] for expert, number in zip(experts, numbers, strict=True) if number in jobs}
        return Lease(self, numbers, dict(zip(experts, slots, strict=True)), pending)

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        """Start loading experts that a layer will probably need, likeliest first; return how many were started."""
        with self._changed:
            jobs: list[LoadJob] = []
            room = self._max_prefetches - sum(job.is_prefetch for job in self._jobs.values())
            for expert in experts:
                number = layer * self.num_experts + expert
                if self._slots[number] >= 0:
                    self._awaited[number] |= self._is_resident[number]
                    continue
                if len(jobs) >= room:
                    break
                slot = self._spare_slot()
                if slot is None:
                    break
                jobs.append(self._place(number, slot, is_prefetch=True))
            self._start(jobs)
            return len(jobs)

    def scan(self, layer: int, experts: Sequence[int], *, window: int) -> ScannedLayer:
        """Note that the pass needs nearly all experts of each layer and has come to this one, with these to compute.

        Until the next pass eviction looks ahead, and keeps all slots but `window` for what later passes will find.
        """
        with self._changed:
            if self._scan is None:
                self._scan = Scan(self._num_layers, self.num_experts, num_kept=self.num_slots - window)
            self._scan.layer = layer
            first = layer * self.num_experts
            rank = {expert: place for place, expert in enumerate(self._best_first(layer))}
            resident = [expert for expert in experts if self._is_resident[first + expert]]
            absent = [expert for expert in experts if not self._is_resident[first + expert]]
            found = ScannedLayer(
                kept=[expert for expert in resident if not self._awaited[first + expert]],
                read_ahead=[expert for expert in resident if self._awaited[first + expert]],
                absent=sorted(absent, key=lambda expert: (self._slots[first + expert] < 0, rank[expert])),
            )
            self._drop_wrong_prefetches(layer, [first + expert for expert in experts])
            return found

    def read_ahead(self, at_most: int) -> None:
        """Start loading what a scan comes to next, the best by the policy first, until so many lie there unused."""
        with self._changed:
            assert self._scan is not None
            room = at_most - int(self._awaited.sum())
            jobs: list[LoadJob] = []
            for layer in range(self._scan.layer + 1, self._num_layers):
                if len(jobs) >= room:
                    break
                for expert in self._best_first(layer):
                    number = layer * self.num_experts + expert
                    if self._slots[number] >= 0:
                        continue
                    slot = self._spare_slot() if len(jobs) < room else None
                    if slot is None:
                        room = 0
                        break
                    jobs.append(self._place(number, slot, is_prefetch=True))
            self._start(jobs)

    @property
    def slot_table(self) -> NDArray[np.int32]:
        """The slot of each expert, or what `slot_table.py` says of those without: [layers, experts], read-only."""
        return self._table.slots

    def begin_read(self) -> bool:
        """Bring the table up to date and evict nobody until `end_read`; return whether an expert is absent."""
        with self._changed:
            self._table.publish()
            self._is_read = True
            return self._table.has_absent

    def end_read(self, first_layer: int, topk_ids: NDArray[np.int64]) -> None:
        """Count what kernels found in the table on their way through layers: as many as `topk_ids` [layers, T, K] has.

        Takes the place of a lease on the experts of each of them.
        """
        size, end_layer = self.num_experts, first_layer + len(topk_ids)
        is_used = np.zeros(len(self._evictable), bool)
        is_used[topk_ids + self._first_numbers[first_layer:end_layer]] = True
        numbers = np.flatnonzero(is_used)
        with self._changed:
            self._is_read = False
            self._stats.hits += len(numbers)
            self._policy.on_use(numbers, self._now)
            if self._unused:
                for number in self._unused.intersection(numbers.tolist()):
                    self._note_used(number)
            self._drop_prefetches(first_layer * size, end_layer * size)
            self._changed.notify_all()

    def resize(self, num_slots: int, move: Callable[[int, int], None]) -> int:
        """Use so many slots, or as few as leases allow; return how many are used now.

        The worst experts by the policy leave. Those that stay and whose slots go are moved, by `move(from, to)`.

        Blocks: while loads that have begun and that nobody waits for write into slots that go.
        """
        with self._changed:
            if num_slots < self.num_slots:
                num_slots = self._shrink(num_slots, move)
            else:
                self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
                self._filled.extend(bytes(num_slots - self.num_slots))
            self.num_slots = num_slots
            return num_slots

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
            return self.num_slots - len(self._free) - len(self._jobs)

    @property
    def num_filled(self) -> int:
        """How many slots have held an expert since they came into use: their memory is taken."""
        with self._changed:
            return self._filled.count(1)

    def slot_of(self, layer: int, expert: int) -> int | None:
        """Return an expert's slot if it is resident."""
        number = layer * self.num_experts + expert
        with self._changed:
            return self._slots[number] if self._is_resident[number] else None

    def drain(self) -> None:
        """Cancel what nobody waits for and wait for the rest; then nothing is written into slots any more."""
        with self._changed:
            self._cancel_idle()
            self._changed.wait_for(lambda: not self._jobs)

    def check_integrity(self) -> None:
        """Prove that slots, leases and loads agree; for tests."""
        with self._changed:
            taken = [slot for slot in self._slots if slot >= 0]
            assert sorted(taken + self._free) == list(range(self.num_slots))
            for number, slot in enumerate(self._slots):
                is_resident, is_loading = self._is_resident[number], number in self._jobs
                assert (slot >= 0) == (is_resident or is_loading)
                assert not (is_resident and is_loading)
                assert self._num_leases[number] >= 0
                assert bool(self._evictable[number]) == (is_resident and not self._num_leases[number])
            table = self._table.slots.ravel().tolist()
            for number, slot in enumerate(self._slots):
                now = slot if self._is_resident[number] else LOADING if slot >= 0 else ABSENT
                assert self._table.noted(number) == now
                assert not self._is_read or table[number] < 0 or table[number] == now
            held = [slot >= 0 for slot in self._slots]
            assert np.reshape(held, (self._num_layers, -1)).sum(axis=1).tolist() == self._held.tolist()

    # Below, the lock is held.

    def _load_absent(self, numbers: Sequence[int]) -> dict[int, LoadJob]:
        """Count hits and misses, find slots for the absent and start their loads; return all loads to wait for."""
        absent = []
        jobs = {}
        for number in numbers:
            job = self._jobs.get(number)
            if self._is_resident[number]:
                self._stats.hits += 1
                self._note_used(number)
            elif job is not None and not (job.is_prefetch and not job.is_joined and self._cancel(job)):
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
                if self._slots[number] < 0:
                    jobs[number] = self._place(number, slot, is_prefetch=False)
                    placed.append(jobs[number])
                    continue
                self._free.append(slot)
                if number in self._jobs:
                    jobs[number] = self._jobs[number]
                    jobs[number].is_joined = jobs[number].is_prefetch
        except BaseException:
            self._abandon(placed)
            raise
        self._start(placed)
        return jobs

    def _find_slot(self) -> int:
        while not self._free:
            if self._is_read:
                self._wait_for_change()
                continue
            preferred = self._evictable & ~self._awaited
            slot = self._evict(preferred if preferred.any() else self._evictable, for_demand=True)
            if slot is not None:
                return slot
            if self._cancel_idle():
                break
            if all(self._num_leases[number] for number in self._jobs):
                raise CapacityError(
                    f"all {self.num_slots} slots for experts are in use, and one more is needed. Raise the memory "
                    "limit (--memory), or take a smaller weight format"
                )
            self._wait_for_change()
        return self._free.pop()

    def _spare_slot(self) -> int | None:
        """Return a slot for a prefetch; None if all are of more use as they are."""
        return self._free.pop() if self._free else self._evict(self._evictable & ~self._awaited, for_demand=False)

    def _best_first(self, layer: int) -> list[int]:
        """Return a layer's experts, the worthiest first, of equal ones as they lie on disk."""
        first, end = layer * self.num_experts, (layer + 1) * self.num_experts
        order: list[int] = np.argsort(-self._policy.scores(self._now)[first:end], kind="stable").tolist()
        return order

    def _cancel_idle(self) -> bool:
        """Cancel the loads that nobody waits for and that have not begun."""
        idle = [job for number, job in self._jobs.items() if not self._num_leases[number]]
        return any([self._cancel(job) for job in idle])

    def _evict(self, candidates: NDArray[np.bool_], *, for_demand: bool) -> int | None:
        """Free the slot of a candidate and return it; None if there is none, or kernels may be reading any."""
        number = None if self._is_read else self._victim(candidates, for_demand=for_demand)
        if number is None:
            return None
        self._stats.evictions += 1
        if number in self._unused:
            self._unused.remove(number)
            self._stats.wasted_bytes += self._slab_bytes
        self._is_resident[number] = False
        self._evictable[number] = self._awaited[number] = False
        return self._take_slot(number)

    def _victim(self, candidates: NDArray[np.bool_], *, for_demand: bool) -> int | None:
        if not candidates.any():
            return None
        if self._scan is None:
            return choose_victim(self._policy, candidates, self._now)
        return self._scan.victim(candidates, self._held, self._policy.scores(self._now), for_demand=for_demand)

    def _place(self, number: int, slot: int, *, is_prefetch: bool) -> LoadJob:
        job = LoadJob(number, slot, is_prefetch=is_prefetch)
        self._jobs[number] = job
        self._slots[number] = slot
        self._table.note(number, LOADING)
        self._held[number // self.num_experts] += 1
        self._awaited[number] = is_prefetch
        self._policy.on_load(number)
        return job

    def _start(self, jobs: Sequence[LoadJob]) -> None:
        if not jobs:
            return
        try:
            handles = self._start_loads(jobs, self._on_done)
        except BaseException:
            self._abandon(jobs)
            raise
        for job, handle in zip(jobs, handles, strict=True):
            job.handle = handle

    def _abandon(self, jobs: Sequence[LoadJob]) -> None:
        """Take back loads that were never started; another pass may wait for them already."""
        for job in jobs:
            job.error = StorageError("a load was given up together with the pass that wanted it")
            job.is_done = True
            self._forget(job)

    def _cancel(self, job: LoadJob) -> bool:
        """Take a load back, if it has not begun, and free its slot."""
        if job.handle is None or not job.handle.cancel():
            return False
        self._stats.cancelled_loads += 1
        self._forget(job)
        return True

    def _forget(self, job: LoadJob) -> None:
        del self._jobs[job.expert]
        self._awaited[job.expert] = False
        self._free.append(self._take_slot(job.expert))
        self._changed.notify_all()

    def _shrink(self, num_slots: int, move: Callable[[int, int], None]) -> int:
        """Empty the slots from `num_slots` on, but for those that leases hold, and return how many are left."""
        self._cancel_idle()
        while self._is_read or any(
            job.slot >= num_slots and not self._num_leases[job.expert] for job in self._jobs.values()
        ):
            self._wait_for_change()
        leased = [slot for slot, leases in zip(self._slots, self._num_leases, strict=True) if slot >= 0 and leases]
        num_slots = max([num_slots, *(slot + 1 for slot in leased)])
        while self.num_slots - len(self._free) > num_slots:
            preferred = self._evictable & ~self._awaited
            slot = self._evict(preferred if preferred.any() else self._evictable, for_demand=True)
            assert slot is not None, "all but leased experts and loads that nobody waits for can be evicted"
            self._free.append(slot)
        self._free = [slot for slot in self._free if slot < num_slots]
        for number, slot in enumerate(self._slots):
            if slot >= num_slots:
                self._slots[number] = self._free.pop()
                self._filled[self._slots[number]] = 1
                self._table.note(number, self._slots[number])
                move(slot, self._slots[number])
        del self._filled[num_slots:]
        return num_slots

    def _take_slot(self, number: int) -> int:
        slot, self._slots[number] = self._slots[number], -1
        self._table.note(number, ABSENT)
        self._held[number // self.num_experts] -= 1
        return slot

    def _drop_wrong_prefetches(self, layer: int, needed: Sequence[int]) -> None:
        """A pass has reached the layer: what was prefetched for it has proved right or wrong."""
        self._drop_prefetches(layer * self.num_experts, (layer + 1) * self.num_experts, needed)

    def _drop_prefetches(self, first: int, end: int, needed: Sequence[int] = ()) -> None:
        """Forget that prefetches for experts of these numbers were hoped for; cancel those that are not needed."""
        self._awaited[first:end] = False
        if not self._jobs:
            return
        wrong = [job for number, job in self._jobs.items() if first <= number < end and number not in needed]
        for job in wrong:
            if job.is_prefetch and not job.is_joined:
                self._cancel(job)

    def _note_used(self, number: int) -> None:
        if number in self._unused:
            self._unused.remove(number)
            self._stats.used_bytes += self._slab_bytes

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._num_leases[number] -= 1
            if self._num_leases[number]:
                continue
            self._evictable[number] = self._is_resident[number]
            if number in self._jobs:
                self._cancel(self._jobs[number])
        self._changed.notify_all()

    def _wait_for_change(self) -> None:
        start = time.perf_counter()
        self._wait(self._changed)
        self._stats.stall_s += time.perf_counter() - start

    # Called from elsewhere, without the lock.

    def _on_done(self, job: LoadJob, error: Exception | None) -> None:
        number = job.expert
        with self._changed:
            job.error, job.is_done = error, True  # in this order: leases look without the lock
            if error is not None:
                self._stats.failed_loads += 1
                self._forget(job)
                return
            del self._jobs[number]
            self._is_resident[number] = True
            self._filled[job.slot] = 1
            self._table.note(number, job.slot)
            self._evictable[number] = not self._num_leases[number]
            if not job.is_prefetch:
                self._stats.demand_bytes += self._slab_bytes
            else:
                self._stats.prefetched_bytes += self._slab_bytes
                self._unused.add(number)
                if job.is_joined:
                    self._note_used(number)
            self._changed.notify_all()

    def wait_for_any(self, jobs: Sequence[LoadJob]) -> None:
        """Wait until one of the loads is done, well or badly."""
        with self._changed:
            while not any(job.is_done for job in jobs):
                self._wait_for_change()

    def release(self, numbers: Sequence[int]) -> None:
        """End a lease; loads that it alone wanted are cancelled if they have not begun."""
        with self._changed:
            self._release(numbers)
