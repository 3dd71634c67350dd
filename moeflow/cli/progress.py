"""How far long work is, on stderr: a bar with the time left on a terminal, a plain line now and then elsewhere.

Bars vanish at the end. Work that is over before the first line is due prints nothing where no terminal watches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from moeflow.cli.plain_progress import PlainLines, line_of, time_left


class TimeLeftColumn(ProgressColumn):
    """The time left as people say it; nothing until it can be estimated."""

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        return Text("" if task.finished else time_left(task.elapsed or 0.0, task.completed, task.total or 0.0))


class Bar:
    """Work of a known number of steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._plain = PlainLines()

    def say(self, what: str) -> None:
        """Show the current step."""
        self._progress.update(self._task, description=what)
        self._show()

    def advance(self, num_steps: int = 1) -> None:
        """Count one more step as done, or some."""
        self._progress.advance(self._task, num_steps)
        self._show()

    def _show(self) -> None:
        if self._progress.disable:
            (task,) = self._progress.tasks
            self._plain.show(lambda: plain_line(task, f"{task.completed:.0f} of {task.total:.0f}"))


@contextmanager
def bar(total: int) -> Iterator[Bar]:
    """Yield a bar of so many steps."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeLeftColumn(),
        TextColumn("{task.description}"),
    )
    with drawn(*columns) as progress:
        yield Bar(progress, total)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (done, total), in whatever unit."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeLeftColumn(),
    )
    plain = PlainLines()
    with drawn(*columns) as progress:
        task_id = progress.add_task(label, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task_id, completed=done, total=total)
            if progress.disable:
                (task,) = progress.tasks
                plain.show(lambda: plain_line(task, f"{done / max(total, 1):.0%}"))

        yield report


@contextmanager
def drawn(*columns: ProgressColumn, vanishes: bool = True) -> Iterator[Progress]:
    """Yield rich's progress on stderr; it is disabled where no terminal watches, and its tasks count all the same."""
    console = Console(file=sys.stderr)
    is_hidden = not console.is_terminal
    with Progress(
        *columns, console=console, transient=vanishes, disable=is_hidden, get_time=time.monotonic
    ) as progress:
        yield progress


@contextmanager
def steps(label: str, *, are_short: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step: a spinner on a terminal, else lines.

    `are_short`: they take no longer than people wait without asking, so elsewhere nothing is printed.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        plain = PlainLines()
        yield (lambda _: None) if are_short else lambda what: plain.show(lambda: f"{label}: {what}")
        return
    with console.status(label) as status:
        yield lambda what: status.update(f"{label}: {what}")


def plain_line(task: Task, amount: str) -> str:
    """Print the progress of a task: its name, the completed share, and the time left."""
    return line_of(task.description, amount, task.elapsed or 0.0, task.completed, task.total or 0.0)
