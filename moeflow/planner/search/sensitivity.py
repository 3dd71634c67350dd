"""The bottleneck of a policy, and the gain of more of each resource: found by new plans with each resource doubled.

All plans use a coarser grid than the real one, also the plan that they are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, PINNED, RAM, Link, LinkRate, Machine, MemoryLevel
from moeflow.core.plan import Policy, Sensitivity
from moeflow.kernels.weight_format import BITS_PER_VALUE, QUANTIZED
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.rank_costs import ALONE
from moeflow.planner.search.device_search import search_devices
from moeflow.planner.search.objective import COARSE, Objective, cost_per_token
from moeflow.planner.search.scaling import scaling_helps

MORE_MEMORY: Final = "twice the memory"
MIN_HELP: Final = 1.02  # that is reported


@dataclass(frozen=True, slots=True)
class Perturbation:
    """An improvement of one resource."""

    change: str  # "RAM read twice as fast"
    bottleneck: str  # "reading from RAM"; empty: it takes no time
    turn: Callable[[Machine], Machine]


def bottleneck(model: CostModel, policy: Policy) -> str:
    """Return the resource whose doubling makes this policy's steps shortest, or several that must all be doubled."""
    return bottleneck_by(lambda it: it.predict(policy).decode_s, model)


def bottleneck_by(step_s: Callable[[CostModel], float], model: CostModel) -> str:
    """Return the same, where `step_s` returns the seconds of a step with other costs.

    Several are named if they are equally busy, so that none of them alone would help.
    """
    before = step_s(model)
    timed = [perturbation for perturbation in _perturbations(model) if perturbation.bottleneck]

    def gain(perturbations: Sequence[Perturbation]) -> float:
        return before / step_s(reduce(_turned, perturbations, model))

    best = max(timed, key=lambda perturbation: gain([perturbation]))
    if gain([best]) > MIN_HELP:
        return best.bottleneck
    needed = timed
    if gain(needed) <= MIN_HELP:
        return "the time between kernels"
    for perturbation in sorted(timed, key=lambda it: gain([it])):
        others = [it for it in needed if it is not perturbation]
        needed = others if gain(others) > MIN_HELP else needed
    return f"{_listed([perturbation.bottleneck for perturbation in needed])} together"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def helps(model: CostModel, objective: Objective) -> tuple[Sensitivity, ...]:
    """Return the gain of twice as much of a resource, a smaller format or more processes; best first.

    If the model has several processes already, more processes are listed even as a loss.
    """
    processes = scaling_helps(_cost, model, objective)
    if model.sharing == ALONE:
        processes = tuple(it for it in processes if it.speedup >= MIN_HELP)
    return tuple(sorted((*helps_by(_cost, model, objective), *processes), key=lambda help_: -help_.speedup))


def helps_by(
    cost: Callable[[CostModel, Objective], float], model: CostModel, objective: Objective
) -> tuple[Sensitivity, ...]:
    """Return the same, where `cost` returns the best policy's cost, or raises a CapacityError."""
    try:
        before = cost(model, objective)
    except CapacityError:  # fits only between the points of the coarse grid
        return ()
    changes = {perturbation.change: _turned(model, perturbation) for perturbation in _perturbations(model)} | dict(
        _smaller_formats(model)
    )
    doubled = {tier: size * (2 if tier == RAM else 1) for tier, size in objective.memory_limits.items()}
    found = []
    for change, changed in changes.items():
        relaxed = replace(objective, memory_limits=doubled) if change == MORE_MEMORY else objective
        try:
            speedup = before / cost(changed, relaxed)
        except CapacityError:
            continue
        if speedup >= MIN_HELP:
            found.append(Sensitivity(change=change, speedup=round(speedup, 3)))
    return tuple(sorted(found, key=lambda help_: -help_.speedup))


def _cost(model: CostModel, objective: Objective) -> float:
    timed = replace(objective, goal="throughput") if objective.goal == "memory" else objective
    return cost_per_token(*search_devices(model, timed, [model.num_devices], COARSE), timed.goal)


def _turned(model: CostModel, perturbation: Perturbation) -> CostModel:
    return replace(model, machine=perturbation.turn(model.machine))


def _perturbations(model: CostModel) -> Iterator[Perturbation]:
    yield Perturbation("RAM that is read twice as fast", "reading from RAM", lambda it: _faster_memory(it, RAM))
    yield Perturbation("a processor that computes twice as fast", "arithmetic", lambda it: _faster_processor(it, RAM))
    yield Perturbation(MORE_MEMORY, "", lambda it: _larger(it, RAM))
    if model.machine.has(DISK):
        yield Perturbation("a disk that is read twice as fast", "reading from disk", lambda it: _faster_link(it, DISK))
    if model.has_device:
        yield Perturbation(
            "device memory that is read twice as fast",
            "reading from device memory",
            lambda it: _faster_memory(it, DEVICE),
        )
        yield Perturbation(
            "a device that computes twice as fast", "arithmetic on the device", lambda it: _faster_processor(it, DEVICE)
        )
        yield Perturbation("twice the device memory", "", lambda it: _larger(it, DEVICE))
        yield Perturbation(
            "a link to the device twice as fast", "the link to the device", lambda it: _faster_link(it, RAM)
        )


def _smaller_formats(model: CostModel) -> Iterator[tuple[str, CostModel]]:
    if model.has_device:  # which computes in floats
        return
    formats = model.costs.formats
    bits = BITS_PER_VALUE.get(formats.matrices, 16.0)
    for smaller in QUANTIZED:
        if BITS_PER_VALUE[smaller] < bits:
            changed = replace(formats, matrices=smaller, embeddings="int8")
            yield (
                f"weights in {smaller} (--quantize {smaller})",
                replace(model, costs=replace(model.costs, formats=changed)),
            )


def _with_levels(machine: Machine, names: Sequence[str], change: Callable[[MemoryLevel], MemoryLevel]) -> Machine:
    levels = tuple(change(level) if level.name in names else level for level in machine.levels)
    return replace(machine, levels=levels)


def _larger(machine: Machine, name: str) -> Machine:
    names = (RAM, PINNED) if name == RAM else (name,)
    return _with_levels(machine, names, lambda level: replace(level, capacity_bytes=2 * level.capacity_bytes))


def _faster_memory(machine: Machine, name: str) -> Machine:
    return _with_levels(machine, [name], lambda level: replace(level, read_bytes_per_s=2 * level.read_bytes_per_s))


def _faster_processor(machine: Machine, name: str) -> Machine:
    def faster(level: MemoryLevel) -> MemoryLevel:
        processor = level.processor
        assert processor is not None, "a level that computes"
        peaks = tuple((dtype, 2 * flops) for dtype, flops in processor.peak_flops_per_s)
        halves = {name: getattr(processor, name) / 2 for name in ("launch_s", "pass_s", "token_s", "stop_s", "load_s")}
        return replace(level, processor=dataclasses.replace(processor, peak_flops_per_s=peaks, **halves))

    return _with_levels(machine, [name], faster)


def _faster_link(machine: Machine, source: str) -> Machine:
    """Double the links from a level; for RAM also those through pinned memory and back."""
    sources = {source} if source == DISK else {RAM, PINNED, DEVICE}

    def faster(link: Link) -> Link:
        rates = tuple(
            LinkRate(transfer_bytes=it.transfer_bytes, bytes_per_s=2 * it.bytes_per_s, depth=it.depth)
            for it in link.rates
        )
        return replace(link, rates=rates) if link.source in sources else link

    return replace(machine, links=tuple(faster(link) for link in machine.links))
