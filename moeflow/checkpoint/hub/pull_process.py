"""Pulls a model in a process of its own: the checksums of gigabytes take no time from the process that waits.

Run as `python -m moeflow.checkpoint.hub.pull_process`, with a `PullOrder` as the first line of stdin. It writes
`PullReport`s as lines of JSON, and ends as soon as stdin is closed: its parent cancels the pull, or is gone. Downloaded
bytes stay for the next pull.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from moeflow.checkpoint.hub.model_name import parse_model_name
from moeflow.checkpoint.hub.pull import pull
from moeflow.core.errors import MoeflowError

CANCELLED: Final = 3  # exit code
_PERIOD_S: Final = 0.1  # between two reports of progress
_NICENESS: Final = 10  # engines go first


class PullOrder(msgspec.Struct, frozen=True):
    """The model to pull, and the folder of the hub's cache."""

    name: str
    cache: str


class PullReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress, or the end: a path or an error."""

    done_bytes: int = 0
    total_bytes: int = 0
    path: str = ""
    error: str = ""


class _Progress:
    """Reports from any thread, a few times a second."""

    def __init__(self) -> None:
        self._said_at_s = float("-inf")

    def note(self, done_bytes: int, total_bytes: int) -> None:
        """Take progress. The caller holds a lock."""
        now_s = time.monotonic()
        if done_bytes == total_bytes or now_s - self._said_at_s >= _PERIOD_S:
            self._said_at_s = now_s
            _say(PullReport(done_bytes, total_bytes))


def main() -> None:
    """Pull what stdin orders."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=PullOrder)
    threading.Thread(target=_end_with_input, name="input", daemon=True).start()
    os.nice(_NICENESS)
    name = parse_model_name(order.name)
    assert name is not None, "whoever orders has parsed the name"
    try:
        path = pull(name, Path(order.cache), _Progress().note)
    except (MoeflowError, OSError) as error:
        _say(PullReport(error=str(error)))
    else:
        _say(PullReport(path=str(path)))


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):  # a buffered read would hold a lock when the process ends
        pass
    os._exit(CANCELLED)  # threads that download have no other end


def _say(report: PullReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
