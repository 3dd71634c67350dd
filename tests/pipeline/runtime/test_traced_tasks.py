"""The drawing of a pass matches its trace, with the order that its times prove."""

from __future__ import annotations

from moeflow.pipeline.runtime.trace import Label, Trace
from moeflow.pipeline.runtime.traced_tasks import tasks_of_last_pass


def made(spans, passes=((0, 100),)):
    """Return the tasks of a trace of these spans: (row, name, layer, start, end, is_blocked)."""
    trace = Trace()
    rows = {name: trace.row(name, lane=name.split()[0]) for name in ("passes", "experts", "disk 0", "disk 1")}
    for start, end in passes:
        rows["passes"].record(Label("pass"), start, end)
    for row, name, layer, start, end, *blocked in spans:
        rows[row].record(Label(name, layer), start, end, is_blocked=bool(blocked))
    return list(tasks_of_last_pass(trace, "passes", ("experts",)))


def test_spans_of_the_last_pass_become_tasks_after_what_had_ended():
    tasks = made(
        [
            ("experts", "layers", 0, 1, 9),  # of an earlier pass
            ("experts", "layers", 0, 21, 25),
            ("disk 0", "read", 0, 26, 40),
            ("disk 1", "prefetch", 1, 26, 33),
            ("experts", "experts", 0, 27, 30),  # while they are read
            ("experts", "waits for experts", 0, 30, 41, True),
            ("experts", "experts", 0, 41, 50),
            ("disk 1", "read", 1, 44, 60),
            ("experts", "layers", 1, 51, 55),
        ],
        passes=((0, 20), (20, 100)),
    )
    assert [(task.op, task.layer, task.lane, task.after) for task in tasks] == [
        ("layers", 0, "experts", ()),
        ("prefetch", 1, "disk", (0,)),
        ("read", 0, "disk", (0,)),
        ("experts", 0, "experts", (0,)),
        ("experts", 0, "experts", (3, 2)),
        ("read", 1, "disk", (1, 3)),
        ("layers", 1, "experts", (4, 1)),
    ]


def test_tasks_of_a_pipeline_are_those_that_the_executor_ran():
    trace = Trace()
    trace.row("passes").record(Label("pass"), 0, 100)
    trace.row("compute").record(Label("post_attention", 2, 1, task_id=7, after=(3, 5)), 50, 60)
    trace.row("link 0", lane="link").record(Label("load_hidden", 2, 1, task_id=5), 30, 40)
    tasks = list(tasks_of_last_pass(trace, "passes", ("experts",)))
    assert [(task.id, task.op, task.layer, task.micro_batch, task.lane, task.after) for task in tasks] == [
        (5, "load_hidden", 2, 1, "link", ()),
        (7, "post_attention", 2, 1, "compute", (3, 5)),
    ]


def test_a_pass_in_which_nothing_overlaps_is_one_task_and_without_a_pass_there_is_none():
    assert [task.op for task in made([])] == ["forward"]
    assert made([], passes=()) == []
