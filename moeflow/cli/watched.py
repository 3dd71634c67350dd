"""How far a start is: bars where a terminal watches, else lines, for which rich need not be imported."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moeflow.cli.plain_progress import PlainLines, line_of
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from moeflow.cli import progress


@contextmanager
def watched_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (done, total), in whatever unit: it draws a bar where a terminal watches."""
    if sys.stderr.isatty():
        with progress.progress_bar(label) as draw:
            yield draw
        return
    plain, start_s = PlainLines(), time.monotonic()

    def report(done: int, total: int) -> None:
        plain.show(lambda: line_of(label, f"{done / max(total, 1):.0%}", time.monotonic() - start_s, done, total))

    yield report


@contextmanager
def watched_steps(label: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with progress.steps(label, are_short=True) as show:
        yield show
