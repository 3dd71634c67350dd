"""The gain of more processes: twice the ranks, one more engine, or another machine of the same kind.

Several engines share one machine, and are as fast as it permits. A second machine loses only the ranks' cost of TCP, as
measured on this machine: a network between them is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import RAM
from moeflow.core.parallel_config import (
    EXPERT_LAYOUTS,
    FORECAST_LAYOUTS,
    WHOLE,
    ParallelConfig,
)
from moeflow.core.plan import Sensitivity
from moeflow.planner.choices.rank_limits import why_not_shared
from moeflow.planner.choices.refused_settings import RANKS, why_refused
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.planner.search.objective import Objective

Cost = Callable[[CostModel, Objective], float]  # of an engine's token, or of its step


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    sharings: tuple[Sharing, ...]  # the best of these counts
    num_machines: int = 1


def scaling_helps(cost: Cost, model: CostModel, objective: Objective) -> tuple[Sensitivity, ...]:
    """Return the gain of more processes, losses included; best first. Empty for a device."""
    if model.has_device:
        return ()
    try:
        before = cost(model, objective)
    except CapacityError:  # fits only between the points of the coarse grid
        return ()
    found = []
    for change in _changes(model):
        speedups = [speedup for it in change.sharings if (speedup := _speedup(cost, model, objective, it, before))]
        if speedups:
            found.append(Sensitivity(change=change.name, speedup=round(max(speedups) * _engines(change, objective), 3)))
    return tuple(sorted(found, key=lambda help_: -help_.speedup))


def _engines(change: _Change, objective: Objective) -> int:
    """Return the number of machines if their engines share nothing: it multiplies the throughput."""
    shares_nothing = all(it.parallel is None or not it.parallel.is_spread for it in change.sharings)
    return change.num_machines if shares_nothing and objective.goal != "latency" else 1


def _speedup(cost: Cost, model: CostModel, objective: Objective, sharing: Sharing, before: float) -> float | None:
    """Return the speedup of all engines of this machine, or for latency of one; None: they do not fit."""
    number, now = sharing.num_replicas, model.sharing.num_replicas
    limit = objective.memory_limits.get(RAM, model.machine.level(RAM).capacity_bytes)
    limits = {**objective.memory_limits, RAM: limit * now // number}
    changed = replace(model, sharing=sharing, min_experts=1.0 if sharing.parallel else model.min_experts)
    try:
        after = cost(changed, replace(objective, memory_limits=limits))
    except CapacityError:
        return None
    return before / after * (1.0 if objective.goal == "latency" else number / now)


def _changes(model: CostModel) -> Iterator[_Change]:
    sharing = model.sharing
    parallel, number = sharing.parallel, sharing.num_replicas
    ranks = 1 if parallel is None else parallel.num_ranks
    is_spread = parallel is not None and parallel.is_spread
    twice = tuple(replace(sharing, parallel=it) for it in rank_ways(model, 2 * ranks, is_spread=is_spread))
    if is_spread:
        yield _Change(f"twice the ranks (--ranks {2 * ranks}), a machine each", twice)
        return
    yield _Change(f"{2 * ranks} ranks on this machine (--ranks {2 * ranks})", twice)
    if number == 1 and ranks == 1:
        spread = tuple(replace(sharing, parallel=it) for it in rank_ways(model, 2, is_spread=True))
        yield _Change("a second such machine, as a rank (--listen-ranks)", spread, 2)
    yield _Change(f"an engine more (--replicas {number + 1})", (replace(sharing, num_replicas=number + 1),))
    yield _Change("a second such machine, which serves on its own", (sharing,), 2)


def rank_ways(model: CostModel, number: int, *, is_spread: bool) -> Iterator[ParallelConfig]:
    """Yield the ways to share the model among so many ranks."""
    shape, now = model.costs.shape, model.sharing.parallel or ParallelConfig(num_ranks=number)
    if why_refused(shape, RANKS):
        return
    for attention, experts in product(
        FORECAST_LAYOUTS, EXPERT_LAYOUTS if shape.routing.num_experts else EXPERT_LAYOUTS[:1]
    ):
        made = replace(
            now,
            num_ranks=number,
            expert_layout=experts,
            attention_layout=attention,
            num_redundant_experts=now.num_redundant_experts if experts == WHOLE else 0,
            is_spread=is_spread,
        )
        if not why_not_shared(made, shape):
            yield made
