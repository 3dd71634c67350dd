"""Which rank has which experts: a table that every rank holds, so that all agree without talking.

An expert may have several homes (replicas); the token's index alone decides which of them serves a token. `eplb.py`
places experts by load. Knows neither weights nor links.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import ConfigError
from moeflow.core.truncated_repr import truncated_repr
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
                        f"expert {expert} of layer {layer} is placed on ranks {truncated_repr(list(ranks))}: "
                        "name at least one "
                        f"of 0 to {self.num_ranks - 1}, in ascending order and none twice"
                    )

    @classmethod
    def by_index(cls, num_layers: int, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Place blocks of experts in the order of their index, as even as they can be. Source: ExpertFlow 3.3."""
        homes = tuple((rank,) for rank, block in enumerate(even_blocks(num_experts, num_ranks)) for _ in block)
        return cls(num_ranks, (homes,) * num_layers)

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
    """Return how many experts of a layer a rank may have, with `num_redundant` replicas."""
    return ceil((num_experts + num_redundant) / num_ranks)
