"""A machine as memory levels, the processor at each, and the links between them: what plans and simulations run on.

Levels are those of MoE-Lightning's hierarchical roofline model (section 3.2), from the farthest to the nearest:
disk, RAM, pinned RAM, device. Any may be absent; a machine without a device computes in RAM. `sources` names the data
sheet or measurement of each figure, `uncertainty` its possible error. Knows no model.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Final

from msgspec import Meta

from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import ATTENTION_LAYOUTS, EXPERT_LAYOUTS
from moeflow.kernels.weight_format import FORMATS

DISK: Final = "disk"
RAM: Final = "ram"
PINNED: Final = "pinned"  # RAM that a device's copy engine reads without the processor; takes part of RAM's bytes
DEVICE: Final = "device"
LEVEL_NAMES: Final = (DISK, RAM, PINNED, DEVICE)  # far to near
RANK: Final = "rank"  # a process that shares a model with others of its machine, by memory that both map,
REMOTE_RANK: Final = "remote rank"  # or with others of another machine, by TCP
KERNELS: Final = ("linear", "experts", "attention", "rows", "sampling")
DTYPES: Final = tuple(dict.fromkeys(("float32", "float16", *FORMATS)))
# What experts on disk cost a host that is described, not measured: usual for cores of 3 to 4 GHz.
DEFAULT_STOP_S: Final = 1e-3
DEFAULT_LOAD_S: Final = 1e-4
DEFAULT_OVERLAP: Final = 0.6
DEFAULT_SEAM_S: Final = 3e-5  # of a layer that device and host share: two small copies and two starts, over PCIe
DEFAULT_RANK_LAYER_S: Final = 5e-4  # of a layer that ranks share, beside kernels and bytes, likewise
_LARGEST: Final = sys.float_info.max
FAR_APART: Final = 0.5  # an uncertainty from which on figures are rather to be measured again


def _one_of(*names: str) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


# A machine file is checked against these types.
Name = Annotated[str, Meta(min_length=1)]
LevelName = Annotated[str, _one_of(*LEVEL_NAMES)]
LinkEnd = Annotated[str, _one_of(*LEVEL_NAMES, RANK, REMOTE_RANK)]
Dtype = Annotated[str, _one_of(*DTYPES)]
Positive = Annotated[float, Meta(gt=0, le=_LARGEST)]
NotNegative = Annotated[float, Meta(ge=0, le=_LARGEST)]
Share = Annotated[float, Meta(ge=0, le=1)]
NumBytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEfficiency:
    """What share of its roof (equation 8) a kernel reaches at a shape."""

    kernel: Annotated[str, _one_of(*KERNELS)]
    dtype: Dtype  # of the weights; for attention of keys and values
    rows: Positive  # that meet each weight: tokens, for experts those of one; for attention, queries that share K and V
    share: Positive  # measured speed over that of the roof
    values: Annotated[int, Meta(ge=0)] = 0  # of one matrix, or of an expert's matrices combined; 0: any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayer:
    """What a layer that ranks share takes beside kernels and the bytes of exchanges, in one pair of layouts."""

    expert_layout: Annotated[str, _one_of(*EXPERT_LAYOUTS)]
    attention_layout: Annotated[str, _one_of(*ATTENTION_LAYOUTS)]
    seconds: NotNegative


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What computes at a level, and what the engine's own work takes there."""

    name: Name
    # (dtype, FLOP/s of a large matrix product)
    peak_flops_per_s: Annotated[tuple[tuple[Dtype, Positive], ...], Meta(min_length=1)]
    efficiencies: tuple[KernelEfficiency, ...] = ()
    default_efficiency: Positive = 1.0  # of kernels that are not in `efficiencies`
    launch_s: NotNegative = 0.0  # from one kernel to the next
    pass_s: NotNegative = 0.0  # of a pass outside of kernels: queue, tensors, delivery of tokens
    token_s: NotNegative = 0.0  # the same for each token that is sampled
    stop_s: NotNegative = DEFAULT_STOP_S  # of a layer that lacks experts on disk, beside reading and computing
    load_s: NotNegative = DEFAULT_LOAD_S  # of each expert that is read, its read left out
    read_overlap: Share = DEFAULT_OVERLAP  # of reading with computing: 1: each as fast as alone; 0: alternately
    seam_s: NotNegative = DEFAULT_SEAM_S  # of a device: to the host and back in a layer that they share, without bytes
    rank_layers: tuple[RankLayer, ...] = ()  # of ranks on this machine; of others: a usual value

    def peak(self, dtype: str) -> float:
        """Return FLOP/s for values of a format; of the next wider one if it has none of its own."""
        return dict(self.peak_flops_per_s)[self.peak_format(dtype)]

    def peak_format(self, dtype: str) -> str:
        """Return the format whose FLOP/s hold for values of a format."""
        peaks = dict(self.peak_flops_per_s)
        return next(name for name in (dtype, *_wider(dtype), *peaks) if name in peaks)

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes bfloat16 at least as fast as float16."""
        peaks = dict(self.peak_flops_per_s)
        return "bfloat16" in peaks or "float16" not in peaks

    def rank_layer_s(self, expert_layout: str, attention_layout: str) -> float:
        """Return what a layer that ranks share takes beside kernels and bytes."""
        found = (
            it.seconds
            for it in self.rank_layers
            if (it.expert_layout, it.attention_layout) == (expert_layout, attention_layout)
        )
        return next(found, DEFAULT_RANK_LAYER_S)

    def measured(self, kernel: str, dtype: str, values: int = 0) -> Sequence[tuple[float, float]]:
        """Return the figures of a kernel: (rows, share of the roof), ascending; [] if nothing is.

        Of a format that was not measured, that of the next wider one; among the sizes of matrices, the nearest.
        """
        asked = kernel, dtype, values
        if asked not in self._found:
            self._found[asked] = self._find(kernel, dtype, values)
        return self._found[asked]

    @cached_property
    def _found(self) -> dict[tuple[str, str, int], Sequence[tuple[float, float]]]:
        return {}  # of kernels that were asked for: a search for a plan asks thousands of times for a few

    def _find(self, kernel: str, dtype: str, values: int) -> Sequence[tuple[float, float]]:
        measured = [entry for entry in self.efficiencies if entry.kernel == kernel]
        formats = {entry.dtype for entry in measured}
        nearest_format = next((name for name in (dtype, *_wider(dtype)) if name in formats), None)
        known = [entry for entry in measured if entry.dtype == nearest_format]
        if not known:
            return []
        sizes = {entry.values for entry in known}
        nearest = min(sizes, key=lambda size: abs(math.log(max(size, 1) / max(values, 1))))
        return sorted((entry.rows, entry.share) for entry in known if entry.values == nearest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """One kind of memory; with several devices, that of one."""

    name: LevelName
    capacity_bytes: NumBytes
    read_bytes_per_s: Positive  # by the processor here; of a disk, into RAM
    processor: Processor | None = None  # None: nothing computes here


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """How fast transfers of one size are."""

    transfer_bytes: NumBytes
    bytes_per_s: Positive
    depth: Annotated[int, Meta(ge=1)] = 1  # transfers under way at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way from one level to another. Opposite directions are two links that do not disturb each other."""

    source: LinkEnd
    target: LinkEnd
    rates: Annotated[tuple[LinkRate, ...], Meta(min_length=1)]
    is_shared: bool = True  # by all devices; otherwise each has one of its own

    @property
    def peak_bytes_per_s(self) -> float:
        """The fastest it gets."""
        return max(rate.bytes_per_s for rate in self.rates)

    def bytes_per_s(self, transfer_bytes: float, depth: int | None = None) -> float:
        """Return the rate of transfers of one size, at the best depth or at a given one.

        Between the sizes that are known, linearly in their logarithm; beyond them, as at the last.
        """
        depths = sorted({rate.depth for rate in self.rates})
        nearest = None if depth is None else min(depths, key=lambda known: abs(math.log(known / depth)))
        return max(
            _interpolate(
                sorted((float(rate.transfer_bytes), rate.bytes_per_s) for rate in self.rates if rate.depth == each),
                max(transfer_bytes, 1.0),
            )
            for each in (depths if nearest is None else [nearest])
        )

    def seconds(self, num_bytes: float, transfer_bytes: float | None = None) -> float:
        """Return how long so many bytes take, in transfers of a size; None: in one."""
        return num_bytes / self.bytes_per_s(transfer_bytes or num_bytes) if num_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine. Devices are alike."""

    name: Name
    levels: tuple[MemoryLevel, ...]  # far to near
    links: tuple[Link, ...] = ()
    num_devices: Annotated[int, Meta(ge=0)] = 0
    uncertainty: NotNegative = 0.25  # of its figures, relative: what predictions are to be taken with
    identity: str = ""  # of the machine that was measured; empty: from data sheets
    sources: tuple[tuple[str, str], ...] = ()  # (field, where its figure is from)
    measured_at: str = ""  # when, as ISO date and time; empty: from data sheets
    other_work: NotNegative = 0.0  # share of the processor that others had meanwhile
    is_quick: bool = False  # measured in one second, and only for the model of that start

    def has(self, name: str) -> bool:
        """Return whether there is such a level."""
        return any(level.name == name for level in self.levels)

    def without_device(self) -> Machine:
        """Return the same machine without its devices, and without the memory that serves them."""
        levels = tuple(level for level in self.levels if level.name not in (DEVICE, PINNED))
        links = tuple(link for link in self.links if not {link.source, link.target} & {DEVICE, PINNED})
        return replace(self, levels=levels, links=links, num_devices=0)

    @property
    def caution(self) -> str:
        """How exact its figures are, in words."""
        if self.uncertainty < FAR_APART:
            return f"the machine's figures are good to {self.uncertainty:.0%} or so"
        return f"the machine's figures are good to a factor of {1 + self.uncertainty:.1f} or so"

    def level(self, name: str) -> MemoryLevel:
        """Return a level. Raises: ConfigError if the machine has none of that name."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ConfigError(
            f"machine {self.name!r} has no level {name!r}; it has {', '.join(it.name for it in self.levels)}"
        )

    def link(self, source: str, target: str) -> Link:
        """Return the link from one level to another. Raises: ConfigError if there is none."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise ConfigError(
            f"machine {self.name!r} has no link from {source!r} to {target!r}: describe it under 'links' in its file"
        )

    @property
    def compute_level(self) -> MemoryLevel:
        """The nearest level that has a processor."""
        return next(level for level in reversed(self.levels) if level.processor is not None)


def _wider(dtype: str) -> tuple[str, ...]:
    """Return substitutes for a dtype without figures of its own, the nearest first."""
    if dtype == "float16":
        return "bfloat16", "float32"
    wider = FORMATS[dtype].wider
    if wider is None:
        return ()
    return (*(("float16",) if dtype == "bfloat16" else ()), wider, *_wider(wider))


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at x, linear in log(x) between points that ascend in x, constant beyond them."""
    xs = [point[0] for point in points]
    at = bisect.bisect_left(xs, x)
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (math.log(x / x0) / math.log(x1 / x0))
