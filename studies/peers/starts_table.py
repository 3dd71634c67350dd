"""Records of `run.py start` as a table: apart, since measuring imports what takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text

OURS = "moeflow generate"


def starts_table(records: Sequence[Record]) -> Table:
    """Return a row for each model and peer."""
    rows: list[tuple[Any, ...]] = []
    for record in records:
        ours = record["seconds"][OURS]
        for name, theirs in record["seconds"].items():
            if name != OURS:
                ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
                about = f"{record['model']}, {record['format']}"
                rows.append((about, spread_text(ours, 2), name, spread_text(theirs, 2), spread_text(ratios, 2)))
    columns = ("model", f"{OURS}, s", "peer", "peer, s", "ours / peer")
    note = "Ours up to the first text on its output; peers, called from Python, up to the logits of 32 tokens."
    return Table("From process start to first token: median (min-max)", columns, tuple(rows), (note,), words=(2,))
