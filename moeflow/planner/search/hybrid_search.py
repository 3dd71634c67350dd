"""Finds the best policy for a device that holds some experts of each layer, while the host computes all others."""

from __future__ import annotations

from math import ceil
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.plan import Policy
from moeflow.core.units import format_bytes
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.hybrid_costs import HybridCosts
from moeflow.planner.search.objective import KEPT_SPEED, Objective, capacities, cost_per_token, grid

CHUNK_TOKENS: Final = 2048  # of a pass over prompts: a long prompt then copies its experts once


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
    if not found:
        return None
    goal = "latency" if objective.goal == "latency" else "throughput"
    best = min(found, key=lambda policy: cost_per_token(model, policy, goal))
    if objective.goal != "memory":
        return best
    limit = cost_per_token(model, best, goal) / KEPT_SPEED
    return next(policy for policy in found if cost_per_token(model, policy, goal) <= limit)


def hybrid_policy(model: HybridCosts, objective: Objective, number: int) -> Policy | None:
    """Return the policy for so many sequences; None: they do not fit.

    As many experts are on the device as fit, or as few as keep it from being slower than the host.
    """
    have, asked = capacities(model, objective.memory_limits), policy_of(model, number, 0)
    most = model.most_gpu_experts(asked, have[DEVICE])
    if most is None or model.memory_of(asked)[RAM] > have[RAM]:
        return None
    return policy_of(model, number, model.best_gpu_experts(number, most))


def policy_of(model: HybridCosts, number: int, num_gpu_experts: int) -> Policy:
    """Return the policy with so many sequences and experts of each layer on the device."""
    costs = model.costs
    share = num_gpu_experts / costs.shape.routing.num_experts
    return Policy(
        batch_size=number,
        micro_batch=number,
        attention_on_device=True,
        ffn_on_device=True,
        weights_on_device=1 - (1 - share) * costs.experts_bytes / costs.layers_bytes,
        kv_on_device=1.0,
        num_gpu_experts=num_gpu_experts,
        chunk_tokens=max(CHUNK_TOKENS, number),
    )


def no_hybrid_room(model: HybridCosts, objective: Objective) -> CapacityError:
    """Return the error for a machine that is too small, with the need of the fewest sequences."""
    have = capacities(model, objective.memory_limits)
    need = model.memory_of(policy_of(model, objective.num_sequences or 1, 0))
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
