"""The statistics of several engines as those of one: of replicas side by side, and of engines one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import msgspec

from moeflow.core.engine_messages import EngineStats, SpeculatorStats

_NAMES: Final = tuple(field.name for field in msgspec.structs.fields(EngineStats))
_POOLS: Final = ("kv_blocks_total",)  # a size, though its name ends as those of what only grows
_LARGEST: Final = (  # where a sum has no meaning
    "memory_limit_bytes",
    "rank_imbalance",
    "prompt_cache_limit_bytes",
    "prompt_cache_bytes",
)
_TOTALS: Final = tuple(name for name in _NAMES if name.endswith("_total") and name not in _POOLS)
_BY_DEPTH: Final = ("trees_total",)  # lists whose members are added up


def totals_of(stats: EngineStats) -> EngineStats:
    """Return what of a snapshot is true after its engine's death."""
    return EngineStats(**{name: getattr(stats, name) for name in _TOTALS}, speculators=stats.speculators)


def with_totals(stats: EngineStats, totals: EngineStats) -> EngineStats:
    """Return a snapshot with the totals of earlier engines added to its own."""
    sums = {name: _together(name, [getattr(stats, name), getattr(totals, name)]) for name in _TOTALS}
    speculators = _of_all([*stats.speculators, *totals.speculators])
    return msgspec.structs.replace(stats, **sums, speculators=speculators)


def summed(each: Sequence[EngineStats]) -> EngineStats:
    """Return the combined snapshot of all replicas: text and flags of any one hold for all."""
    sums = {name: _together(name, [getattr(stats, name) for stats in each]) for name in _NAMES}
    sums["speculators"] = _of_all(sums["speculators"])
    return EngineStats(**sums | {name: max(getattr(stats, name) for stats in each) for name in _LARGEST})


def _together(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], str):
        return next(filter(None, values), "")
    if name in _BY_DEPTH:
        return _added(values)
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    return any(values) if isinstance(values[0], bool) else sum(values)


def _of_all(speculators: Sequence[SpeculatorStats]) -> list[SpeculatorStats]:
    """Return one model for each name, with the totals of all; the first decides whether it is idle."""
    found: dict[str, SpeculatorStats] = {}
    for one in speculators:
        known = found.get(one.name)
        found[one.name] = (
            one
            if known is None
            else msgspec.structs.replace(
                known,
                drafted_total=_added([known.drafted_total, one.drafted_total]),
                accepted_total=_added([known.accepted_total, one.accepted_total]),
                drafting_s_total=known.drafting_s_total + one.drafting_s_total,
            )
        )
    return list(found.values())


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return sums place by place; an engine that has not told anything yet has an empty list."""
    return [sum(values) for values in zip_longest(*lists, fillvalue=0)]
