"""Predictions beside what was published, as tables, and how many of those that count are within the bar."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from studies.paper.one_device import ASSUMED, BAR
from studies.paper.several_devices import case_table, scaling_table

AIM: Final = 0.20
ORDER_NAMES: Final = {"described": "as described (figures that count)", "data_sheets": "from data sheets"}


def tables(record: Record) -> list[Table]:
    """Return a record as tables: one a cell, then several devices, then figure 10."""
    made = [_cell_table(cell) for cell in record["cells"]]
    made[-1] = replace(made[-1], notes=(*made[-1].notes, *_summary(record["cells"])))
    return [*made, scaling_table(record["scaling"]), case_table(record["case_study"])]


def _cell_table(cell: dict[str, Any]) -> Table:
    rows = []
    for row in cell["rows"]:
        sizes = (str(row["micro_batch"]), str(row["num_micro_batches"]), f"{row['published']:.2f}")
        off = "not counted" if row["used_for"] else f"{row['described'] / row['published'] - 1:+.0%}"
        sheet = (f"{row['data_sheets']:.2f}", f"{row['data_sheets'] / row['published'] - 1:+.0%}")
        rows.append((row["system"], *sizes, f"{row['described']:.2f}", off, *sheet))
    columns = ("", "mu", "N / mu", "published", "described", "off by", "data sheets", "off by")
    used = {row["used_for"]: row["system"] for row in cell["rows"] if row["used_for"]}
    notes = [
        f"{system} does not count: {what} was {'assumed' if what == ASSUMED else 'taken from it'}."
        for what, system in used.items()
    ]
    orders = cell["pairs_in_order"]
    notes.append(
        "Pairs in the published order: "
        + ", ".join(f"{orders[name][0]} of {orders[name][1]} {how}" for name, how in ORDER_NAMES.items())
        + "."
    )
    return Table(f"{cell['title']}, tokens/s", columns, tuple(rows), tuple(notes))


def _summary(cells: list[dict[str, Any]]) -> Iterator[str]:
    rows = [row for cell in cells for row in cell["rows"]]
    for key, name, chosen in (
        ("described", "as described", [row for row in rows if not row["used_for"]]),
        ("data_sheets", "from data sheets alone", rows),
    ):
        off = [abs(row[key] / row["published"] - 1) for row in chosen]
        right, total = (sum(cell["pairs_in_order"][key][part] for cell in cells) for part in (0, 1))
        median, worst = statistics.median(off), max(off)
        yield (
            f"Together, {name}: of {len(off)} figures that count ({len(rows)} published) "
            f"{sum(it <= BAR for it in off)} within {BAR:.0%}, {sum(it <= AIM for it in off)} within {AIM:.0%}; "
            f"median {median:.0%}, worst {worst:.0%}; {right} of {total} pairs in the published order."
        )
