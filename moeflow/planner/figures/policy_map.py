"""What MoE-Lightning's figure 10 shows, for any machine and model: how the best policy changes. Numbers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DISK, RAM, Link, LinkRate, Machine
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.search.objective import Objective
from moeflow.planner.search.search import search

FACTORS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)  # of what the machine has
MAP_SEQUENCES: Final = 8  # whose keys and values always fit
MEMORY_SHARES: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of what the model needs


@dataclass(frozen=True, slots=True)
class MapPoint:
    """The best policy for one machine of a map."""

    x: float
    y: float
    policy: Policy | None  # None: nothing fits
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PolicyMap:
    """How the best policy changes with two properties of the machine."""

    title: str
    x_label: str
    y_label: str
    points: tuple[MapPoint, ...]
    has_device: bool


def policy_map(model: CostModel, objective: Objective, on_point: Callable[[], None] = lambda: None) -> PolicyMap:
    """Return how the best policy changes: with link and host (figure 10), or without a device with memory and disk.

    Policies are found as the plan's is, so that the machine itself, where it is one of the map's, has that.
    Blocks: for a minute or two where there is a device, otherwise for some seconds.
    """
    xs, ys = _axes(model)
    change = _other_device if model.has_device else _other_host
    points = []
    for y in ys:
        for x in xs:
            points.append(_point(*change(model, objective, x, y), x, y))
            on_point()
    if model.has_device:
        return PolicyMap(
            "best policy", "link to the device, times as fast", "host, times as large and fast", tuple(points), True
        )
    labels = ("memory for weights, share of the model", "disk, times as fast")
    return PolicyMap("best policy", *labels, tuple(points), False)


def num_map_points(model: CostModel) -> int:
    """Return how many searches a map takes."""
    xs, ys = _axes(model)
    return len(xs) * len(ys)


def _axes(model: CostModel) -> tuple[Sequence[float], Sequence[float]]:
    return (FACTORS if model.has_device else MEMORY_SHARES), FACTORS


def _point(model: CostModel, objective: Objective, x: float, y: float) -> MapPoint:
    try:
        model, policy = search(model, objective)
    except CapacityError:
        return MapPoint(x, y, None, 0.0)
    return MapPoint(x, y, policy, model.predict(policy).tokens_per_s)


def _other_device(model: CostModel, objective: Objective, link: float, host: float) -> tuple[CostModel, Objective]:
    """Return the same with another link and host; a limit of memory grows with it."""
    limits = {tier: int(size * host) if tier == RAM else size for tier, size in objective.memory_limits.items()}
    machine = scaled_link_and_host(model.machine, link, host)
    return replace(model, machine=machine), replace(objective, memory_limits=limits)


def scaled_link_and_host(machine: Machine, link: float, host: float) -> Machine:
    """Return a machine whose device link and host are so many times as fast."""
    levels = []
    for level in machine.levels:
        if level.name == RAM and level.processor is not None:
            peaks = tuple((dtype, flops * host) for dtype, flops in level.processor.peak_flops_per_s)
            processor = replace(level.processor, peak_flops_per_s=peaks)
            size, speed = int(level.capacity_bytes * host), level.read_bytes_per_s * host
            levels.append(replace(level, capacity_bytes=size, read_bytes_per_s=speed, processor=processor))
        else:
            levels.append(level)
    links = tuple(it if DISK in (it.source, it.target) else _scaled_link(it, link) for it in machine.links)
    return replace(machine, levels=tuple(levels), links=links)


def _other_host(model: CostModel, objective: Objective, share: float, disk: float) -> tuple[CostModel, Objective]:
    """Return the same with memory for another share of the model, and another disk; this memory is the only limit."""
    size = int(
        model.process_bytes
        + model.costs.model_bytes * share
        + MAP_SEQUENCES * model.workload.max_tokens * model.costs.kv_bytes
    )
    levels = tuple(
        replace(level, capacity_bytes=size) if level.name == RAM else level for level in model.machine.levels
    )
    links = tuple(_scaled_link(it, disk) if it.source == DISK else it for it in model.machine.links)
    return replace(model, machine=replace(model.machine, levels=levels, links=links)), replace(
        objective, memory_limits={}
    )


def _scaled_link(link: Link, factor: float) -> Link:
    rates = tuple(
        LinkRate(transfer_bytes=it.transfer_bytes, bytes_per_s=it.bytes_per_s * factor, depth=it.depth)
        for it in link.rates
    )
    return replace(link, rates=rates)
