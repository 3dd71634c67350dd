"""Finds the best policy for a device that holds some experts of each layer, while the host computes all others."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, RAM
from moeflow.core.plan import Policy
from moeflow.core.units import format_bytes
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.hybrid_costs import CHUNK_TOKENS, HybridCosts, hybrid_policy_of
from moeflow.planner.costs.hybrid_sizes import Passes
from moeflow.planner.resident_experts import host_slots
from moeflow.planner.search.objective import Objective, best_of, capacities, grid


def search_hybrid(model: CostModel, objective: Objective, ratio: float) -> Policy | None:
    """Return the best policy; `ratio` is the step between numbers of sequences. None: no such policy fits."""
    if not isinstance(model, HybridCosts) or model.num_devices > 1:
        return None
    numbers = [objective.most] if objective.num_sequences is not None else grid(1, objective.most, ratio)
    found: list[Policy] = []
    for number in numbers:
        policy = hybrid_policy(model, objective, number)
        if policy is None:
            break
        found.append(policy)
    return best_of(model, found, objective)


def with_host_slots(model: HybridCosts, objective: Objective) -> HybridCosts:
    """Return the costs with as many slots in main memory as fit, if a disk has all other experts."""
    passes = Passes(max(CHUNK_TOKENS, objective.most), objective.most)
    have_bytes = capacities(model, objective.memory_limits)[RAM] - ceil(model.process_bytes)
    try:
        number = host_slots(model.sizes, have_bytes, passes) if model.machine.has(DISK) else None
    except CapacityError:
        number = None  # too few: then all experts do not fit either
    return replace(model, num_host_slots=number)


def hybrid_policy(model: HybridCosts, objective: Objective, number: int) -> Policy | None:
    """Return the policy for so many sequences; None: they do not fit.

    As many experts are on the device as fit, or as few as keep it from being slower than the host.
    """
    have, asked = capacities(model, objective.memory_limits), hybrid_policy_of(model.costs, number, 0)
    most = model.sizes.most_gpu_experts(have[DEVICE], Passes(asked.chunk_tokens, number), model.kv_bytes(number))
    if most is None or model.memory_of(asked)[RAM] > have[RAM]:
        return None
    best = model.best_gpu_experts(number, most)
    return hybrid_policy_of(model.costs, number, best, on_disk=model.on_disk(best))


def no_hybrid_room(model: HybridCosts, objective: Objective) -> CapacityError:
    """Return the error for a machine that is too small, with the need of the fewest sequences."""
    have = capacities(model, objective.memory_limits)
    need = model.memory_of(hybrid_policy_of(model.costs, objective.num_sequences or 1, 0))
    names = {DEVICE: "device memory", RAM: "memory"}
    short = [
        f"{format_bytes(ceil(need[tier]))} of {name}, but there are {format_bytes(have[tier])}"
        for tier, name in names.items()
        if need[tier] > have[tier]
    ]
    return CapacityError(
        f"the model needs {' and '.join(short)}, where the host computes all experts: use a smaller weight format "
        "(--quantize int4), shorter requests, or more memory"
    )
