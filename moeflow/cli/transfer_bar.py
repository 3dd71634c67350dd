"""How far a download is: bytes, speed and time left, in a bar on a terminal and in plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from moeflow.cli.plain_progress import PlainLines, time_left
from moeflow.cli.progress import TimeLeftColumn, drawn
from moeflow.core.units import format_bytes


@contextmanager
def transfer_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (downloaded bytes, total bytes), from any thread."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeLeftColumn(),
    )
    plain, speed = PlainLines(), _Speed()
    with drawn(*columns) as progress:
        task_id = progress.add_task(label, total=None)

        def report(done: int, total: int) -> None:
            speed.begin(done)
            progress.update(task_id, completed=done, total=total)
            if progress.disable:
                plain.show(lambda: f"{label}: {speed.line(done, total)}")

        yield report


class _Speed:
    """Bytes per second since the first report. Bytes from before do not count."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def begin(self, done: int) -> None:
        """Note the first report."""
        self._first = self._first or (time.monotonic(), done)

    def line(self, done: int, total: int) -> str:
        """Print progress, speed, and the time left once it can be estimated."""
        assert self._first is not None
        first_s, first_done = self._first
        elapsed_s, come = time.monotonic() - first_s, done - first_done
        parts = [f"{format_bytes(done)} of {format_bytes(total)}"]
        if come > 0 and elapsed_s > 0:
            parts += [f"{format_bytes(come / elapsed_s)}/s", time_left(elapsed_s, come, total - first_done)]
        return ", ".join(filter(None, parts))
