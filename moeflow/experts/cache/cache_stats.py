"""Counters of an expert cache, which only grow; the difference of two readings covers the time between them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class CacheStats:
    """Counts of experts needed by passes, bytes read, and time lost."""

    hits: int = 0  # resident when a pass needed them
    late: int = 0  # loading already, by a prefetch or for another pass
    misses: int = 0  # neither
    evictions: int = 0
    failed_loads: int = 0
    cancelled_loads: int = 0  # while queued
    demand_bytes: int = 0  # read for a waiting pass
    prefetched_bytes: int = 0  # read by prediction; of these:
    used_bytes: int = 0  # needed by a pass, later or while loading
    wasted_bytes: int = 0  # evicted unused; the rest may still be needed
    stall_s: float = 0.0  # passes waited for loads

    @property
    def hit_rate(self) -> float:
        """Share of the needed experts that were resident; 0 before the first."""
        return self.hits / max(self.hits + self.late + self.misses, 1)

    def __sub__(self, earlier: CacheStats) -> CacheStats:
        """Return the difference since an earlier reading."""
        return CacheStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
