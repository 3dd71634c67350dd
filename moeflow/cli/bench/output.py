"""What the `bench` commands have in common: options for the results, tables, files."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from moeflow.bench.records import Record, append, make_record
from moeflow.bench.tables import Table
from moeflow.cli import lazy
from moeflow.cli.progress import Bar

PAGE_WIDTH: Final = 100  # of words that go to a file
FILE_WIDTH: Final = 200  # of figures there, which are not wrapped
UNLIMITED: Final = 10_000


def result_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and --out; the command gets them as `as_json` and `out`."""
    options = [
        click.option("--json", "as_json", is_flag=True, help="Print the records as JSON lines instead of tables."),
        click.option(
            "--out",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Append the records to this file, one JSON object a line.",
        ),
    ]
    return functools.reduce(lambda inner, option: option(inner), reversed(options), command)


def repeated_command() -> list[str]:
    """Return the running command line as typed."""
    return ["moeflow", *sys.argv[1:]]


def keep(record: Record, out: Path | None, *, as_json: bool) -> None:
    """Write a record to where it was asked for."""
    if out is not None:
        append(out, record)
    if as_json:
        click.echo(json.dumps(record, ensure_ascii=False, allow_nan=False))


@dataclass(slots=True)
class Recorder:
    """Keeps each record of a command that makes several, as soon as there is one."""

    kind: str
    out: Path | None
    as_json: bool
    command: Sequence[str] = field(default_factory=repeated_command)
    records: list[Record] = field(default_factory=list)

    def progress(self, shown: Bar, threads: int | None, *, counts_requests: bool) -> Any:
        """Return what a measurement calls; the bar counts requests, or results."""

        def on_result(fields: dict[str, Any]) -> None:
            self.add(fields, seed=fields["workload"]["seed"], threads=threads)
            if not counts_requests:
                shown.advance()

        return lazy.RunCalls(
            on_bytes=lambda done, total: shown.say(f"loading, {done / total:.0%}"),
            on_run=shown.say,
            on_result=on_result,
            on_request=shown.advance if counts_requests else lambda: None,
        )

    def add(self, fields: dict[str, Any], *, seed: int, threads: int | None) -> None:
        """Keep the records. `seed` and `threads` as in `make_record`; the former may be among the fields."""
        measured = {name: value for name, value in fields.items() if name != "seed"}
        record = make_record(self.kind, self.command, seed=seed, threads=threads, **measured)
        self.records.append(record)
        keep(record, self.out, as_json=self.as_json)

    def show(self, make_tables: Callable[[Sequence[Record]], Sequence[Table]]) -> None:
        """Print the records as tables, unless they were printed as JSON."""
        if self.records and not self.as_json:
            for table in make_tables(self.records):
                show(table)


def show(table: Table) -> None:
    """Print a table and its notes, as wide as the terminal; further columns follow below, row for row.

    A file gets all columns beside each other, and words in lines of `PAGE_WIDTH`.
    """
    console = Console(highlight=False)
    wraps = console.is_terminal or bool(table.words)
    if not console.is_terminal:
        console = Console(highlight=False, width=PAGE_WIDTH if wraps else FILE_WIDTH)
    console.print(f"[bold]{escape(table.title)}[/]", soft_wrap=not wraps)
    for columns in _parts(table, console):
        console.print(_grid(table, columns))
    for note in table.notes:
        console.print(escape(note), soft_wrap=not wraps)


def _grid(table: Table, columns: Sequence[int]) -> RichTable:
    """Return some columns of a table as rich draws them."""
    grid = RichTable(box=box.SIMPLE_HEAD)
    for number in columns:
        is_text = number == 0 or number in table.words
        justify: Literal["left", "right"] = "left" if is_text else "right"
        grid.add_column(escape(table.columns[number]), justify=justify, no_wrap=number not in table.words)
    for row in table.rows:
        grid.add_row(*(escape(row[number]) for number in columns))
    return grid


def _parts(table: Table, console: Console) -> list[list[int]]:
    """Return which columns to print beside each other, so that they fit; the first one leads each part."""
    if table.words:
        return [list(range(len(table.columns)))]
    unlimited = console.options.update(max_width=UNLIMITED)
    parts = [[0]]
    for number in range(1, len(table.columns)):
        wider = [*parts[-1], number]
        if len(wider) > 2 and console.measure(_grid(table, wider), options=unlimited).maximum > console.width:
            wider = [0, number]
            parts.append(wider)
        parts[-1] = wider
    return parts
