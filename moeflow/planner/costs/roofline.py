"""The hierarchical roofline model: the bound of a computation on a level with data from another.

Source: MoE-Lightning 3.2, equations 4 to 11. Levels may be any two of a machine; `link` leads from the data's level (j)
to the computing level (i). Rates are FLOP/s, intensities FLOP per byte.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moeflow.core.hardware import Machine, MemoryLevel, Processor
from moeflow.planner.costs.model_costs import KernelWork


@dataclass(frozen=True, slots=True)
class Roofs:
    """The roofs over one kind of work: of level i, of level j if it computes, and of the link."""

    peak: float  # P_i
    bandwidth: float  # B_i
    far_peak: float  # P_j; 0: it does not compute
    far_bandwidth: float  # B_j
    link: float  # B_ji

    def local(self, intensity: float) -> float:
        """Return the rate of level i on its own data (equation 8)."""
        return min(self.peak, self.bandwidth * intensity)

    def far(self, far_intensity: float) -> float:
        """Return the rate of level j on its own data (equation 8)."""
        return min(self.far_peak, self.far_bandwidth * far_intensity)

    @property
    def turning_point_1(self) -> float:
        """Return the intensity on j's data below which j is faster on its own data than i over the link (equation 9).

        The equation has intensity on both sides. A memory no faster than the link leaves it without a solution above 0.
        """
        return self.far_peak / self.link if self.far_bandwidth > self.link else 0.0

    def turning_point_2(self, intensity: float) -> float:
        """Return the intensity on j's data below which the link bounds (equation 10)."""
        return self.local(intensity) / self.link

    def balance(self, intensity: float) -> float:
        """Return the intensity on j's data at which link and level i's memory are equally busy (equation 11)."""
        return self.bandwidth * intensity / self.link


def processor_of(level: MemoryLevel) -> Processor:
    """Return the processor of a level that has one."""
    assert level.processor is not None, f"nothing computes at {level.name}"
    return level.processor


def divided(level: MemoryLevel, number: int) -> MemoryLevel:
    """Return the part of each of so many processes in a level where all compute at once."""
    processor = processor_of(level)
    peaks = tuple((dtype, peak / number) for dtype, peak in processor.peak_flops_per_s)
    processor = replace(processor, peak_flops_per_s=peaks)
    return replace(level, read_bytes_per_s=level.read_bytes_per_s / number, processor=processor)


def roofs(machine: Machine, near: str, far: str, dtype: str) -> Roofs:
    """Return the roofs of a machine for values of a format. Raises: ConfigError if a level or link is missing."""
    here, there = machine.level(near), machine.level(far)
    return Roofs(
        processor_of(here).peak(dtype),
        here.read_bytes_per_s,
        there.processor.peak(dtype) if there.processor else 0.0,
        there.read_bytes_per_s,
        machine.link(far, near).peak_bytes_per_s,
    )


def work_seconds(level: MemoryLevel, work: KernelWork, num_devices: int = 1) -> float:
    """Return the seconds of work at a level on its own data (equation 14), at the kernel's efficiency.

    Several devices share it evenly: each reads and computes its part (tensor parallelism).
    """
    if not work.num_bytes and not work.num_flops:
        return 0.0
    return _kernel_s(level, work) / num_devices + processor_of(level).launch_s


def launch_seconds(level: MemoryLevel, works: Sequence[tuple[float, KernelWork]]) -> float:
    """Return the seconds of several kinds of work in one launch, one after the other, each so many times."""
    seconds = sum(count * _kernel_s(level, work) for count, work in works)
    return seconds + processor_of(level).launch_s if works else 0.0


def _kernel_s(level: MemoryLevel, work: KernelWork) -> float:
    """Return the seconds of a kernel on one device.

    The seconds are linear between the measured numbers of rows. Near the bend of the roof the share of the roof falls
    and rises again, while time only grows. Beyond the measured numbers the share is that of the last one.
    """
    processor = processor_of(level)
    read_s = work.num_bytes / level.read_bytes_per_s
    compute_s = work.num_flops / processor.peak(work.dtype)
    points = processor.measured(work.kernel, work.dtype, work.values)
    at = bisect.bisect_left(points, (work.rows, 0.0))
    if not 0 < at < len(points):
        share = points[min(at, len(points) - 1)][1] if points else processor.default_efficiency
        return max(read_s, compute_s) / share
    (low, high) = points[at - 1], points[at]
    low_s, high_s = (max(read_s, compute_s * rows / work.rows) / share for rows, share in (low, high))
    return low_s + (high_s - low_s) * (work.rows - low[0]) / (high[0] - low[0])
