"""Kernels over several layers: they take no lease, but look resident experts up in a table.

Between `begin` and `end`, Python evicts nothing. The cache may lend slots to the kernels, which fill them in the order
that it decided. A journal records their steps, and `end` repeats these on the cache's records.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.expert_loads import ExpertLoads
from moeflow.experts.cache.journal import NO_EVENTS, Event, Fetcher, SlotJournal


class KernelReads:
    """The slots of an expert cache as kernels see them."""

    def __init__(self, loads: ExpertLoads, num_layers: int, num_experts: int, *, max_prefetches: int) -> None:
        """`num_experts` is the number in a layer. At most `max_prefetches` are under way at once."""
        self._loads = loads
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._max_prefetches = max_prefetches
        self._first_numbers = np.arange(0, num_layers * num_experts, num_experts).reshape(-1, 1, 1)  # of each layer

    @property
    def slot_table(self) -> NDArray[np.int32]:
        """The slot of each expert, [layers, experts], read-only; ABSENT or LOADING as of the last `begin`.

        Arriving experts enter it at once.
        """
        return self._loads.states.table

    def begin(self) -> bool:
        """Update the table and evict nothing until `end`; return whether an expert is absent."""
        with self._loads.up_to_date():
            self._loads.is_read = True
            return self._loads.states.publish()

    def lend(self, at_most: int, *, max_needed: int) -> None:
        """Let the fetcher fill slots until `end`, except in a scan: free slots, then slots of experts that it evicts.

        It may evict if fewer than `at_most` slots are free, besides the slots for prefetches. It leaves layers that
        need more than `max_needed` experts to Python.
        """
        loads = self._loads
        with loads.changed:
            if loads.fetcher is None or loads.victims.scan is not None:
                return
            assert loads.is_read, "slots are lent while kernels run"
            room = max(self._max_prefetches - loads.states.num_prefetches, 0)
            free = loads.states.last_free(at_most + room)
            worth = loads.victims.worth(loads.states) if len(free) < at_most + room else None
            loads.is_lent = True
            loads.fetcher.begin(free, worth, max_prefetches=room, max_needed=max_needed)

    def end(self, first_layer: int, topk_ids: NDArray[np.int64]) -> None:
        """Count the experts that kernels used in the layers of `topk_ids` [layers, T, K], in place of leases.

        Also repeats the fetcher's journal.
        """
        end_layer = first_layer + len(topk_ids)
        is_used = np.zeros(self._num_layers * self._num_experts, bool)
        is_used[topk_ids + self._first_numbers[first_layer:end_layer]] = True
        self.end_of(first_layer, end_layer, np.flatnonzero(is_used))

    def end_of(self, first_layer: int, end_layer: int, numbers: NDArray[np.int64]) -> None:
        """Do the same for the used experts of some layers, distinct numbers over all layers."""
        size, loads = self._num_experts, self._loads
        with loads.changed:
            journal = NO_EVENTS if loads.fetcher is None else loads.fetcher.end()
            num_absent = 0 if loads.fetcher is None else self._catch_up(loads.fetcher, journal)
            loads.is_read = loads.is_lent = False
            loads.stats.hits += len(numbers) - num_absent
            if loads.needs is not None:
                # Kernels may also have asked for experts of a layer that they did not finish.
                loads.needs.add(numbers, journal.absent.intersection(numbers.tolist()))
            loads.victims.on_use(numbers)
            loads.states.use_all(numbers)
            loads.states.end_prefetches(first_layer * size, end_layer * size, ())
            loads.changed.notify_all()

    def _catch_up(self, fetcher: Fetcher, journal: SlotJournal) -> int:
        """Repeat the journal on the records; return the number of needed experts that were not resident."""
        loads, states = self._loads, self._loads.states
        for event, number, slot in journal.entries:
            if event in (Event.EVICTED, Event.RETIRED):
                if event == Event.RETIRED:
                    states.use(states.all[number])
                states.give_back(states.evict(number))
            elif event in (Event.LOADING, Event.PREFETCHING):
                states.take(slot)
                job = loads.begin(number, slot, is_prefetch=event == Event.PREFETCHING)
                job.handle = fetcher.adopt(job, loads.on_done)
            elif event == Event.JOINED:
                job = states.loads[number]
                job.is_joined = job.is_prefetch
            elif event == Event.CANCELLED:
                fetcher.drop(states.loads[number])
                states.drop_cancelled(states.loads[number])
            else:
                job = states.loads[number]
                states.end_load(job, fetcher.outcome(job, is_right=event == Event.ARRIVED))
        loads.stats.late += journal.num_late
        loads.stats.misses += journal.num_misses
        loads.stats.stall_s += journal.stall_s
        return journal.num_late + journal.num_misses
