"""Where measured passes lie under a machine's roofs: bytes and operations from the model's shape, seconds as measured.

The roofs are those of the level that computes: how fast it reads its memory, and how fast it computes each format
(MoE-Lightning 3.2). Bytes are those of weights, and of keys and values; activations stay in caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from moeflow.core.hardware import MemoryLevel
from moeflow.core.observation import PassGroup
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.served.served_estimate import ServedEstimate

Bound = Literal["memory", "compute", "disk", "exchange"]
_MOST: Final = 0.5  # of the time: what takes more than that binds


class PassWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass reads and computes, and how long the roofs allow for it at least."""

    num_bytes: float
    num_flops: float
    memory_s: float | None = None  # None: the machine was not measured
    compute_s: float | None = None


class OperatingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of measured passes of one engine, beside others of the machine that compute at the same time."""

    num_engines: int = 1  # at work: rates are those of all

    age_s: float  # since the last of them ended
    num_passes: int
    pass_s: float
    tokens_per_pass: float
    sequences_per_pass: float
    generated_per_s: float  # tokens
    context: float  # positions that a token sees
    distinct_experts: float | None  # of a layer that a pass used, as counted; None: not counted
    expected_experts: float | None  # likewise, as routers are expected to choose; None: there are no experts
    work: PassWork
    disk_bytes: float  # of experts that came from disk or from another machine
    stall_s: float  # a pass waited for experts
    waited_s: float  # a pass waited for other ranks, or a GPU

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.work.num_flops / self.work.num_bytes if self.work.num_bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """Operations a second."""
        return self.num_engines * self.work.num_flops / self.pass_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second that were read from memory."""
        return self.num_engines * self.work.num_bytes / self.pass_s

    @property
    def roof_s(self) -> float | None:
        """The least seconds of a pass that the roofs allow."""
        if self.work.memory_s is None or self.work.compute_s is None:
            return None
        return self.num_engines * max(self.work.memory_s, self.work.compute_s)

    @property
    def share_of_roof(self) -> float | None:
        """How much of the roof above it the point reaches."""
        return None if self.roof_s is None else self.roof_s / self.pass_s

    @property
    def bound(self) -> Bound | None:
        """What binds: waits, if they take most of the time; else the roof above the point."""
        if self.stall_s > _MOST * self.pass_s:
            return "disk"
        if self.waited_s > _MOST * self.pass_s:
            return "exchange"
        if self.work.memory_s is None or self.work.compute_s is None:
            return None
        return "memory" if self.work.memory_s >= self.work.compute_s else "compute"


def compute_level(estimate: ServedEstimate) -> MemoryLevel | None:
    """Return the level whose memory passes read and whose processor computes; None: several do, or none is known."""
    config = estimate.plan.config
    if estimate.machine is None or config.hybrid is not None or config.offload is not None:
        return None
    return estimate.machine.compute_level


def pass_work(
    costs: ModelCosts, level: MemoryLevel | None, group: PassGroup, distinct: float | None, num_devices: int = 1
) -> PassWork:
    """Return the work of one pass of a group; `distinct`: experts of a layer that it uses."""
    context = group.num_seen / max(group.num_tokens * group.num_passes, 1)
    seen_share = costs.seen_share(context)
    attention = costs.attention(
        group.num_tokens,
        group.num_seen / group.num_passes * seen_share,
        group.num_read / group.num_passes * seen_share,
        group.num_sequences,
    )
    works = costs.pass_works(group.num_tokens, attention, group.num_sampled, distinct)
    num_bytes = sum(count * work.num_bytes for count, work in works)
    num_flops = sum(count * work.num_flops for count, work in works)
    if level is None:
        return PassWork(num_bytes=num_bytes, num_flops=num_flops)
    processor = processor_of(level)
    compute_s = sum(count * work.num_flops / processor.peak(work.dtype) for count, work in works)
    return PassWork(
        num_bytes=num_bytes,
        num_flops=num_flops,
        memory_s=num_bytes / level.read_bytes_per_s / num_devices,
        compute_s=compute_s / num_devices,
    )


def operating_point(estimate: ServedEstimate, groups: Sequence[PassGroup], num_engines: int = 1) -> OperatingPoint:
    """Return the mean of passes, of which there is at least one, of so many engines."""
    level, machine = compute_level(estimate), estimate.machine
    num_devices = max(machine.num_devices, 1) if machine is not None else 1
    num_passes = sum(it.num_passes for it in groups)
    works: list[tuple[int, PassWork]] = []
    expected = 0.0
    for it in groups:
        distinct = estimate.reachable_experts(it.num_tokens, is_decoding=it.num_tokens == it.num_sampled)
        expected += distinct * it.num_passes
        used = it.distinct / it.num_counted if it.num_counted else distinct
        works.append((it.num_passes, pass_work(estimate.costs, level, it, used, num_devices)))
    seconds = _sum(it.seconds for it in groups)
    num_tokens = sum(it.num_tokens * it.num_passes for it in groups)
    num_counted = sum(it.num_counted for it in groups)
    has_experts = bool(estimate.costs.shape.routing.num_experts)
    return OperatingPoint(
        num_engines=num_engines,
        age_s=min(it.age_s for it in groups),
        num_passes=num_passes,
        pass_s=seconds / num_passes,
        tokens_per_pass=num_tokens / num_passes,
        sequences_per_pass=sum(it.num_sequences * it.num_passes for it in groups) / num_passes,
        generated_per_s=num_engines * sum(it.num_generated for it in groups) / seconds,
        context=sum(it.num_seen for it in groups) / num_tokens,
        distinct_experts=_sum(it.distinct for it in groups) / num_counted if num_counted and has_experts else None,
        expected_experts=expected / num_passes if has_experts else None,
        work=_mean(works, num_passes),
        disk_bytes=sum(it.read_bytes for it in groups) / num_passes,
        stall_s=_sum(it.stall_s for it in groups) / num_passes,
        waited_s=_sum(it.waited_s for it in groups) / num_passes,
    )


def decoding_point(estimate: ServedEstimate, num_sequences: int, context: float, step_s: float) -> OperatingPoint:
    """Return where a decoding step of so many sequences lies that takes so long."""
    positions = round(num_sequences * context)
    group = PassGroup(
        num_tokens=num_sequences,
        num_sampled=num_sequences,
        num_sequences=num_sequences,
        age_s=0.0,
        num_passes=1,
        num_generated=num_sequences,
        seconds=step_s,
        num_seen=positions,
        num_read=positions,
    )
    return operating_point(estimate, [group])


def _mean(works: Sequence[tuple[int, PassWork]], num_passes: int) -> PassWork:
    def mean(name: str) -> float | None:
        values = [getattr(work, name) for _, work in works]
        if None in values:
            return None
        return _sum(value * number for value, (number, _) in zip(values, works, strict=True)) / num_passes

    return PassWork(
        num_bytes=mean("num_bytes") or 0.0,
        num_flops=mean("num_flops") or 0.0,
        memory_s=mean("memory_s"),
        compute_s=mean("compute_s"),
    )


def _sum(values: Iterable[float]) -> float:
    return sum(values, 0.0)
