"""The machine's own speed next to measurements: samples of its best rates."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from moeflow.kernels.ceilings import measure_flops, measure_read


@dataclass
class Ceilings:
    """Samples, taken between measurements so that a drift of the machine hits both alike."""

    num_threads: int
    read_bytes_per_s: list[float] = field(default_factory=list)
    flops_per_s: list[float] = field(default_factory=list)

    def sample(self) -> None:
        """Measure both once: under a second."""
        self.read_bytes_per_s.append(measure_read(self.num_threads))
        self.flops_per_s.append(measure_flops(self.num_threads))

    @property
    def read(self) -> float:
        """Bytes a second, the median sample."""
        return statistics.median(self.read_bytes_per_s)

    @property
    def flops(self) -> float:
        """Float32 operations a second, the median sample."""
        return statistics.median(self.flops_per_s)
