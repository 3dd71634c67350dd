"""Layouts of an MoE layer's experts over ranks, by name. A new one is a function, and an entry point of its package.

Such a function assigns whole experts to ranks for given loads. It is called at the start with equal loads, and again
with measured loads. It must return the same on every rank. It cannot change an answer: a token's experts are added in
ascending order, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Final, TypeAlias

from moeflow.core.errors import ConfigError
from moeflow.core.extensions import ExtensibleTable
from moeflow.core.parallel_config import SLICED, WHOLE
from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.placement import ExpertPlacement, Loads

PlaceExperts: TypeAlias = Callable[[Loads, int], ExpertPlacement]  # of loads [layers, E], of any unit; number of ranks


def _by_index(loads: Loads, num_ranks: int) -> ExpertPlacement:
    num_layers, num_experts = loads.shape
    return ExpertPlacement.by_index(num_layers, num_experts, num_ranks)


def _by_load(loads: Loads, num_ranks: int) -> ExpertPlacement:
    """Leave each rank a slot more than it needs, for replicas."""
    return place_by_load(loads, num_ranks, ceil(loads.shape[1] / num_ranks) + 1)


REPLICATED: Final = "replicated"
CAPACITY: Final = "capacity"
CAPACITY_DROPLESS: Final = "capacity-dropless"
_OWN: Final[dict[str, PlaceExperts | None]] = {  # None: no ranks that have whole experts
    REPLICATED: None,
    WHOLE: _by_index,
    "expert-by-load": _by_load,
    CAPACITY: None,
    CAPACITY_DROPLESS: None,
    SLICED: None,
}
LAYOUTS: Final = ExtensibleTable("moeflow.layouts", _OWN)
ADDED_LAYOUTS: Final = tuple(name for name in LAYOUTS if name not in _OWN)  # by other packages


def place_experts(layout: str, loads: Loads, num_ranks: int) -> ExpertPlacement:
    """Return where a layout has whole experts. Shapes: loads [layers, E].

    Raises: ConfigError if the layout is unknown or returns no placement of these experts.
    """
    place = LAYOUTS.get(layout)
    if place is None:
        raise ConfigError(
            f"there is no layout {layout!r} of whole experts here: install the package that adds it, or use another"
        )
    found = place(loads, num_ranks)
    if not isinstance(found, ExpertPlacement):
        raise ConfigError(
            f"the layout {layout!r} returned a {type(found).__name__} and has to return an ExpertPlacement: mend its "
            "package, or use another"
        )
    has, wanted = (found.num_ranks, *map(len, found.homes)), (num_ranks, *(loads.shape[1],) * loads.shape[0])
    if has != wanted:
        raise ConfigError(
            f"the layout {layout!r} placed [experts of each layer] {list(has[1:])} on {has[0]} ranks, and was asked to "
            f"place {list(wanted[1:])} on {num_ranks}: fix its package, or use another"
        )
    return found
