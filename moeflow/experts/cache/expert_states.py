"""The state of each expert: one record per expert, and one class that makes every change to them.

The class keeps the invariants. A slot is free or taken by one expert. A leased expert keeps its slot. Each byte read
is counted once. The class knows no policy and no lock; callers hold the cache's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import StorageError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.load_job import LoadJob

ABSENT: Final = -1
LOADING: Final = -2  # both as in csrc/ops/ops.h


@dataclass(slots=True, eq=False)
class ExpertState:
    """One expert. It can be evicted while it is resident and has no lease. Only `ExpertStates` writes the fields."""

    number: int  # over all layers, as in the file
    slot: int = ABSENT  # while resident; otherwise ABSENT or LOADING
    load: LoadJob | None = None  # while LOADING; its slot is taken already
    num_leases: int = 0
    is_unused: bool = False  # prefetched, and not yet needed by a pass

    @property
    def taken_slot(self) -> int:
        """The slot of a resident or loading expert; otherwise ABSENT."""
        return self.slot if self.load is None else self.load.slot


class ExpertStates:
    """The experts of all layers, by their numbers, and the slots that they share."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        *,
        slab_bytes: int,
        stats: CacheStats,
        on_dropped: Callable[[], object],
    ) -> None:
        """Start with empty slots; `num_experts` is the number in a layer.

        `stats` counts loads, evictions and bytes. `on_dropped` is called when a load ends without effect.
        """
        total = num_layers * num_experts
        self.all = [ExpertState(number) for number in range(total)]
        self.num_slots = num_slots
        self.loads: dict[int, LoadJob] = {}  # of the experts that are LOADING, in the order they were begun
        # Arrays: the choice of a victim reads the values of all experts at once.
        self.evictable = np.zeros(total, bool)
        self.awaited = np.zeros(total, bool)  # predicted for a layer that no pass has reached since
        self.present = np.zeros(total, bool)  # resident, or being loaded
        self.num_held = np.zeros(num_layers, np.int64)  # slots taken by each layer
        # Kernels read the table without a lock: experts leave it in `publish` only, but may enter it at any time.
        self.table = np.full((num_layers, num_experts), ABSENT, np.int32)  # at a fixed address
        self._table_by_number = self.table.reshape(-1)
        self._unpublished: set[int] = set()
        self._has_absent = True  # in the table
        self._num_experts = num_experts
        self._free = list(range(num_slots - 1, -1, -1))
        self._filled = bytearray(num_slots)  # 1 for slots that have held an expert
        self._num_unused = 0
        self._slab_bytes = slab_bytes
        self._stats = stats
        self._on_dropped = on_dropped

    @property
    def num_taken(self) -> int:
        """How many slots are not free."""
        return self.num_slots - len(self._free)

    @property
    def num_resident(self) -> int:
        """How many experts are resident."""
        return self.num_taken - len(self.loads)

    @property
    def num_filled(self) -> int:
        """How many slots have held an expert."""
        return self._filled.count(1)

    @property
    def num_prefetches(self) -> int:
        """How many loads under way began as prefetches."""
        return sum(job.is_prefetch for job in self.loads.values())

    def take_free(self) -> int | None:
        """Take a free slot; None if there is none."""
        return self._free.pop() if self._free else None

    def last_free(self, at_most: int) -> list[int]:
        """Return at most `at_most` free slots. `take_free` takes the last one next."""
        return self._free[-at_most:] if at_most else []

    def take(self, slot: int) -> None:
        """Take this free slot, usually one of the last."""
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place] == slot:
                del self._free[place]
                return
        raise ValueError(f"slot {slot} is not free")

    def give_back(self, slot: int) -> None:
        """Make an empty slot free."""
        self._free.append(slot)

    # Loads.

    def begin_load(self, number: int, slot: int, *, is_prefetch: bool) -> LoadJob:
        """Return a job that loads an absent expert into a slot taken for it; the caller starts the job."""
        state = self.all[number]
        job = state.load = self.loads[number] = LoadJob(number, slot, is_prefetch=is_prefetch)
        self._move(state, LOADING)
        self.awaited[number] = is_prefetch
        self.num_held[number // self._num_experts] += 1
        return job

    def end_load(self, job: LoadJob, error: Exception | None) -> None:
        """Make the expert resident, or absent if there was an error."""
        job.error, job.is_done = error, True  # in this order: leases read them without the lock
        if error is not None:
            self._stats.failed_loads += 1
            self._drop(job)
            return
        state = self._take_load(job)
        self._move(state, job.slot)
        self._table_by_number[state.number] = job.slot  # running kernels find it from now on
        self._filled[job.slot] = 1
        self.evictable[state.number] = not state.num_leases
        if job.is_prefetch:
            self._stats.prefetched_bytes += self._slab_bytes
            state.is_unused = True
            self._num_unused += 1
            if job.is_joined:
                self.use(state)
        else:
            self._stats.demand_bytes += self._slab_bytes

    def abandon(self, jobs: Sequence[LoadJob]) -> None:
        """End unstarted loads with an error, since another pass may wait for them already."""
        for job in jobs:
            job.error = StorageError("the load was abandoned after its pass failed")
            job.is_done = True
            self._drop(job)

    def cancel(self, job: LoadJob) -> bool:
        """Cancel a load if it has not begun; return whether it was cancelled."""
        if job.handle is None or not job.handle.cancel():
            return False
        self.drop_cancelled(job)
        return True

    def drop_cancelled(self, job: LoadJob) -> None:
        """Count a cancelled load."""
        self._stats.cancelled_loads += 1
        self._drop(job)

    def cancel_unleased(self) -> bool:
        """Cancel queued loads without a lease; return whether there were any."""
        idle = [job for number, job in self.loads.items() if not self.all[number].num_leases]
        return any([self.cancel(job) for job in idle])

    def end_prefetches(self, first: int, end: int, needed: Collection[int]) -> None:
        """Await none of these experts, since a pass has reached them, and cancel prefetches of experts not needed."""
        self.awaited[first:end] = False
        if not self.loads:
            return
        for job in [job for number, job in self.loads.items() if first <= number < end and number not in needed]:
            if job.is_prefetch and not job.is_joined:
                self.cancel(job)

    def _drop(self, job: LoadJob) -> None:
        """Make an expert absent after its load failed or was cancelled."""
        self._vacate(self._take_load(job))
        self.give_back(job.slot)
        self._on_dropped()

    def _take_load(self, job: LoadJob) -> ExpertState:
        del self.loads[job.expert]
        state = self.all[job.expert]
        state.load = None
        return state

    # Leases and uses.

    def lease(self, state: ExpertState) -> None:
        """Add a lease."""
        state.num_leases += 1
        self.evictable[state.number] = False

    def unlease(self, state: ExpertState) -> bool:
        """Remove a lease; return whether it was the last."""
        state.num_leases -= 1
        if state.num_leases:
            return False
        self.evictable[state.number] = state.slot >= 0
        return True

    def expect(self, state: ExpertState) -> None:
        """Await a resident expert, which a pass probably needs."""
        self.awaited[state.number] = True

    def use(self, state: ExpertState) -> None:
        """Count the first use of a prefetched expert."""
        if state.is_unused:
            state.is_unused = False
            self._num_unused -= 1
            self._stats.used_bytes += self._slab_bytes

    def use_all(self, numbers: NDArray[np.int64]) -> None:
        """Count the first uses of prefetched experts among these."""
        if self._num_unused:
            for number in numbers.tolist():
                self.use(self.all[number])

    # Slots.

    def evict(self, number: int) -> int:
        """Make an evictable expert absent; return its slot, which is not free yet."""
        state = self.all[number]
        slot = state.slot
        self._stats.evictions += 1
        if state.is_unused:
            state.is_unused = False
            self._num_unused -= 1
            self._stats.wasted_bytes += self._slab_bytes
        self._vacate(state)
        return slot

    def _vacate(self, state: ExpertState) -> None:
        self._move(state, ABSENT)
        self.evictable[state.number] = False
        self.awaited[state.number] = False
        self.num_held[state.number // self._num_experts] -= 1

    def _move(self, state: ExpertState, slot: int) -> None:
        state.slot = slot
        self.present[state.number] = slot != ABSENT
        self._unpublished.add(state.number)

    def min_size(self, num_slots: int) -> int:
        """Return the least number of slots, from `num_slots` on, that keeps leased experts in place."""
        return max([num_slots, *(state.taken_slot + 1 for state in self.all if state.num_leases)])

    def grow(self, num_slots: int) -> None:
        """Add slots; the others are taken first."""
        self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
        self._filled.extend(bytes(num_slots - self.num_slots))
        self.num_slots = num_slots

    def shrink(self, num_slots: int, move: Callable[[int, int], None]) -> None:
        """Remove slots, at most as many as are free. Experts in removed slots move, by `move(from, to)`.

        No load may write into removed slots.
        """
        self._free = [slot for slot in self._free if slot < num_slots]
        for state in self.all:
            if state.slot >= num_slots:
                source, target = state.slot, self._free.pop()
                self._move(state, target)
                self._filled[target] = 1
                move(source, target)
        del self._filled[num_slots:]
        self.num_slots = num_slots

    def publish(self) -> bool:
        """Bring the table up to date; return whether an expert is absent."""
        if self._unpublished:
            self._table_by_number[list(self._unpublished)] = [self.all[number].slot for number in self._unpublished]
            self._unpublished.clear()
            self._has_absent = bool((self._table_by_number == ABSENT).any())
        return self._has_absent

    def check_integrity(self) -> None:
        """Check the invariants; for tests."""
        taken = [state.taken_slot for state in self.all if state.slot != ABSENT]
        assert sorted(taken + self._free) == list(range(self.num_slots))
        assert len(self._filled) == self.num_slots
        assert self._num_unused == sum(state.is_unused for state in self.all)
        assert self.loads == {state.number: state.load for state in self.all if state.load is not None}
        for state in self.all:
            assert (state.load is not None) == (state.slot == LOADING)
            assert state.num_leases >= 0
            assert bool(self.evictable[state.number]) == (state.slot >= 0 and not state.num_leases)
            assert bool(self.present[state.number]) == (state.slot != ABSENT)
            assert state.slot >= 0 or not state.is_unused
            assert state.slot != ABSENT or not self.awaited[state.number]
            assert state.slot < 0 or self._filled[state.slot]
            assert state.number in self._unpublished or self._table_by_number[state.number] == state.slot
        held = [state.slot != ABSENT for state in self.all]
        assert np.reshape(held, (len(self.num_held), -1)).sum(axis=1).tolist() == self.num_held.tolist()
