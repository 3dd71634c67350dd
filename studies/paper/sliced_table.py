"""The published results of sliced experts beside kept records of `python -m studies.parallel`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.core.parallel_config import SLICED
from studies.parallel.figures import BASELINE, figures_of, speed_ups

USUAL_SKEW: Final = 0.6
Value = Callable[[Record], float]


def num_experts(record: Record) -> float:
    """Return the experts of the layer."""
    return float(record["layer"]["num_experts"])


def num_tokens(record: Record) -> float:
    """Return the tokens of a rank."""
    return float(max(record["num_tokens"]))


def skew(record: Record) -> float:
    """Return the share of tokens that go to hot experts."""
    return float(record["router_skew"])


def num_hot(record: Record) -> float:
    """Return the number of hot experts."""
    return float(record["num_experts_skew"])


@dataclass(frozen=True, slots=True)
class Sweep:
    """A figure: speed-up over one value, with others held."""

    title: str
    value: Value
    held: tuple[Value, ...]
    published: str


SWEEPS: Final = (
    Sweep("figure 6.2: experts", num_experts, (num_tokens, skew), "up to 6.84; 2.94 with 256"),
    Sweep("figure 6.3: tokens of a rank", num_tokens, (num_experts, num_hot, skew), "grows; below 1 for small batches"),
    Sweep("figure 6.4: skew", skew, (num_experts, num_hot, num_tokens), "about linear"),
    Sweep("figure 6.5: hot experts", num_hot, (num_experts, num_tokens, skew), "as figure 6.4"),
)


def sliced_table(records: Sequence[Record]) -> Table:
    """Return the speed-ups of slices over capacity that drops nothing, along each published sweep."""
    cases = {
        (num_experts(it), num_tokens(it), skew(it), num_hot(it)): it
        for it in sorted(records, key=lambda it: it["time"])
        if {SLICED, BASELINE} <= set(it["layouts"])
    }
    rows = []
    for sweep in SWEEPS:
        found = _longest(list(cases.values()), sweep)
        ours = "; ".join(f"{sweep.value(it):g}: {spread_text(_speed_ups(it), 2)}" for it in found)
        rows.append((sweep.title, sweep.published, ours or "no record", _trend(found)))
    notes = (
        f"Recorded until {max(it['time'] for it in records)[:10]} by `python -m studies.parallel`: the critical path "
        f"of one layer in processor time, over padding to the largest load. Skew {USUAL_SKEW:g} unless swept.",
        "Published is wall time over DeepSpeed with a capacity factor of up to 50, over the layers of models on four "
        "A100s. Figures 6.1 and 6.6 have no record here.",
    )
    columns = ("result", "published", "ours", "ours, as it grows")
    return Table("Sliced experts, recorded here: speed-up", columns, tuple(rows), notes, words=(1, 2, 3))


def _longest(records: Sequence[Record], sweep: Sweep) -> list[Record]:
    """Return the most cases that differ in a sweep's value, in its order; empty: there are no two."""
    groups: dict[tuple[float, ...], list[Record]] = {}
    for record in records:
        if sweep.value is skew or skew(record) == USUAL_SKEW:
            groups.setdefault(tuple(value(record) for value in sweep.held), []).append(record)
    longest = max(groups.values(), key=len, default=[])
    return sorted(longest, key=sweep.value) if len(longest) > 1 else []


def _speed_ups(record: Record) -> list[float]:
    return speed_ups(figures_of(record), SLICED)


def _trend(records: Sequence[Record]) -> str:
    steps = list(pairwise(statistics.median(_speed_ups(it)) for it in records))
    if not steps:
        return ""
    if all(after > before for before, after in steps):
        return "grows"
    return "falls" if all(after < before for before, after in steps) else "rises and falls"
