"""The spans of a process's last passes as plain data, from which another process makes a trace."""

from __future__ import annotations

from array import array

import msgspec

from moeflow.pipeline.runtime.layer_times import LayerFacts, LayerTimes, PassTimes
from moeflow.pipeline.runtime.trace import Trace, TraceSpan


class RecordedRow(msgspec.Struct, frozen=True):
    """A row of a trace."""

    name: str
    lane: str
    spans: list[TraceSpan]

    def read(self) -> list[TraceSpan]:
        """Return the spans."""
        return self.spans


class Recording(msgspec.Struct, frozen=True):
    """What one process recorded. Times of spans are those of its steady clock, in nanoseconds."""

    clock_ns: int  # Unix time at zero of that clock: other processes and machines align by it
    num_passes: int
    rows: list[RecordedRow]
    layers: list[LayerFacts]  # empty: their times are not known
    times: list[tuple[int, bytes]]  # of each pass: tokens, and `PassTimes.times`
    ranks: list[Recording] = []  # of the other processes that share the model

    def to_trace(self) -> Trace:
        """Return the rows with all spans."""
        trace = Trace(is_on=False)
        for recorded in self.rows:
            trace.row(recorded.name, lane=recorded.lane).add_source(recorded.read)
        if self.layers:
            times = LayerTimes(self.layers, len(self.times))
            times.passes.extend(PassTimes(num_tokens, array("q", each)) for num_tokens, each in self.times)
            times.add_to(trace)
        return trace


def recording_of(trace: Trace, start_ns: int, num_passes: int, clock_ns: int, times: LayerTimes | None) -> Recording:
    """Return what a trace and the times of layers have from `start_ns` on: that many passes."""
    return Recording(
        clock_ns=clock_ns,
        num_passes=num_passes,
        rows=[RecordedRow(row.name, row.lane, row.recorded_since(start_ns)) for row in trace.rows],
        layers=[] if times is None else list(times.layers),
        times=[] if times is None else [(each.num_tokens, each.times.tobytes()) for each in times.since(start_ns)],
    )
