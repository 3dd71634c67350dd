"""A trace switches on and off between passes, and keeps the last ones."""

from __future__ import annotations

from moeflow.pipeline.runtime.executor import Cost, Executor
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Label, Trace, waiting, working
from moeflow.pipeline.task import TaskMaker


def names(trace):
    return [span.label.name for row in trace.rows for span in row.spans]


def test_a_name_has_one_row():
    trace = Trace()
    assert trace.row("disk 0", lane="disk") is trace.row("disk 0", lane="disk")
    assert [row.lane for row in trace.rows] == ["disk"]


def test_lanes_and_executors_record_only_while_the_trace_is_on():
    trace, make = Trace(is_on=False), TaskMaker()
    with Lane("link", trace=trace) as lane:
        executor = Executor({"load": lambda _: Cost(5), "compute": lambda _: None}, {"link": lane}, trace=trace)
        first = make("load", 0, lane="link")
        tasks = [first, make("compute", 0, after=[first])]
        for is_on, expected in ((False, set()), (True, {"load", "compute"}), (False, set())):
            trace.switch(is_on=is_on)
            executor.run(tasks)
            lane.submit(lambda: None).result()  # the lane has recorded the task before
            assert {"load", "compute"} & set(names(trace)) == expected


def test_spans_around_a_block_are_work_or_waits():
    trace = Trace()
    row = trace.row("sampling")
    with working(row, Label("logits")), waiting(row, Label("waits")):
        pass
    assert [(span.label.name, span.is_blocked) for span in row.spans] == [("waits", True), ("logits", False)]
    trace.switch(is_on=False)
    with working(row, Label("logits")):
        trace.switch(is_on=True)
    assert row.spans == [], "what began while it was off has no start"


def test_followers_hear_of_each_change():
    heard, trace = [], Trace()
    trace.follow(heard.append)
    for is_on in (True, False, False, True):
        trace.switch(is_on=is_on)
    assert heard == [True, False, True]
    Trace(is_on=False).follow(heard.append)
    assert len(heard) == 3


def test_what_ended_before_a_time_can_be_left_out_or_dropped():
    trace = Trace()
    row = trace.row("disk")
    for start_ns in (0, 10, 20):
        row.record(Label("read"), start_ns, start_ns + 10)
    row.add_source(lambda: iter(row.recorded_since(25)))
    assert [span.start_ns for span in row.recorded_since(20)] == [20]
    assert [span.start_ns for span in row.recorded_since(9)] == [0, 10, 20]
    trace.drop_before(20)
    assert [span.start_ns for span in row.spans] == [20, 20], "its own, and that of its source"
    trace.switch(is_on=False)
    assert row.spans == []


def test_a_lane_may_record_while_its_row_is_read():
    row = Trace().row("link")

    class End(int):
        def __le__(self, other: int) -> bool:
            row.record(Label("meanwhile"), 30, 40)
            return int.__le__(self, other)

    for end_ns in (10, 20):
        row.record(Label("read"), 0, End(end_ns))
    assert [span.end_ns for span in row.recorded_since(5)] == [10, 20]
