"""Replays a trace of routing with other memory, policy or predictor: computes reads and speed.

Expert cache, streaming, policies, predictors and trials are the code that serves; only disk and clock are virtual. A
layer's time is split evenly over its needed experts: first resident ones compute, then each as it arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.eviction import Belady, EvictionPolicy
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.lease import Lease
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.leased_experts import run_leased
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.spans import untraced
from moeflow.experts.streamed_experts import ExpertStream
from moeflow.planner.simulator.replayed_passes import ReplayedPass
from moeflow.planner.simulator.replayed_sources import RecordedInput, replayed_sources
from moeflow.planner.simulator.virtual_disk import VirtualDisk
from moeflow.workload.routing_trace import TraceHeader

BELADY: Final = "belady"
POLICY_NAMES: Final = (*POLICIES, BELADY)
MIN_SLOTS: Final = 2  # one computes while the other is filled


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
    prefetching_share: float  # of passes that prefetched by prediction
    num_read: tuple[int, ...] = ()  # experts that each pass read

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
    driver = PrefetchDriver(cache, replayed_sources(case.predictor, passes, header), lambda: disk.now_s)
    num_read: list[int] = []
    num_followed = 0
    for one in passes:
        cache.begin_pass()
        driver.begin_pass(one)
        layer_s = one.compute_s / header.num_layers
        for layer, needed in enumerate(one.needed):
            see = partial(driver.see, layer, RecordedInput(one, layer), one.ids[layer])
            if not needed:
                disk.pass_time(layer_s)
                continue
            work = _TimedWork(needed, disk, layer_s / len(needed))
            if case.policy != BELADY and stream.takes(len(needed)):
                stream.run(layer, work, untraced)
                see()
            else:
                run_leased(cache, layer, work, untraced, see)
        num_followed += driver.is_followed
        driver.end_pass(one.num_tokens)
        num_read.append(disk.num_asked - sum(num_read))
    return ReplayResult(
        case=case,
        stats=dataclasses.replace(cache.stats(), stall_s=disk.waited_s),
        seconds=disk.now_s,
        num_generated=sum(one.num_generated for one in passes),
        prefetching_share=num_followed / len(passes),
        num_read=tuple(num_read),
    )


class _TimedWork:
    """The work of a layer: time."""

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
