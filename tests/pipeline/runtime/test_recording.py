"""Recordings cross processes as MessagePack, and become the same spans there."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from moeflow.pipeline.runtime.layer_times import ENDED, NUM_PARTS, LayerFacts, LayerTimes
from moeflow.pipeline.runtime.perfetto import Process, events_of
from moeflow.pipeline.runtime.recording import Recording, recording_of
from moeflow.pipeline.runtime.trace import Label, Trace

FACTS = [LayerFacts(0, True, False, 10), LayerFacts(1, False, True, 7), LayerFacts(2, True, True, 7)]
KINDS = {
    "attention": ["attention", "recurrent mixer", "attention"],
    "router": ["output projection", "output projection and router", "output projection and router"],
    "experts": ["dense network", "experts", "experts"],
}


def rows(trace):
    """The spans of each row that has some."""
    return {row.name: sorted(row.spans, key=lambda span: span.start_ns) for row in trace.rows if row.spans}


def timed(num_passes, max_passes=8):
    """Times of passes of 2 tokens: each part takes a nanosecond."""
    times = LayerTimes(FACTS, max_passes)
    for number in range(num_passes):
        each = times.begin(2)
        for place in range(len(each)):
            each[place] = 1 + 1000 * number + place
    return times


def test_the_parts_of_layers_are_spans_that_follow_each_other():
    trace = Trace()
    timed(2).add_to(trace)
    found = rows(trace)
    assert {name: [span.label.name for span in spans] for name, spans in found.items()} == {
        name: 2 * kinds for name, kinds in KINDS.items()
    }
    assert [span.label.layer for span in found["experts"]] == 2 * [0, 1, 2]
    assert [span.label.flops for span in found["experts"]] == 2 * [20, 14, 14]
    attention, router, experts = found.values()
    for mixed, chosen, computed in zip(attention, router, experts, strict=True):
        assert (mixed.end_ns, chosen.end_ns) == (chosen.start_ns, computed.start_ns)
        assert not any(span.is_blocked for span in (mixed, chosen, computed))


def test_a_part_that_a_pass_did_not_come_to_has_no_span():
    times = timed(1)
    each = times.passes[0].times
    each[NUM_PARTS + ENDED] = 0  # Python computed the experts of layer 1
    assert [span.label.layer for span in times.spans("experts")] == [0, 2]
    each[2 * NUM_PARTS + 2] = 0  # layer 2 was run by itself, where only attention's end is known
    assert [span.label.layer for span in times.spans("router")] == [0, 1]
    assert [span.label.name for span in times.spans("experts")] == [
        "dense network",
        "output projection and router, experts",
    ]


def test_only_the_last_passes_are_kept():
    times = timed(20)
    assert len(times.passes) == 8
    assert len(times.since(1000 * 17)) == 3


def test_a_recording_has_the_spans_of_the_last_passes():
    trace = Trace()
    trace.row("passes").record(Label("pass", requests=("a", "b")), 900, 990)
    trace.row("passes").record(Label("pass", flops=3), 1000, 1990)
    trace.row("disk 0", lane="disk").record(Label("read", 2, num_bytes=9), 1100, 1200)
    trace.row("experts").record(Label("waits for experts", 2), 1150, 1200, is_blocked=True)
    sent = msgspec.msgpack.encode(recording_of(trace, 1000, 1, 10**18, timed(2)))
    received = msgspec.msgpack.decode(sent, type=Recording)
    found = rows(received.to_trace())
    assert [span.label.flops for span in found["passes"]] == [3]
    assert found["disk 0"] == trace.row("disk 0").spans
    assert [span.label.name for span in found["experts"]] == [*KINDS["experts"], "waits for experts"]
    assert [row.lane for row in received.to_trace().rows if row.name == "disk 0"] == ["disk"]
    assert (received.num_passes, received.clock_ns) == (1, 10**18)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=4))
def test_engines_align_by_their_clocks(clocks):
    """The same moment has the same time in all of them."""
    processes = []
    for number, clock_ns in enumerate(clocks, start=1):
        trace = Trace()
        trace.row("passes").record(Label("pass"), 10**12 - clock_ns, 10**12 - clock_ns + 500)
        trace.row("passes").record(Label("pass", task_id=1), 2 * 10**12 - clock_ns, 2 * 10**12 - clock_ns + 500)
        trace.row("passes").record(Label("pass", after=(1,)), 3 * 10**12 - clock_ns, 3 * 10**12 - clock_ns + 500)
        processes.append(Process(trace, number, f"engine {number}", clock_ns))
    origin_ns, events = events_of(processes)
    events = list(events)
    assert origin_ns == 10**12
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"engine {number}" for number in range(1, len(clocks) + 1)
    }
    slices = [event for event in events if event["ph"] == "X"]
    for number in range(1, len(clocks) + 1):
        assert [event["ts"] for event in slices if event["pid"] == number] == [0, 10**9, 2 * 10**9]
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(arrows)) == len(clocks), "arrows of processes are apart"
