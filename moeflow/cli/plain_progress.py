"""How far work is, where no terminal watches: lines now and then. Needs no rich, which takes a while to import."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

PLAIN_PROGRESS_S = 10.0  # where no terminal watches: how often a line is printed
PLAIN_FIRST_S = 2.0  # and after how long the first
_MIN_ELAPSED_S = 5.0  # before that the rate says little: what begins slowly, such as loading, may be over at once,
_MIN_SHARE = 0.05  # and before so much is done,
_MAX_SILENT_S = 60.0  # unless so much time has passed


class PlainLines:
    """Prints how far work is: a line after `PLAIN_FIRST_S`, then at most one in `PLAIN_PROGRESS_S`."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + PLAIN_FIRST_S

    def show(self, make_line: Callable[[], str]) -> None:
        """Print the line that `make_line` returns if one is due."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + PLAIN_PROGRESS_S
            click.echo(make_line(), err=True)


def line_of(label: str, amount: str, elapsed_s: float, done: float, total: float) -> str:
    """Print the progress of a task: its name, the completed share, and the time left."""
    left = time_left(elapsed_s, done, total)
    return (f"{label}: " if label else "") + ", ".join(filter(None, (amount, left)))


def time_left(elapsed_s: float, done: float, total: float) -> str:
    """Print the time left at the mean rate so far: "about 40 s left"; nothing as long as that is unknown."""
    is_early = elapsed_s < _MIN_ELAPSED_S or (done < _MIN_SHARE * total and elapsed_s < _MAX_SILENT_S)
    if is_early or not 0 < done < total:
        return ""
    return f"about {duration_text(elapsed_s / done * (total - done))} left"


def duration_text(seconds: float) -> str:
    """Write a duration in whole numbers: "40 s", "12 min", "3 h 20 min"."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
