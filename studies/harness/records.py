"""Makes, keeps and shows the records of a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import Recorder
from studies.harness.command import command_line


def recorder(kind: str, out: Path | None, *, as_json: bool = False) -> Recorder:
    """Return a keeper of the records that the running command makes."""
    return Recorder(kind, out, as_json, command_line())


def publish(
    kind: str,
    tables: Callable[[Record], Table | Sequence[Table]],
    out: Path | None,
    *,
    as_json: bool = False,
    seed: int = 0,
    threads: int | None = None,
    **measured: Any,
) -> Record:
    """Keep one record and show its tables. `threads`: the number that computed, if known."""
    kept = recorder(kind, out, as_json=as_json)
    kept.add(measured, seed=seed, threads=threads)

    def as_tables(records: Sequence[Record]) -> Sequence[Table]:
        made = tables(records[0])
        return [made] if isinstance(made, Table) else made

    kept.show(as_tables)
    return kept.records[0]
