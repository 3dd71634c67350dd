"""Writes a trace as JSON for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each thread of a lane has a row, with waits as slices inside or between the work. Arrows lead from a task to its
successors, and each lane shows its bytes per second. Format: "Trace Event Format", times in microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from moeflow.pipeline.runtime.trace import Trace, TraceRow, TraceSpan

Event = dict[str, Any]
_Row = tuple[int, TraceRow, list[TraceSpan]]  # its number, and its spans by their starts


class Process(NamedTuple):
    """A process with a trace."""

    trace: Trace
    number: int = 1
    name: str = ""  # empty: it is the only one
    clock_ns: int = 0  # Unix time at zero of the trace's clock; 0: there is no other clock


def write_perfetto(trace: Trace, path: Path) -> None:
    """Write all spans of the rows. Raises: OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(perfetto_events(trace)):
            file.write(",\n" if number else "\n")
            json.dump(event, file, separators=(",", ":"))
        file.write("\n]}\n")


def perfetto_events(trace: Trace) -> Iterator[Event]:
    """Yield the events of a trace; its time begins with its first span."""
    return events_of([Process(trace)])[1]


def events_of(processes: Iterable[Process]) -> tuple[int, Iterator[Event]]:
    """Return the start of the first span in nanoseconds of Unix time, and the events, whose time begins there."""
    sorted_rows = [
        (process, [(number, row, sorted(row.spans, key=_by_start)) for number, row in enumerate(process.trace.rows, 1)])
        for process in processes
    ]
    starts = (process.clock_ns + spans[0].start_ns for process, rows in sorted_rows for _, _, spans in rows if spans)
    origin_ns = min(starts, default=0)
    return origin_ns, chain.from_iterable(_events(process, rows, origin_ns) for process, rows in sorted_rows)


def _events(process: Process, rows: list[_Row], origin_ns: int) -> Iterator[Event]:
    origin_ns -= process.clock_ns
    if process.name:
        yield {"ph": "M", "name": "process_name", "args": {"name": process.name}, "pid": process.number}
    for event in _process_events(rows, origin_ns):
        event["pid"] = process.number
        if "id" in event:
            event["id"] = f"{process.number}.{event['id']}"
        yield event


def _process_events(rows: list[_Row], origin_ns: int) -> Iterator[Event]:
    for number, row, spans in rows:
        yield from _row_names(number, row)
        for span in spans:
            yield _slice(number, span, origin_ns)
    yield from _arrows([(number, span) for number, _, spans in rows for span in spans], origin_ns)
    spans_by_lane: dict[str, list[TraceSpan]] = defaultdict(list)
    for _, row, spans in rows:
        spans_by_lane[row.lane] += spans
    for lane, lane_spans in spans_by_lane.items():
        yield from _rates(lane, lane_spans, origin_ns)


def _by_start(span: TraceSpan) -> tuple[int, int]:
    return span.start_ns, -span.end_ns  # an inner span comes after its outer one


def _row_names(number: int, row: TraceRow) -> Iterator[Event]:
    common = {"ph": "M", "tid": number}
    yield {**common, "name": "thread_name", "args": {"name": row.name, "lane": row.lane}}
    yield {**common, "name": "thread_sort_index", "args": {"sort_index": number}}


def _slice(row_number: int, span: TraceSpan, origin_ns: int) -> Event:
    label = span.label
    facts = {
        "layer": label.layer,
        "micro_batch": label.micro_batch,
        "bytes": label.num_bytes or None,
        "flops": label.flops or None,
        "task": label.task_id,
        "requests": label.requests or None,
    }
    place = "" if label.layer is None else f" {label.layer}"
    return {
        "ph": "X",
        "tid": row_number,
        "name": f"{label.name}{place}" + ("" if label.micro_batch is None else f".{label.micro_batch}"),
        "cat": "blocked" if span.is_blocked else "work",
        **({"cname": "grey"} if span.is_blocked else {}),
        "ts": _us(span.start_ns - origin_ns),
        "dur": _us(span.end_ns - span.start_ns),
        "args": {key: value for key, value in facts.items() if value is not None},
    }


def _arrows(spans: Iterable[tuple[int, TraceSpan]], origin_ns: int) -> Iterator[Event]:
    """Yield an arrow for each dependency; each pass numbers its tasks anew, so the latest of a number is meant."""
    latest: dict[int, tuple[int, TraceSpan]] = {}
    num_arrows = 0
    for row_number, span in sorted(spans, key=lambda item: _by_start(item[1])):
        for before in span.label.after:
            if before not in latest:  # no longer in its row
                continue
            num_arrows += 1
            common = {"name": "after", "cat": "after", "id": num_arrows}
            source_number, source = latest[before]
            yield {**common, "ph": "s", "tid": source_number, "ts": _us(source.start_ns - origin_ns)}
            yield {**common, "ph": "f", "bp": "e", "tid": row_number, "ts": _us(span.start_ns - origin_ns)}
        if span.label.task_id is not None:
            latest[span.label.task_id] = (row_number, span)


def _rates(lane: str, spans: Iterable[TraceSpan], origin_ns: int) -> Iterator[Event]:
    """Yield how many bytes a second a lane moves whenever that changes, taking each span to move its bytes evenly."""
    changes: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.label.num_bytes and span.end_ns > span.start_ns:
            rate = span.label.num_bytes / (span.end_ns - span.start_ns) * 1e9
            changes[span.start_ns] += rate
            changes[span.end_ns] -= rate
    now = 0.0
    for time_ns, change in sorted(changes.items()):
        now += change
        name = f"{lane} bytes/s"
        yield {"ph": "C", "name": name, "ts": _us(time_ns - origin_ns), "args": {"bytes/s": round(now)}}


def _us(ns: int) -> float:
    return ns / 1000
