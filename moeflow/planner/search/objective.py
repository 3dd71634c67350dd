"""The goal of a search: the quantity that it minimises, and its limits of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, RAM
from moeflow.core.plan import Policy
from moeflow.core.units import format_bytes
from moeflow.planner.costs.cost_model import CostModel, IntegerPolicy

MAX_SEQUENCES: Final = 1 << 15
KEPT_SPEED: Final = 0.9  # of the best speed, for the plan with the least memory
FINE: Final = 1.3  # step of the first grid of micro-batches or sequences: finds the best
COARSE: Final = 2.0  # good enough to compare machines
WHY_SO_MANY: Final = {  # sequences in a decoding step, by goal
    "throughput": "most tokens a second for this workload",
    "latency": "as few as arrive: each more makes every step longer",
    "memory": "least memory at nearly the best speed",
}
_SLACK: Final = 1e-5  # of a constraint, relative: the solver's tolerance, and shares rounded to six places


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The goal and the limits of a search."""

    goal: str = "throughput"  # or "latency": least time a step; or "memory": least bytes at nearly the best speed
    num_sequences: int | None = None  # per decoding step; None: the best number
    max_sequences: int = MAX_SEQUENCES
    memory_limits: Mapping[str, int] = dataclasses.field(default_factory=dict)  # tier -> bytes, below its capacity
    can_stream: bool = True  # weights to a device that does not hold them
    can_host: bool = True  # some experts, for a device that streams the others

    @property
    def most(self) -> int:
        """The most sequences of a decoding step."""
        return min(self.num_sequences or self.max_sequences, MAX_SEQUENCES)


def cost_per_token(model: CostModel, policy: Policy, goal: str) -> float:
    """Return the minimised quantity: seconds per generated token, or for "latency" seconds per step."""
    prediction = model.predict(policy)
    return prediction.decode_s if goal == "latency" else 1.0 / prediction.tokens_per_s


def best_of(model: CostModel, found: Sequence[Policy], objective: Objective) -> Policy | None:
    """Return the best policy, or for "memory" the first one of nearly its speed; None: there is none.

    Policies are in ascending order of their sequences.
    """
    if not found:
        return None
    goal = "latency" if objective.goal == "latency" else "throughput"
    best = min(found, key=lambda policy: cost_per_token(model, policy, goal))
    if objective.goal != "memory":
        return best
    limit = cost_per_token(model, best, goal) / KEPT_SPEED
    return next(policy for policy in found if cost_per_token(model, policy, goal) <= limit)


def capacities(model: CostModel, limits: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that each tier may hold."""
    tiers = {level.name: level.capacity_bytes for level in model.machine.levels}
    tiers.setdefault(DISK, 0)
    return {tier: min(size, limits.get(tier, size)) for tier, size in tiers.items()}


def fits(model: CostModel, policy: Policy, limits: Mapping[str, int]) -> bool:
    """Return whether a policy fits in all tiers."""
    most = capacities(model, limits)
    used = model.predict(policy).memory
    return all(used[tier] <= most[tier] * (1 + _SLACK) for tier in used)


def grid(low: int, high: int, ratio: float) -> list[int]:
    """Return whole numbers from `low` to `high`, each at least 1 and about `ratio` times larger than the previous."""
    numbers, value = [], float(low)
    while value < high:
        numbers.append(round(value))
        value = max(value * ratio, value + 1)
    return [*dict.fromkeys(numbers), high] if high >= low and (not numbers or numbers[-1] != high) else numbers


def too_little(model: CostModel, objective: Objective, choices: Iterable[IntegerPolicy]) -> CapacityError:
    """Return the error with the missing memory of the smallest choice."""
    have = capacities(model, objective.memory_limits)
    smallest = min(choices, key=lambda choice: (choice.batch_size, choice.micro_batch))
    memory = model.memory(smallest)
    needs = model.least_memory(smallest, memory)
    if model.has_device and all(need <= have[tier] for tier, need in needs.items()):
        # Each tier suffices with shares that another does not allow.
        needs = {tier: each.at(model.resident_share(0), float(smallest.keeps_kv)) for tier, each in memory.items()}
    names = {RAM: "memory", DEVICE: "device memory", DISK: "disk"}
    short = [
        f"{format_bytes(need)} of {names[tier]} ({format_bytes(have[tier])} "
        f"{'allowed' if tier in objective.memory_limits else 'available'})"
        for tier, need in needs.items()
        if need > have[tier]
    ]
    total = sum(linear.const for linear in memory.values())
    tiers = " and ".join(f"{format_bytes(have[tier])} of {names[tier]}" for tier in memory)
    need = " and ".join(short) or f"{format_bytes(total)}, but there are {tiers}"
    fewer = "fewer sequences, " if smallest.batch_size > 1 else ""
    smaller = "the processor alone (--device cpu), which also computes with experts from disk"
    if not model.has_device:
        smaller = "a smaller weight format (--quantize)"
    return CapacityError(
        f"{_sequences(smallest.batch_size, model.workload.max_tokens)} at least {need}. Take shorter prompts or "
        f"answers, {fewer}{smaller} or --kv-dtype, or more memory"
    )


def _sequences(number: int, num_tokens: int) -> str:
    one = f"one sequence of {num_tokens} tokens needs"
    return one if number == 1 else f"{number} sequences of {num_tokens} tokens need"
