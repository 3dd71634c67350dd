"""Work in phases, each with a bar that stays, and how long each took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.progress import BarColumn, Progress, Task, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from moeflow.cli.plain_progress import PlainLines
from moeflow.cli.progress import TimeLeftColumn, drawn, plain_line
from moeflow.core.units import format_bytes

COUNTED_IN_BYTES = ("reading", "loading", "writing")


@contextmanager
def phase_bars() -> Iterator[PhaseBars]:
    """Yield one progress bar a phase, on stderr, which stay when all is done."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeLeftColumn(),
    )
    with drawn(*columns, vanishes=False) as progress:
        yield PhaseBars(progress)


class PhaseBars:
    """Shows the progress of each phase, then its duration."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._plain = PlainLines()

    def begin(self, phase: str) -> None:
        """Show that a phase has begun whose extent is not known yet."""
        self._tasks[phase] = self._progress.add_task(phase, total=None, amount="")

    def report(self, phase: str, done: int, total: int) -> None:
        """Show how far a phase is."""
        if phase not in self._tasks:
            self.begin(phase)
        amount = format_bytes(done) if phase in COUNTED_IN_BYTES else f"{done:,} of {total:,}"
        is_new = not self._progress.tasks[self._tasks[phase]].finished
        self._progress.update(self._tasks[phase], completed=done, total=total, amount=amount)
        if self._progress.disable and is_new:
            self._print(self._progress.tasks[self._tasks[phase]], amount)

    def _print(self, task: Task, amount: str) -> None:
        """Print how far a phase is, where no terminal watches: now and then, and once it is over."""
        if task.finished:
            click.echo(f"{task.description}: {amount} in {task.elapsed or 0.0:.1f} s", err=True)
        else:
            self._plain.show(lambda: plain_line(task, amount))

    @property
    def seconds(self) -> dict[str, float]:
        """Return how long each phase took."""
        return {task.description: round(task.finished_time or task.elapsed or 0.0, 1) for task in self._progress.tasks}
