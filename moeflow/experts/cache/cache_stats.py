"""What an expert cache did, as counters that only grow; differences of two readings tell about the time between."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class CacheStats:
    """Counts of experts needed by passes, bytes read, and time lost."""

    hits: int = 0  # resident when a pass needed them
    late: int = 0  # on their way already, by a prefetch that had begun or for another pass
    misses: int = 0  # neither
    evictions: int = 0
    failed_loads: int = 0
    cancelled_loads: int = 0  # before they began
    demand_bytes: int = 0  # read because a pass needed them
    prefetched_bytes: int = 0  # read because a prediction asked for it, of these:
    used_bytes: int = 0  # needed by a pass later, or while on their way
    wasted_bytes: int = 0  # evicted without having been needed; the rest may still be needed
    stall_s: float = 0.0  # passes waited for loads

    @property
    def hit_rate(self) -> float:
        """Share of the needed experts that were resident; 0 before the first."""
        return self.hits / max(self.hits + self.late + self.misses, 1)

    def __sub__(self, earlier: CacheStats) -> CacheStats:
        """Return what happened since an earlier reading."""
        return CacheStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
