"""The expert cache: keeps experts in slots, loads absent ones, and never evicts experts that a pass uses.

A pass takes a *lease* on the experts of a layer that its tokens chose. Until it ends, these keep their slots.
`expert_loads.py` loads the absent ones, and prefetches. Two kinds of passes use no leases: kernels over several
layers (`kernel_reads`), and scans (`layer_scan`). The cache affects when experts compute, but no result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.eviction import EvictionPolicy, Scores
from moeflow.experts.cache.eviction_selector import EvictionSelector
from moeflow.experts.cache.expert_loads import ExpertLoads
from moeflow.experts.cache.expert_states import ABSENT, ExpertState, ExpertStates
from moeflow.experts.cache.journal import Fetcher
from moeflow.experts.cache.kernel_reads import KernelReads
from moeflow.experts.cache.layer_scan import LayerScan
from moeflow.experts.cache.lease import Lease
from moeflow.experts.cache.load_job import LoadJob, StartLoads

if TYPE_CHECKING:
    from moeflow.experts.cache.expert_needs import ExpertNeeds


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
        self.num_experts = num_experts  # of a layer
        self._max_prefetches = max_prefetches
        self._stats = CacheStats()
        self._changed = threading.Condition()
        self._states = ExpertStates(
            num_layers,
            num_experts,
            num_slots,
            slab_bytes=slab_bytes,
            stats=self._stats,
            on_dropped=self._changed.notify_all,
        )
        self._victims = EvictionSelector(policy, num_layers, num_experts)
        self._loads = ExpertLoads(
            self._states, self._victims, self._stats, self._changed, start_loads=start_loads, wait=wait
        )
        self.is_elsewhere = self._loads.is_elsewhere  # written by remote experts, too
        self.kernel_reads = KernelReads(self._loads, num_layers, num_experts, max_prefetches=max_prefetches)
        self.layer_scan = LayerScan(self._loads, num_layers, num_experts)

    def attach(self, fetcher: Fetcher) -> None:
        """Poll this fetcher for ended loads, and lend it slots while kernels run."""
        self._loads.fetcher = fetcher

    @property
    def num_slots(self) -> int:
        """How many slots are used now."""
        return self._states.num_slots

    def begin_pass(self) -> None:
        """Count a pass: the unit of age for policies."""
        with self._changed:
            self._victims.begin_pass()

    def acquire(self, layer: int, experts: Sequence[int]) -> Lease:
        """Take a lease on distinct experts of a layer, and start to load the absent ones.

        A pass that needs more experts than slots takes them in portions, each before it computes on the last.

        Blocks: while prefetches under way take all other slots.
        Raises: CapacityError if leases leave too few slots.
        """
        first = layer * self.num_experts
        numbers = [first + expert for expert in experts]
        with self._loads.up_to_date():
            if self._victims.scan is None:
                self._states.end_prefetches(first, first + self.num_experts, numbers)
            self._victims.on_use(np.array(numbers, np.int64))
            needed = [self._states.all[number] for number in numbers]
            for state in needed:
                self._states.lease(state)
            try:
                jobs = self._load_absent(needed)
            except BaseException:
                self._loads.release(needed)
                raise
            slots = [jobs[state.number].slot if state.number in jobs else state.slot for state in needed]
        pending = {expert: jobs[first + expert] for expert in experts if first + expert in jobs} if jobs else jobs
        return Lease(
            needed,
            dict(zip(experts, slots, strict=True)),
            pending,
            wait_for_any=self._wait_for_any,
            on_release=self._release,
        )

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        """Start to load experts that a layer probably needs, likeliest first; return the number of loads."""
        with self._loads.up_to_date():
            room = self._max_prefetches - self._states.num_prefetches
            return self._loads.load_ahead(self._absent_of(layer, experts), room)

    def prefetch_pass(self, numbers: Sequence[int]) -> int:
        """Start to load experts that the next pass probably needs; return the number of loads.

        `numbers` are over all layers, in the order of need. Resident experts among them are awaited first, so that none
        of them is evicted for another. Half of the slots remain as they are.
        """
        assert all(0 <= number < len(self._states.all) for number in numbers), "there are no such experts"
        with self._loads.up_to_date():
            absent = [number for number in numbers if self._is_to_load(self._states.all[number])]
            return self._loads.load_ahead(iter(absent), self.num_slots // 2 - self._states.num_prefetches)

    def use_elsewhere(self, layer: int, experts: Sequence[int]) -> None:
        """Count experts that a pass needs and that another machine computes."""
        first = layer * self.num_experts
        with self._changed:
            if self._victims.scan is None:
                self._states.end_prefetches(first, first + self.num_experts, ())
            self._victims.on_use(first + np.array(experts, np.int64))

    def leave(self, numbers: NDArray[np.bool_]) -> None:
        """Leave experts to another processor: they free their slots, and are not prefetched.

        Shapes: numbers [experts of all layers].
        """
        with self._loads.up_to_date():
            self.is_elsewhere[:] = numbers
            for number in np.flatnonzero(numbers & self._states.evictable).tolist():
                self._states.give_back(self._states.evict(number))

    def use_counts(self) -> Scores:
        """Return the decayed number of uses of each expert of all layers, since the first call."""
        with self._changed:
            return self._victims.use_counts()

    def is_there(self, first_layer: int, end_layer: int) -> NDArray[np.bool_]:
        """Return the experts of some layers that are resident or loading: [layers, experts]."""
        first, end = first_layer * self.num_experts, end_layer * self.num_experts
        with self._loads.up_to_date():
            return self._states.present[first:end].reshape(-1, self.num_experts).copy()

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free."""
        with self._loads.up_to_date():
            return self._states.num_taken < self.num_slots

    def resize(self, num_slots: int, move: Callable[[int, int], None]) -> int:
        """Use `num_slots` slots, or as few as leases allow; return the new number.

        The experts with the lowest scores are evicted. Remaining experts in removed slots move, by `move(from, to)`.

        Blocks: while loads without a lease write into slots to be removed.
        """
        with self._loads.up_to_date():
            if num_slots < self.num_slots:
                self._loads.shrink(num_slots, move)
            else:
                self._states.grow(num_slots)
            return self.num_slots

    def are_resident(self) -> NDArray[np.bool_]:
        """Return which experts have a slot with their weights: [layers, experts]."""
        with self._loads.up_to_date():
            found = self._states.present.copy()
            found[list(self._states.loads)] = False
            return found.reshape(-1, self.num_experts)

    def count_needs(self, needs: ExpertNeeds | None) -> None:
        """Count there which experts passes need, from now on; None: count them no more."""
        with self._changed:
            self._loads.needs = needs

    def stats(self) -> CacheStats:
        """Return the counters as they are now."""
        with self._loads.up_to_date():
            return replace(self._stats)

    @property
    def stall_s(self) -> float:
        """Seconds that passes have waited for loads."""
        return self._stats.stall_s

    @property
    def read_bytes(self) -> int:
        """Bytes read, for passes that waited and by prediction."""
        return self._stats.demand_bytes + self._stats.prefetched_bytes

    def absent_of(self, numbers: frozenset[int]) -> frozenset[int]:
        """Return the experts among these, numbered over all layers, that are not resident."""
        with self._loads.up_to_date():
            return frozenset(number for number in numbers if self._states.all[number].slot < 0)

    @property
    def num_resident(self) -> int:
        """How many experts are resident."""
        with self._loads.up_to_date():
            return self._states.num_resident

    @property
    def has_absent(self) -> bool:
        """Whether some expert is not resident."""
        return self.num_resident < len(self._states.all)

    @property
    def num_filled(self) -> int:
        """How many slots have held an expert: their memory is allocated."""
        with self._loads.up_to_date():
            return self._states.num_filled

    def slot_of(self, layer: int, expert: int) -> int | None:
        """Return an expert's slot if it is resident."""
        with self._loads.up_to_date():
            slot = self._states.all[layer * self.num_experts + expert].slot
            return slot if slot >= 0 else None

    def drain(self) -> None:
        """Cancel loads without a lease, and wait for the others. Nothing writes into slots afterwards."""
        with self._changed:
            self._states.cancel_unleased()
            while self._states.loads:
                self._loads.wait_for_load()

    def check_integrity(self) -> None:
        """Check that slots, leases and loads agree; for tests."""
        with self._changed:
            self._states.check_integrity()
            if self._loads.is_read:
                for state, slot in zip(self._states.all, self.kernel_reads.slot_table.ravel().tolist(), strict=True):
                    assert slot < 0 or state.slot == slot

    def _load_absent(self, needed: Sequence[ExpertState]) -> dict[int, LoadJob]:
        """Count hits and misses, start loads of absent experts; return all loads to wait for."""
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
            else:  # absent, or a queued prefetch was cancelled: demand goes first
                self._stats.misses += 1
                absent.append(state)
        if self._loads.needs is not None:
            missed = {state.number for state in absent}.union(jobs)
            self._loads.needs.add(np.array([state.number for state in needed], np.int64), missed)
        if absent:
            jobs |= self._loads.load(absent)
        return jobs

    def _absent_of(self, layer: int, experts: Sequence[int]) -> Iterator[int]:
        """Yield the numbers of the absent experts of a layer, and await the resident ones."""
        for expert in experts:
            state = self._states.all[layer * self.num_experts + expert]
            if self._is_to_load(state):
                yield state.number

    def _is_to_load(self, state: ExpertState) -> bool:
        """Return whether to load a predicted expert; await it if it is resident."""
        if state.slot >= 0:
            self._states.expect(state)
        return state.slot == ABSENT and not self.is_elsewhere[state.number]

    def _wait_for_any(self, jobs: Sequence[LoadJob]) -> None:
        """Wait until one of the loads ends, with or without an error."""
        with self._changed:
            while not any(job.is_done for job in jobs):
                self._loads.wait_for_change()

    def _release(self, held: Sequence[ExpertState]) -> None:
        """End a lease; cancel queued loads that no other lease waits for."""
        with self._changed:
            self._loads.release(held)
