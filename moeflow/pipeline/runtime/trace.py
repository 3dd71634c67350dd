"""The spans of work and of waiting of each lane, recorded as they end.

A row belongs to one thread and is appended to without a lock. Without a trace there are no rows, and no code reads the
clock, `time.perf_counter_ns`. A trace knows neither tasks nor files; `perfetto.py` writes it. Source: ExpertFlow 3.6.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import TracebackType
from typing import NamedTuple

MAX_SPANS = 1 << 16  # the latest of a row, about 20 MB, so that a server may trace for days
_NOTHING = nullcontext()


class Label(NamedTuple):
    """The subject of a span."""

    name: str  # the op, or the cause of a wait
    layer: int | None = None
    micro_batch: int | None = None
    num_bytes: int = 0  # moved, or read by the computation
    flops: int = 0
    task_id: int | None = None  # of a task of a pipeline
    after: tuple[int, ...] = ()  # the tasks it waited for


class TraceSpan(NamedTuple):
    """Work or a wait of a row."""

    label: Label
    start_ns: int
    end_ns: int
    is_blocked: bool  # it waited


class TraceRow:
    """One thread of a lane."""

    __slots__ = ("lane", "name", "spans")

    def __init__(self, name: str, lane: str) -> None:
        self.name = name
        self.lane = lane
        self.spans: deque[TraceSpan] = deque(maxlen=MAX_SPANS)

    def record(self, label: Label, start_ns: int, end_ns: int, *, is_blocked: bool = False) -> None:
        """Record a span at its end; a wait lies within the waiting work, or between two works."""
        self.spans.append(TraceSpan(label, start_ns, end_ns, is_blocked))


class Trace:
    """The rows of all lanes, oldest first."""

    def __init__(self) -> None:
        self.rows: list[TraceRow] = []

    def row(self, name: str, *, lane: str | None = None) -> TraceRow:
        """Add a row; a lane of one thread has one of its own name."""
        row = TraceRow(name, lane or name)
        self.rows.append(row)
        return row


def waiting(row: TraceRow | None, label: Label) -> AbstractContextManager[None]:
    """Return a `with` block whose time is recorded as blocked, if there is a row."""
    return _NOTHING if row is None else _Waiting(row, label)


class _Waiting(AbstractContextManager[None]):
    __slots__ = ("_label", "_row", "_start_ns")

    def __init__(self, row: TraceRow, label: Label) -> None:
        self._row = row
        self._label = label

    def __enter__(self) -> None:
        self._start_ns = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._row.record(self._label, self._start_ns, perf_counter_ns(), is_blocked=True)
