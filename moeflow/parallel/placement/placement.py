"""Which rank has which experts: a table that every rank holds, so that all agree without talking.

An expert may have several homes (replicas); which one serves a token depends on the token's index alone. Placements are
made by index, or by load as EPLB does it (DeepSeek, 2025): replicate the heaviest experts, then pack. Knows neither
weights nor links.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import ceil
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.brief import brief
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.parallel.blocks import even_blocks

ExpertIds: TypeAlias = NDArray[np.integer]
Loads: TypeAlias = NDArray[np.floating]


class ExpertPlacement(msgspec.Struct, frozen=True):
    """The homes of all experts. Raises: ConfigError if an expert has none, or the table is no table."""

    num_ranks: int
    homes: tuple[tuple[tuple[int, ...], ...], ...]  # [layer][expert]: its ranks, ascending

    def __post_init__(self) -> None:
        if len({len(layer) for layer in self.homes}) > 1:
            raise ConfigError("a placement of experts has layers with different numbers of them: give each layer all")
        for layer, experts in enumerate(self.homes):
            for expert, ranks in enumerate(experts):
                if not ranks or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < self.num_ranks:
                    raise ConfigError(
                        f"expert {expert} of layer {layer} is placed on ranks {brief(list(ranks))}: name at least one "
                        f"of 0 to {self.num_ranks - 1}, in ascending order and none twice"
                    )

    @classmethod
    def by_index(cls, num_layers: int, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Place blocks of experts in the order of their index, as even as they can be. Source: ExpertFlow 3.3."""
        homes = tuple((rank,) for rank, block in enumerate(even_blocks(num_experts, num_ranks)) for _ in block)
        return cls(num_ranks, (homes,) * num_layers)

    @classmethod
    def by_load(
        cls, loads: Loads, num_ranks: int, slots_per_rank: int, max_replicas: int | None = None
    ) -> ExpertPlacement:
        """Place the experts so that ranks have about equal loads, each rank at most `slots_per_rank` of a layer.

        `max_replicas` are further homes of a layer's experts at most; None: as many as there are slots.
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
        return cls(
            num_ranks, tuple(_place_layer(layer, num_ranks, slots_per_rank, num_more) for layer in loads.tolist())
        )

    def num_held(self) -> list[int]:
        """Return how many experts of all layers each rank has, replicas included."""
        ranks = [rank for layer in self.homes for experts in layer for rank in experts]
        counts: list[int] = np.bincount(ranks, minlength=self.num_ranks).tolist()
        return counts

    def num_held_of(self, layer: int) -> list[int]:
        """Return how many of a layer's experts each rank has, likewise."""
        ranks = [rank for experts in self.homes[layer] for rank in experts]
        counts: list[int] = np.bincount(ranks, minlength=self.num_ranks).tolist()
        return counts

    def held_by(self, rank: int, layer: int) -> list[int]:
        """Return the experts of a layer that a rank has, ascending."""
        return [expert for expert, ranks in enumerate(self.homes[layer]) if rank in ranks]


class ServingTable:
    """Which rank computes which token's expert in one layer: of n homes, token t is served by number t modulo n."""

    def __init__(self, homes: Sequence[tuple[int, ...]]) -> None:
        """Take a layer's homes by expert."""
        self._num_homes = np.array([len(ranks) for ranks in homes])
        self._first = np.cumsum(self._num_homes) - self._num_homes
        self._flat = np.array([rank for ranks in homes for rank in ranks])

    def ranks(self, topk_ids: ExpertIds) -> ExpertIds:
        """Return the rank of each pair. Shapes: topk_ids [T, K] of all ranks' tokens -> [T, K]."""
        turn = np.arange(len(topk_ids))[:, None] % self._num_homes[topk_ids]
        ranks: ExpertIds = self._flat[self._first[topk_ids] + turn]
        return ranks


def slots_per_rank(num_experts: int, num_ranks: int, num_redundant: int) -> int:
    """Return how many experts of a layer a rank may have, where so many replicas have to find room."""
    return ceil((num_experts + num_redundant) / num_ranks)


def _place_layer(
    loads: Sequence[float], num_ranks: int, slots_per_rank: int, num_more: int
) -> tuple[tuple[int, ...], ...]:
    """Return one layer's homes: with so many replicas, or with none where replicas of equal share pack worse."""
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
    """Return how many replicas each expert gets: so many further ones go to whose share is largest by then."""
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
    """One layer's ranks while experts are put on them."""

    def __init__(self, shares: Sequence[float], num_ranks: int, slots_per_rank: int) -> None:
        self._shares = shares
        self._slots = slots_per_rank
        self._held: list[set[int]] = [set() for _ in range(num_ranks)]
        self._loads = [0.0] * num_ranks

    def add(self, expert: int) -> None:
        """Put a replica on the least loaded rank that has a free slot and not yet the expert, if there is one."""
        suited = [rank for rank, held in enumerate(self._held) if len(held) < self._slots and expert not in held]
        if suited:
            rank = min(suited, key=lambda rank: (self._loads[rank], rank))
            self._held[rank].add(expert)
            self._loads[rank] += self._shares[expert]

    @property
    def largest_load(self) -> float:
        """Of a rank."""
        return max(self._loads)

    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Return each expert's ranks."""
        ranks: list[list[int]] = [[] for _ in self._shares]
        for rank, held in enumerate(self._held):
            for expert in held:
                ranks[expert].append(rank)
        return tuple(map(tuple, ranks))
