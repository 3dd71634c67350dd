"""Places experts by load, as EPLB does it (DeepSeek, 2025): replicate the heaviest experts, then pack the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import ceil

from moeflow.core.errors import CapacityError
from moeflow.parallel.placement.placement import ExpertPlacement, Loads


def place_by_load(
    loads: Loads, num_ranks: int, slots_per_rank: int, max_replicas: int | None = None
) -> ExpertPlacement:
    """Return a placement with about equal loads of ranks, each with at most `slots_per_rank` experts of a layer.

    A layer has at most `max_replicas` further homes of its experts; None: as many as there are slots.
    Shapes: loads [layers, E], of any unit.
    Raises: CapacityError if there are fewer slots than experts.
    """
    num_experts = loads.shape[1]
    num_slots = num_ranks * slots_per_rank
    if num_slots < num_experts:
        raise CapacityError(
            f"{num_experts} experts of a layer need as many slots; {num_ranks} ranks of {slots_per_rank} have "
            f"{num_slots}: take at least {ceil(num_experts / num_ranks)} slots a rank, or more ranks"
        )
    num_more = num_slots - num_experts if max_replicas is None else min(max_replicas, num_slots - num_experts)
    layers = (_place_layer(layer, num_ranks, slots_per_rank, num_more) for layer in loads.tolist())
    return ExpertPlacement(num_ranks, tuple(layers))


def _place_layer(
    loads: Sequence[float], num_ranks: int, slots_per_rank: int, num_more: int
) -> tuple[tuple[int, ...], ...]:
    """Return one layer's homes, without replicas if replicas of equal share pack worse."""
    replicas = _replicate(loads, num_ranks, num_more)
    packings = [_pack(loads, number, num_ranks, slots_per_rank) for number in (replicas, [1] * len(loads))]
    return min(packings, key=lambda packing: packing.largest_load).homes()


def _pack(loads: Sequence[float], num_replicas: Sequence[int], num_ranks: int, slots_per_rank: int) -> _Packing:
    """Put the heaviest on first."""
    shares = [load / number for load, number in zip(loads, num_replicas, strict=True)]
    packing = _Packing(shares, num_ranks, slots_per_rank)
    for expert in sorted(range(len(loads)), key=lambda expert: (-shares[expert], expert)):
        for _ in range(num_replicas[expert]):
            packing.add(expert)
    return packing


def _replicate(loads: Sequence[float], num_ranks: int, num_more: int) -> list[int]:
    """Return how many replicas each expert gets: each further one goes to the expert with the largest share."""
    num_replicas = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(min(num_more, len(loads) * (num_ranks - 1))):
        expert = heap[0][1]
        num_replicas[expert] += 1
        is_everywhere = num_replicas[expert] == num_ranks
        heapreplace(heap, (1.0 if is_everywhere else -loads[expert] / num_replicas[expert], expert))
    return num_replicas


class _Packing:
    """The ranks of one layer during packing."""

    def __init__(self, shares: Sequence[float], num_ranks: int, slots_per_rank: int) -> None:
        self._shares = shares
        self._slots = slots_per_rank
        self._held: list[set[int]] = [set() for _ in range(num_ranks)]
        self._loads = [0.0] * num_ranks

    def add(self, expert: int) -> None:
        """Put a replica on the least loaded rank with a free slot and without the expert, if there is one."""
        suited = [rank for rank, held in enumerate(self._held) if len(held) < self._slots and expert not in held]
        if suited:
            rank = min(suited, key=lambda rank: (self._loads[rank], rank))
            self._held[rank].add(expert)
            self._loads[rank] += self._shares[expert]

    @property
    def largest_load(self) -> float:
        """The load of the most loaded rank."""
        return max(self._loads)

    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Return each expert's ranks."""
        ranks: list[list[int]] = [[] for _ in self._shares]
        for rank, held in enumerate(self._held):
            for expert in held:
                ranks[expert].append(rank)
        return tuple(map(tuple, ranks))
