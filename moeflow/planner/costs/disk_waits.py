"""The cost of experts on disk for a host's pass: reads, and stops of layers that lack an expert.

One call runs all layers, and a layer that lacks an expert leaves it. The cache is asked, reads begin, and arriving
experts are computed separately. Passes that need nearly all experts stream them without stops. A disk is fastest with
many concurrent reads; a wait for a single expert has few.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec

from moeflow.core.hardware import Link
from moeflow.core.units import MIB
from moeflow.planner.costs.hit_curve import HitCurve
from moeflow.planner.costs.routing_profile import SHARES_ON_DISK

NUM_READERS: Final = 8  # threads of the lane that reads, unless others are clearly faster
PIECE_BYTES: Final = MIB  # at least, of a read that is cut for several threads


class DiskRates(msgspec.Struct, frozen=True, kw_only=True):
    """The read times of one model's experts on a disk."""

    link: Link | None  # None: there is no disk
    expert_bytes: float

    def read_s(self, num_at_once: float) -> float:
        """Return the seconds per expert of so many concurrent reads."""
        if self.link is None or not self.expert_bytes:
            return 0.0
        num_reads = max(round(num_at_once), 1)
        num_pieces = max(min(NUM_READERS // num_reads, int(self.expert_bytes // PIECE_BYTES)), 1)
        depth = num_reads * num_pieces
        rate = self.link.bytes_per_s(self.expert_bytes / num_pieces, depth if depth < NUM_READERS else None)
        return self.expert_bytes / rate


@dataclass(frozen=True, kw_only=True)
class ExpertReads:
    """Passes of one size: the experts that they use, and read for a share of experts on disk."""

    num_layers: int  # with experts
    distinct: float  # experts of a layer that a pass uses
    even: float  # that it would use if routers chose evenly
    misses: HitCurve  # experts that are read, as shares of these
    rates: DiskRates
    stop_s: float  # of a layer that lacks an expert
    load_s: float  # of each expert that is read, its read left out

    def num_read(self, on_disk: float) -> float:
        """Return the experts that a pass reads in all layers."""
        return self.num_layers * min(self.even * self.misses.misses(on_disk), self.distinct)

    def read_s(self, num_read: float) -> float:
        """Return the seconds of so many reads in a pass."""
        if not num_read or not self.distinct:
            return 0.0
        return num_read * self.rates.read_s(num_read / self._num_stops(num_read))

    def wait_s(self, num_read: float) -> float:
        """Return the seconds that reading so many adds to a pass."""
        if not num_read or not self.distinct:
            return 0.0
        return self.read_s(num_read) + num_read * self.load_s + self._num_stops(num_read) * self.stop_s

    def _num_stops(self, num_read: float) -> float:
        """Return the layers that lack an expert."""
        present = 1.0 - min(num_read / self.num_layers / self.distinct, 1.0)
        return self.num_layers * (1.0 - float(present**self.distinct))

    @cached_property
    def waits(self) -> DiskWaits:
        """The waits of a pass, by the share of experts on disk."""
        most = self.wait_s(self.num_read(1.0))
        if not most:
            return DiskWaits(0.0, self.misses)
        points = [(share, self.wait_s(self.num_read(share)) / most) for share in SHARES_ON_DISK]
        return DiskWaits(most, HitCurve.through(points))


class DiskWaits(msgspec.Struct, frozen=True):
    """Seconds of a pass, by the share of experts on disk."""

    all_on_disk_s: float
    curve: HitCurve  # shares of that
