"""The tasks of a finished pass, from its trace.

Tasks of a pipeline carry their numbers and dependencies. Other passes have spans only, and these become tasks. A span
comes after the previous one of its thread. A read also comes
after the last computation that had ended when it began. A computation also comes after the reads for its layer that had
ended by then. Waits are not tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from moeflow.pipeline.runtime.trace import Label, Trace, TraceRow, TraceSpan
from moeflow.pipeline.task import COMPUTE, Task, TaskMaker


def task_label(task: Task, num_bytes: int, flops: int) -> Label:
    """Return the label of a task's span."""
    return Label(task.op, task.layer, task.micro_batch, num_bytes, flops, task.id, task.after)


def tasks_of_last_pass(trace: Trace, passes: str, computing: Collection[str]) -> Iterator[Task]:
    """Yield the tasks of the last span on the row `passes`; `computing` are the rows of the thread that computes."""
    last = max((span for row in trace.rows if row.name == passes for span in row.spans), key=_end, default=None)
    if last is None:
        return
    spans = [
        (row, span)
        for row in trace.rows
        if row.name != passes
        for span in row.spans
        if last.start_ns <= span.start_ns < last.end_ns and not span.is_blocked
    ]
    spans.sort(key=lambda item: (item[1].start_ns, item[1].end_ns))
    if any(span.label.task_id is not None for _, span in spans):
        yield from _numbered(spans)
    else:
        yield from _by_time(spans, computing) if spans else [TaskMaker()("forward")]


def _end(span: TraceSpan) -> int:
    return span.end_ns


def _numbered(spans: list[tuple[TraceRow, TraceSpan]]) -> Iterator[Task]:
    for row, span in spans:
        label = span.label
        if label.task_id is not None:
            yield Task(label.task_id, label.name, label.layer, label.micro_batch, row.lane, label.after)


@dataclass(slots=True)
class _Done:
    """The tasks that have ended so far."""

    in_thread: dict[str, Task] = field(default_factory=dict)  # the latest of each
    computed: list[tuple[int, Task]] = field(default_factory=list)  # (when it ended, task)
    read: list[tuple[int, Task]] = field(default_factory=list)  # likewise; no computation has used it yet


def _by_time(spans: list[tuple[TraceRow, TraceSpan]], computing: Collection[str]) -> Iterator[Task]:
    make, done = TaskMaker(), _Done()
    for row, span in spans:
        is_computing = row.name in computing
        thread = COMPUTE if is_computing else row.name
        after = [done.in_thread.get(thread)]
        if is_computing:
            used = [pair for pair in done.read if pair[1].layer == span.label.layer and pair[0] <= span.start_ns]
            done.read = [pair for pair in done.read if pair not in used]
            after += [task for _, task in used]
        else:
            after += [task for end_ns, task in done.computed if end_ns <= span.start_ns][-1:]
        task = make(span.label.name, span.label.layer, lane=row.lane, after=after)
        done.in_thread[thread] = task
        (done.computed if is_computing else done.read).append((span.end_ns, task))
        yield task
