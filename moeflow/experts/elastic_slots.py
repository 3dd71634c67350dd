"""The slots of a cache, as many as the memory budget leaves them."""

from __future__ import annotations

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.slot_arena import SlotArena, num_slots_in


class ElasticSlots:
    """The slots that experts are in."""

    def __init__(self, cache: ExpertCache, arena: SlotArena) -> None:
        """Take a cache and the arena of its slots, which may hold more than the cache uses."""
        self._cache = cache
        self._arena = arena

    @property
    def num_slots(self) -> int:
        """How many slots may be used."""
        return self._cache.num_slots

    @property
    def taken_bytes(self) -> int:
        """The memory of slots that have held an expert."""
        return self._cache.num_filled * self._arena.slot_bytes

    def within(self, num_bytes: int) -> int:
        """Return how many slots fit into `num_bytes`, which may be negative."""
        return min(num_slots_in(num_bytes, self._arena.slot_bytes), self._arena.num_slots)

    def resize(self, num_slots: int) -> int:
        """Set the number of slots, or as few as leases allow; return the new number.

        Blocks: while loads write into slots to be removed.
        """
        have = self._cache.resize(num_slots, self._arena.copy)
        self._arena.give_back(have)
        return have
