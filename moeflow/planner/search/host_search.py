"""Finds the best policy of a machine without a device: tries numbers of sequences per decoding step.

For a number of sequences there is one policy. Fewer experts on disk are faster, so as many as fit stay in memory. The
search is then over whole numbers, and each costs a prediction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeflow.core.hardware import DISK, RAM
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import CostModel, IntegerPolicy
from moeflow.planner.search.objective import KEPT_SPEED, Objective, capacities, cost_per_token, grid, too_little

ALL_UP_TO: Final = 32  # sequences: each number is tried, then a grid
_HALVINGS: Final = 24  # until a share of the experts is exact to six places


def search_host(model: CostModel, objective: Objective, ratio: float) -> Policy:
    """Return the best policy; `ratio` is the step between large numbers of sequences.

    Raises: CapacityError if none fits.
    """
    fixed = objective.num_sequences
    numbers = [objective.most] if fixed is not None else _numbers(model, objective, ratio)
    found = [policy for number in numbers if (policy := host_policy(model, objective, number)) is not None]
    if not found:
        raise too_little(model, objective, [IntegerPolicy(number, 1, False) for number in numbers or [1]])
    goal = "latency" if objective.goal == "latency" else "throughput"
    best = min(found, key=lambda policy: cost_per_token(model, policy, goal))
    if objective.goal != "memory":
        return best
    limit = cost_per_token(model, best, goal) / KEPT_SPEED
    smaller = [it for policy in found if (it := _slowed(model, policy, limit)) is not None]
    return min(smaller, key=lambda policy: model.predict(policy).memory[RAM])


def host_policy(model: CostModel, objective: Objective, batch_size: int) -> Policy | None:
    """Return the policy for so many sequences, with as many experts in memory as fit; None: too few fit."""
    limits, memory = capacities(model, objective.memory_limits), model.memory(IntegerPolicy(batch_size, 1, False))
    missing = max(memory[RAM].const - limits[RAM], 0.0)
    experts_bytes = model.costs.experts_bytes
    on_disk = round(missing / experts_bytes + 5e-7, 6) if missing and experts_bytes else 0.0
    if (missing and not experts_bytes) or on_disk > _max_on_disk(model):
        return None
    if on_disk * experts_bytes > limits[DISK]:
        return None
    return Policy(
        batch_size=batch_size,
        micro_batch=batch_size,
        attention_on_device=False,
        ffn_on_device=False,
        experts_on_disk=on_disk,
        chunk_tokens=model.chunk_tokens,
    )


def _max_on_disk(model: CostModel) -> float:
    return 1.0 - model.min_experts if model.machine.has(DISK) else 0.0


def _numbers(model: CostModel, objective: Objective, ratio: float) -> list[int]:
    """Return numbers of sequences that fit, the largest of them included."""
    largest = largest_batch(model, objective)
    return [*range(1, min(largest + 1, ALL_UP_TO)), *grid(ALL_UP_TO, largest, ratio)]


def largest_batch(model: CostModel, objective: Objective) -> int:
    """Return the largest number of sequences that fit; 0: none fits."""
    low, high = 0, objective.most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if host_policy(model, objective, middle) is None else (middle, high)
    return low


def _slowed(model: CostModel, policy: Policy, limit: float) -> Policy | None:
    """Return the same with as many experts on disk as a cost allows; None if it costs more already."""
    if cost_per_token(model, policy, "throughput") > limit:
        return None
    low, high = policy.experts_on_disk, _max_on_disk(model) if model.costs.experts_bytes else 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        slower = replace(policy, experts_on_disk=middle)
        low, high = (middle, high) if cost_per_token(model, slower, "throughput") <= limit else (low, middle)
    return replace(policy, experts_on_disk=low)
