"""The JSON that Perfetto reads: rows, slices that nest or follow each other, arrows, rates."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.runtime.executor import Cost, Executor
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.perfetto import perfetto_events, write_perfetto
from moeflow.pipeline.runtime.trace import Label, Trace, waiting
from moeflow.pipeline.task import Task, TaskMaker


def of_kind(events, *kinds):
    return [event for event in events if event["ph"] in kinds]


def check_well_formed(events) -> None:
    """Raise if slices of a row overlap without one being inside the other, or an arrow has no slice at an end."""
    slices = defaultdict(list)
    for event in of_kind(events, "X"):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["cat"]))
    for row in slices.values():
        work = sorted((start, end) for start, end, kind in row if kind == "work")
        waits = sorted((start, end) for start, end, kind in row if kind == "blocked")
        for spans in (work, waits):
            assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(spans))
        for start, end in waits:
            assert all(
                end <= first + 1e-6 or start >= last - 1e-6 or (first <= start + 1e-6 and end <= last + 1e-6)
                for first, last in work
            )
    for arrow in of_kind(events, "s", "f"):
        assert any(start - 1e-6 <= arrow["ts"] <= end + 1e-6 for start, end, _ in slices[arrow["tid"]])


def test_a_real_run_is_well_formed_json_in_microseconds(tmp_path):
    trace = Trace()
    lanes = {"link": Lane("link", trace=trace), "disk": Lane("disk", 2, trace=trace)}
    make = TaskMaker()
    loads = [make("load", i, lane="disk" if i % 2 else "link") for i in range(6)]
    tasks = [*loads, *(make("compute", i, 0, after=[loads[i]]) for i in range(6))]

    def load(_: Task) -> Cost:
        time.sleep(0.002)
        return Cost(num_bytes=1_000_000)

    executor = Executor({"load": load, "compute": lambda _: Cost(flops=5)}, lanes, trace=trace)
    executor.run(tasks)
    executor.run(tasks)  # the same numbers again: arrows go to the latest
    for lane in lanes.values():
        lane.close()
    write_perfetto(trace, tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    events = written["traceEvents"]
    check_well_formed(events)

    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["link", "disk 0", "disk 1", "compute"]
    read = next(event for event in events if event["name"] == "load 0")
    assert 2000 <= read["dur"] < 1_000_000
    assert read["args"] == {"layer": 0, "bytes": 1_000_000, "task": 0}
    assert next(e for e in events if e["name"] == "compute 3.0")["args"]["flops"] == 5
    assert len(of_kind(events, "s")) == len(of_kind(events, "f")) == 12
    assert any(event["cat"] == "blocked" for event in of_kind(events, "X"))


def test_waits_lie_inside_the_work_that_waits():
    trace = Trace()
    row = trace.row("compute")
    start_ns = time.perf_counter_ns()
    with waiting(row, Label("waits for expert", 3)):
        pass
    row.record(Label("experts", 3), start_ns, time.perf_counter_ns())
    events = list(perfetto_events(trace))
    assert [(event["name"], event["cat"]) for event in of_kind(events, "X")] == [
        ("experts 3", "work"),
        ("waits for expert 3", "blocked"),
    ]
    check_well_formed(events)
    trace.switch(is_on=False)
    with waiting(row, Label("nothing is traced")):
        pass
    assert row.spans == []


def test_a_row_that_ran_out_of_room_has_no_arrows_from_nowhere():
    trace = Trace()
    trace.row("compute").record(Label("compute", task_id=9, after=(8,)), 10, 20)
    assert of_kind(perfetto_events(trace), "s", "f") == []


def test_nothing_happened(tmp_path):
    write_perfetto(Trace(), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 10**9)), max_size=20
    )
)
@settings(max_examples=50)
def test_the_rate_of_a_lane_is_that_of_its_rows_together(spans):
    trace = Trace()
    rows = [trace.row(f"disk {i}", lane="disk") for i in range(4)]
    for row, start, duration, num_bytes in spans:
        rows[row].record(Label("read", num_bytes=num_bytes), start * 1000, (start + duration) * 1000)
    origin = min((start for _, start, _, _ in spans), default=0)
    counters = of_kind(perfetto_events(trace), "C")
    assert all(event["name"] == "disk bytes/s" for event in counters)
    for event, following in pairwise(counters):
        middle = (event["ts"] + following["ts"]) / 2 + origin
        active = [num_bytes / duration * 1e6 for _, s, duration, num_bytes in spans if s <= middle < s + duration]
        assert event["args"]["bytes/s"] == pytest.approx(sum(active), rel=1e-6, abs=1)
    assert not counters or counters[-1]["args"]["bytes/s"] == pytest.approx(0, abs=1)
