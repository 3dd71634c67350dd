"""What experts on disk cost a pass of a host beside its computing: reading them, and stopping where one is not there.

A layer that lacks an expert leaves the one call that runs all layers: the cache is asked, reads are begun, and what
arrives is computed with by itself. Where nearly all experts are needed they stream, and nothing stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from moeflow.planner.costs.hit_curve import HitCurve
from moeflow.planner.costs.routing_profile import SHARES_ON_DISK

# Measured on two Zen 5 cores, which the disk's threads share: what passes of a 10 GB model took beside computing.
STOP_S: Final = 1.2e-3  # of a layer that lacks something
LOAD_S: Final = 1e-4  # of each expert that is read, its read left out


@dataclass(frozen=True, kw_only=True)
class ExpertReads:
    """Passes of one size: what they use and, depending on the share of experts on disk, read."""

    num_layers: int  # with experts
    distinct: float  # experts of a layer that a pass uses
    even: float  # that it would use if routers chose evenly
    misses: HitCurve  # experts that are read, as shares of these
    read_s: float  # an expert's
    stop_s: float = STOP_S

    def num_read(self, on_disk: float) -> float:
        """Return how many experts a pass reads, in all layers."""
        return self.num_layers * min(self.even * self.misses.misses(on_disk), self.distinct)

    def wait_s(self, num_read: float) -> float:
        """Return what reading so many costs a pass, in seconds."""
        if not self.distinct:
            return 0.0
        present = 1.0 - min(num_read / self.num_layers / self.distinct, 1.0)
        num_stops = self.num_layers * (1.0 - float(present**self.distinct))
        return num_read * (self.read_s + LOAD_S) + num_stops * self.stop_s

    @cached_property
    def waits(self) -> DiskWaits:
        """Return what a pass loses, by the share of experts on disk."""
        most = self.wait_s(self.num_read(1.0))
        if not most:
            return DiskWaits(0.0, self.misses)
        points = [(share, self.wait_s(self.num_read(share)) / most) for share in SHARES_ON_DISK]
        return DiskWaits(most, HitCurve.through(points))


@dataclass(frozen=True, slots=True)
class DiskWaits:
    """Seconds of a pass, by the share of experts on disk."""

    all_on_disk_s: float
    curve: HitCurve  # shares of that
