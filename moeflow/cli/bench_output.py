"""What the `bench` commands have in common: options for the results, a progress bar, tables, files."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from moeflow.bench.records import Record, append
from moeflow.bench.tables import Table


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
    """Return the command line that is running, as a user would type it."""
    return ["moeflow", *sys.argv[1:]]


def keep(record: Record, out: Path | None, *, as_json: bool) -> None:
    """Write a record to where it was asked for."""
    if out is not None:
        append(out, record)
    if as_json:
        click.echo(json.dumps(record, ensure_ascii=False, allow_nan=False))


def show(table: Table) -> None:
    """Print a table and its notes."""
    grid = RichTable(box=box.SIMPLE_HEAD)
    for number, column in enumerate(table.columns):
        grid.add_column(escape(column), justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*map(escape, row))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has room for every column
        console = Console(highlight=False, width=200)
    console.print(f"[bold]{escape(table.title)}[/]", soft_wrap=True)
    console.print(grid)
    for note in table.notes:
        console.print(escape(note), soft_wrap=True)


class Bar:
    """How far a long measurement is."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def say(self, what: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=what)

    def advance(self) -> None:
        """Count one more step as done."""
        self._progress.advance(self._task)


@contextmanager
def bar(total: int) -> Iterator[Bar]:
    """Yield a bar of so many steps, on stderr; it is drawn if a terminal watches and vanishes at the end."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, total)
