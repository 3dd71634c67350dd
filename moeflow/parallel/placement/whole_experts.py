"""Which whole experts the ranks that share some layers have: at first, as loads call for it, and how many at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from moeflow.core.parallel_config import WHOLE, ParallelConfig
from moeflow.core.sha256 import sha256
from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.layouts import place_experts
from moeflow.parallel.placement.placement import ExpertPlacement, Loads, slots_per_rank


@dataclass(frozen=True, slots=True)
class WholeExperts:
    """A layout of whole experts, in use."""

    num_experts: int  # of a layer
    at_first: ExpertPlacement
    place: Callable[[Loads], ExpertPlacement] | None  # for loads [layers, E]; None: experts stay where they are
    most_held: Sequence[int]  # by rank: of a layer, at any time but while one is on its way

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        num_ranks: int,
        num_layers: int,
        num_experts: int,
        recorded: Loads | None = None,
    ) -> WholeExperts:
        """Return what so many ranks have of so many layers, at first as `recorded` loads [layers, E] call for it.

        Raises: ConfigError if the layout cannot be used.
        """
        if parallel.expert_layout != WHOLE:
            return cls.added(parallel.expert_layout, num_ranks, num_layers, num_experts)
        if parallel.moves_experts:
            return cls.moving(num_ranks, num_layers, num_experts, parallel.num_redundant_experts, recorded)
        return cls.staying(num_ranks, num_layers, num_experts)

    @classmethod
    def staying(cls, num_ranks: int, num_layers: int, num_experts: int) -> WholeExperts:
        """Return blocks by index."""
        placement = ExpertPlacement.by_index(num_layers, num_experts, num_ranks)
        return cls(num_experts, placement, None, _most_held(ExpertPlacement.by_index(1, num_experts, num_ranks)))

    @classmethod
    def moving(
        cls,
        num_ranks: int,
        num_layers: int,
        num_experts: int,
        num_redundant: int = 0,
        recorded: Loads | None = None,
    ) -> WholeExperts:
        """Return experts that are moved or replicated for equal loads of the ranks; at first blocks by index, or as
        `recorded` loads call for it."""
        slots = slots_per_rank(num_experts, num_ranks, num_redundant)
        by_load = partial(place_by_load, num_ranks=num_ranks, slots_per_rank=slots, max_replicas=num_redundant)
        by_index = ExpertPlacement.by_index(num_layers, num_experts, num_ranks)
        at_first = by_index if recorded is None else by_load(recorded)
        return cls(num_experts, at_first, by_load, (slots,) * num_ranks)

    @classmethod
    def added(cls, layout: str, num_ranks: int, num_layers: int, num_experts: int) -> WholeExperts:
        """Return what another package's layout says. Raises: ConfigError."""
        place = partial(place_experts, layout, num_ranks=num_ranks)
        at_first = place(np.ones((num_layers, num_experts)))
        return cls(num_experts, at_first, place, _most_held(at_first))

    def fits(self, placement: ExpertPlacement, layer: int) -> bool:
        """Return whether a placement of a layer fits the ranks' memory."""
        return all(held <= most for held, most in zip(placement.num_held_of(layer), self.most_held, strict=True))

    @property
    def digest(self) -> str:
        """What tells the first placement from any other."""
        return sha256(repr(self.at_first.homes).encode()).hexdigest()[:16]


def _most_held(placement: ExpertPlacement) -> tuple[int, ...]:
    counts = [placement.num_held_of(layer) for layer in range(len(placement.homes))]
    return tuple(map(max, zip(*counts, strict=True))) or (0,) * placement.num_ranks
