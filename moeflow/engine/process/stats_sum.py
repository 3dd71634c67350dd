"""The statistics of several engines as those of one: of replicas side by side, and of engines one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from moeflow.engine.messages import EngineStats

_NAMES: Final = tuple(field.name for field in msgspec.structs.fields(EngineStats))
_POOLS: Final = ("kv_blocks_total",)  # a size, though its name ends as those of what only grows
_LARGEST: Final = ("memory_limit_bytes", "rank_imbalance")  # of which a sum would mean nothing
_TOTALS: Final = tuple(name for name in _NAMES if name.endswith("_total") and name not in _POOLS)


def totals_of(stats: EngineStats) -> EngineStats:
    """Return what of a snapshot is true after its engine's death."""
    return EngineStats(**{name: getattr(stats, name) for name in _TOTALS})


def with_totals(stats: EngineStats, totals: EngineStats) -> EngineStats:
    """Return a snapshot with the totals of earlier engines added to its own."""
    sums = {name: getattr(totals, name) + getattr(stats, name) for name in _TOTALS}
    return msgspec.structs.replace(stats, **sums)


def summed(each: Sequence[EngineStats]) -> EngineStats:
    """Return the snapshot of all replicas together: what one of them is, in words or yes or no, holds of all."""
    sums = {name: _together([getattr(stats, name) for stats in each]) for name in _NAMES}
    return EngineStats(**sums | {name: max(getattr(stats, name) for stats in each) for name in _LARGEST})


def _together(values: list[Any]) -> Any:
    if isinstance(values[0], str):
        return next(filter(None, values), "")
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    return any(values) if isinstance(values[0], bool) else sum(values)
