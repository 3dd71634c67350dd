"""The spans of work and of waiting of each lane, recorded as they end while the trace is on.

A row belongs to one thread and is appended to without a lock. While a trace is off, no code reads the clock,
`time.perf_counter_ns`. A trace is switched between passes. It knows neither tasks nor files; `perfetto.py` writes it.
Source: ExpertFlow 3.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import TracebackType
from typing import NamedTuple

MAX_SPANS = 1 << 16  # the latest of a row, about 20 MB, so that a server may trace for days
SAMPLING = "sampling"  # the row of logits and of the choice of tokens
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
    requests: tuple[str, ...] = ()  # the ids of a pass's requests


class TraceSpan(NamedTuple):
    """Work or a wait of a row."""

    label: Label
    start_ns: int
    end_ns: int
    is_blocked: bool  # it waited


class TraceRow:
    """One thread of a lane."""

    __slots__ = ("_recorded", "_sources", "is_on", "lane", "name")

    def __init__(self, name: str, lane: str, *, is_on: bool = True) -> None:
        self.name = name
        self.lane = lane
        self.is_on = is_on
        self._recorded: deque[TraceSpan] = deque(maxlen=MAX_SPANS)
        self._sources: list[Callable[[], Iterable[TraceSpan]]] = []

    @property
    def spans(self) -> list[TraceSpan]:
        """Return all spans: the recorded ones, in the order of their ends, then those of its sources."""
        return [*self._recorded, *(span for source in self._sources for span in source())]

    def record(self, label: Label, start_ns: int, end_ns: int, *, is_blocked: bool = False) -> None:
        """Record a span at its end; a wait lies within the waiting work, or between two works."""
        self._recorded.append(TraceSpan(label, start_ns, end_ns, is_blocked))

    def add_source(self, source: Callable[[], Iterable[TraceSpan]]) -> None:
        """Take further spans, which somebody else keeps, whenever the row is read."""
        self._sources.append(source)

    def recorded_since(self, start_ns: int) -> list[TraceSpan]:
        """Return the recorded spans that end later, in the order of their ends."""
        found: list[TraceSpan] = []
        for span in reversed(list(self._recorded)):  # a lane may record meanwhile: a copy is made in one step
            if span.end_ns <= start_ns:
                break
            found.append(span)
        return found[::-1]

    def drop_before(self, start_ns: int) -> None:
        """Forget the recorded spans that ended by then."""
        while self._recorded and self._recorded[0].end_ns <= start_ns:
            self._recorded.popleft()

    def clear(self) -> None:
        """Forget all recorded spans."""
        self._recorded.clear()


class Trace:
    """The rows of all lanes, oldest first."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.rows: list[TraceRow] = []
        self.is_on = is_on
        self._followers: list[Callable[[bool], None]] = []

    def row(self, name: str, *, lane: str | None = None) -> TraceRow:
        """Return the row of a name, added if it is new; a lane of one thread has one of its own name."""
        for row in self.rows:
            if row.name == name:
                return row
        self.rows.append(TraceRow(name, lane or name, is_on=self.is_on))
        return self.rows[-1]

    def follow(self, on_switch: Callable[[bool], None]) -> None:
        """Call `on_switch` whenever the trace is switched on or off, and now if it is on."""
        self._followers.append(on_switch)
        if self.is_on:
            on_switch(True)

    def switch(self, *, is_on: bool) -> None:
        """Begin to record, or end that and forget all spans. Between passes."""
        if is_on == self.is_on:
            return
        self.is_on = is_on
        for follower in self._followers:
            follower(is_on)
        for row in self.rows:
            row.is_on = is_on
            row.clear()

    def drop_before(self, start_ns: int) -> None:
        """Forget the recorded spans of all rows that ended by then."""
        for row in self.rows:
            row.drop_before(start_ns)


def waiting(row: TraceRow, label: Label) -> AbstractContextManager[None]:
    """Return a `with` block whose time is recorded as blocked, if the row is on."""
    return _Recorded(row, label, is_blocked=True) if row.is_on else _NOTHING


def working(row: TraceRow, label: Label) -> AbstractContextManager[None]:
    """Return a `with` block whose time is recorded as work, if the row is on."""
    return _Recorded(row, label, is_blocked=False) if row.is_on else _NOTHING


class _Recorded(AbstractContextManager[None]):
    __slots__ = ("_is_blocked", "_label", "_row", "_start_ns")

    def __init__(self, row: TraceRow, label: Label, *, is_blocked: bool) -> None:
        self._row = row
        self._label = label
        self._is_blocked = is_blocked

    def __enter__(self) -> None:
        self._start_ns = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._row.record(self._label, self._start_ns, perf_counter_ns(), is_blocked=self._is_blocked)
