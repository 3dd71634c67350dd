"""Chooses how many of a machine's devices share a model, after ExpertFlow 3.3, and the best policy for them.

Devices share each layer (tensor parallelism) where the model exceeds the memory of one. The fewest that hold it do. If
none do, all stream weights in a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from moeflow.core.errors import CapacityError
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.search.objective import FINE, Objective, cost_per_token
from moeflow.planner.search.resident_search import search_resident
from moeflow.planner.search.search import search, search_policy


class Degrees(msgspec.Struct, frozen=True):
    """How many devices, or groups of them, take part in each kind of parallelism; 1: it is not used."""

    data: int  # batches on groups of devices of their own
    tensor: int  # devices that share each layer
    expert: int  # of these, with whole experts each
    pipeline: int  # stages of layers; more than devices: batches in flight take turns

    @property
    def text(self) -> str:
        """All of them, for a plan."""
        return f"data {self.data}, tensor {self.tensor}, expert {self.expert}, pipeline {self.pipeline}"


def parallel_degrees(
    *, num_batches: int, num_devices: int, num_experts: int, block_experts: int, num_holding: int, num_stages: int = 1
) -> Degrees:
    """Return the degrees for P batches in flight and D devices (ExpertFlow 3.3, equations 3.1 and 3.2).

    `num_holding` devices hold a model; `block_experts` are those of a layer that one device computes as a block;
    `num_stages` are set by hand.
    """
    several = num_devices > 1
    return Degrees(
        data=min(num_batches, num_devices // num_holding) if several and num_batches > 1 else 1,
        tensor=num_holding if several else 1,
        expert=num_holding if several and num_experts > block_experts else 1,
        pipeline=num_stages,
    )


def search_devices(
    model: CostModel, objective: Objective, numbers: Sequence[int], ratio: float = FINE
) -> tuple[CostModel, Policy]:
    """Return the best policy of one device, or of as many as share the model better, and the costs it was found with.

    `numbers` are the numbers of devices that can share it, ascending. Raises: as `search`.
    """
    alone: tuple[CostModel, Policy] | None = None
    refused: CapacityError | None = None
    if numbers[0] == 1:
        try:
            alone = search(model, objective, ratio)
        except CapacityError as error:
            refused = error
    if alone is not None and alone[1].is_resident:
        return alone
    found = [] if alone is None else [alone]
    shared = _shared(model, objective, [number for number in numbers if number > 1], ratio)
    if shared is not None:
        found.append(shared)
    if not found:
        raise refused or CapacityError("no number of the machine's devices has room for this model: take a smaller one")
    goal = "latency" if objective.goal == "latency" else "throughput"
    return min(found, key=lambda each: cost_per_token(each[0], each[1], goal))


def _shared(
    model: CostModel, objective: Objective, numbers: Sequence[int], ratio: float
) -> tuple[CostModel, Policy] | None:
    """Return the policy of the fewest devices that hold the model, else of a pipeline over all; None: nothing fits."""
    of_numbers = [replace(model, num_devices=number) for number in numbers]
    limited = replace(objective, num_sequences=1) if objective.goal == "latency" else objective
    for shared in of_numbers:
        if policy := search_resident(shared, limited, ratio):
            return shared, policy
    if not of_numbers or not objective.can_stream:
        return None
    try:
        policy = search_policy(of_numbers[-1], replace(limited, can_host=False), ratio)
    except CapacityError:
        return None
    return of_numbers[-1], policy
