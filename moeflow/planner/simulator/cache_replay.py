"""A routing trace, replayed with other memory, policy or predictor: its reads and its speed.

Expert cache, streaming, policies, predictors and governor are the serving ones; only disk and clock are virtual. A
layer's time is divided evenly over its needed experts. It computes on present experts, then on each as it arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.eviction import Belady, EvictionPolicy
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.lease import Lease
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.spans import untraced
from moeflow.experts.streamed_experts import ExpertStream
from moeflow.planner.simulator.replayed_passes import ReplayedPass
from moeflow.planner.simulator.replayed_predictors import ReplayedPrefetcher
from moeflow.planner.simulator.virtual_disk import VirtualDisk
from moeflow.workload.routing_trace import TraceHeader

BELADY: Final = "belady"
POLICY_NAMES: Final = (*POLICIES, BELADY)
MIN_SLOTS: Final = 2  # one to compute on while the other is filled


@dataclass(frozen=True, slots=True)
class ReplayMachine:
    """The assumed machine of a replay."""

    disk_bytes_per_s: float
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """One case of a replay."""

    num_slots: int
    policy: str
    predictor: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a case."""

    case: ReplayCase
    stats: CacheStats  # with virtual seconds of stall
    seconds: float  # of the whole trace
    num_generated: int  # tokens
    prefetching_share: float  # of passes with prefetches that the governor permitted
    num_read: tuple[int, ...] = ()  # experts that each pass requested from the disk

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over all time."""
        return self.num_generated / self.seconds if self.seconds else 0.0


def replay(
    passes: Sequence[ReplayedPass], header: TraceHeader, machine: ReplayMachine, case: ReplayCase
) -> ReplayResult:
    """Run the passes through a cache that starts empty."""
    if case.num_slots < MIN_SLOTS:
        raise ConfigError(f"{case.num_slots} slots are too few; a replay needs at least {MIN_SLOTS}")
    disk = VirtualDisk(machine.slab_bytes / machine.disk_bytes_per_s)
    cache = ExpertCache(
        num_layers=header.num_layers,
        num_experts=header.num_experts,
        num_slots=case.num_slots,
        slab_bytes=machine.slab_bytes,
        policy=_make_policy(case.policy, passes, header),
        start_loads=disk.start_loads,
        wait=lambda _: disk.wait(),
    )
    stream = ExpertStream(cache)
    prefetcher = ReplayedPrefetcher(cache, case.predictor, passes, header)
    num_read: list[int] = []
    for one in passes:
        began_s = disk.now_s
        cache.begin_pass()
        prefetcher.begin_pass(one)
        for layer, needed in enumerate(one.needed):
            layer_s = one.compute_s / header.num_layers
            if case.policy != BELADY and stream.takes(len(needed)):
                stream.run(layer, _Streamed(needed, disk, layer_s / len(needed)), untraced)
                prefetcher.see_streamed(layer)
                continue
            for number, lease in enumerate(_leases(cache, layer, needed)):
                if number == 0:  # prefetches go after certain needs
                    prefetcher.see(layer)
                _compute(lease, disk, layer_s / len(needed))
            if not needed:
                disk.pass_time(layer_s)
        prefetcher.end_pass(disk.now_s - began_s)
        num_read.append(disk.num_asked - sum(num_read))
    return ReplayResult(
        case=case,
        stats=dataclasses.replace(cache.stats(), stall_s=disk.waited_s),
        seconds=disk.now_s,
        num_generated=sum(one.num_generated for one in passes),
        prefetching_share=prefetcher.num_passes_on / len(passes),
        num_read=tuple(num_read),
    )


def _leases(cache: ExpertCache, layer: int, needed: Sequence[int]) -> Iterator[Lease]:
    """Yield leases on all needed experts of a layer; if they do not fit, each portion loads during the previous one."""
    size = len(needed) if len(needed) <= cache.num_slots else cache.num_slots // 2
    lease: Lease | None = None
    for start in range(0, len(needed), max(size, 1)):
        before, lease = lease, cache.acquire(layer, needed[start : start + size])
        if before is not None:
            yield before
            before.release()
    if lease is not None:
        yield lease
        lease.release()


def _compute(lease: Lease, disk: VirtualDisk, expert_s: float) -> None:
    disk.pass_time(expert_s * len(lease.hits))
    for arrived in lease.arriving():
        disk.pass_time(expert_s * len(arrived))


class _Streamed:
    """The work of a streamed layer: its time."""

    def __init__(self, experts: Sequence[int], disk: VirtualDisk, expert_s: float) -> None:
        self.experts = experts
        self._disk = disk
        self._expert_s = expert_s

    def compute(self, experts: Sequence[int], lease: Lease) -> None:
        """Advance the clock by the experts' time."""
        self._disk.pass_time(self._expert_s * len(experts))


def _make_policy(name: str, passes: Sequence[ReplayedPass], header: TraceHeader) -> EvictionPolicy:
    if name != BELADY:
        return POLICIES[name](header.num_layers, header.num_experts)
    uses = [
        layer * header.num_experts + expert
        for one in passes
        for layer, needed in enumerate(one.needed)
        for expert in needed
    ]
    return Belady(header.num_layers * header.num_experts, uses)
