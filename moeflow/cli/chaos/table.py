"""The table of `moeflow chaos`."""

from __future__ import annotations

from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table

_COLUMNS = (
    "fault",
    "streams equal",
    "cut",
    "refused",
    "batch lines",
    "in /health after, s",
    "whole after, s",
    "longest pause, s",
    "",
)


def chaos_table(record: Record) -> Table:
    """Return a row for each fault, and the problems below."""
    notes = tuple(f"{row['fault']}: {problem}" for row in record["rows"] for problem in row["problems"])
    return Table("Faults under load", _COLUMNS, tuple(_cells(row) for row in record["rows"]), notes)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["fault"],
        f"{row['num_equal']} of {row['num_streams'] - row['num_cut']}",
        str(row["num_cut"]),
        str(row["num_refused"]),
        f"{row['num_batch_equal']} of {row['num_batch_lines']}",
        _seconds(row["seen_s"]),
        _seconds(row["back_s"]),
        f"{row['longest_pause_s']:.2f}",
        "ok" if row["is_good"] else "VIOLATED",
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
