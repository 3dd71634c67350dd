"""Runs a stream of tasks: each as soon as those it comes after are done and its lane is free.

The calling thread is a lane itself, so what is computed there costs no change of threads. A task that is done starts
those that waited for it from the thread that did it; the stream is only read by the caller, and only so far ahead. What
an op works on is the business of whoever made the op. Source: ExpertFlow 3.2 and 3.5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, NamedTuple

from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Label, Trace, waiting
from moeflow.pipeline.runtime.window import WINDOW, Window
from moeflow.pipeline.task import COMPUTE, Task

_UNTRACED = Label("task")


class Cost(NamedTuple):
    """What an op did, for the trace."""

    num_bytes: int = 0
    flops: int = 0


Op = Callable[[Task], Cost | None]


class Executor:
    """Ops by name, the lanes they run on, and how far to read ahead."""

    def __init__(
        self,
        ops: Mapping[str, Op],
        lanes: Mapping[str, Lane],
        *,
        window: int = WINDOW,
        trace: Trace | None = None,
    ) -> None:
        """At most `window` tasks are unfinished at once; those of the lane `COMPUTE` are done by the caller."""
        self.ops = ops
        self.lanes = lanes
        self.window = window
        self.row = None if trace is None else trace.row(COMPUTE)

    def check(self, task: Task) -> None:
        """Raise ValueError if nobody can do the task."""
        if task.op not in self.ops:
            raise ValueError(f"task {task.id}: there is no op {task.op!r}, only {', '.join(self.ops)}")
        if task.lane != COMPUTE and task.lane not in self.lanes:
            names = ", ".join([COMPUTE, *self.lanes])
            raise ValueError(f"task {task.id} ({task.op}): there is no lane {task.lane!r}, only {names}")

    def run(self, tasks: Iterable[Task]) -> None:
        """Do all tasks, or those until the first fails.

        Blocks: until nothing runs any more, also when it is interrupted. Raises: what the task raised.
        """
        failure = _Run(self, tasks).go()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame


class _Entry:
    """A task that was read and is not done."""

    __slots__ = ("future", "num_missing", "successors", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.num_missing = 0  # tasks that it waits for
        self.successors: list[_Entry] = []
        self.future: Future[Any] | None = None  # in another lane's queue

    def __lt__(self, other: _Entry) -> bool:
        return (self.task.priority, self.task.id) < (other.task.priority, other.task.id)


class _Run:
    """One stream on its way. `lock` guards what lanes change from their threads: all from `unfinished` on."""

    def __init__(self, executor: Executor, tasks: Iterable[Task]) -> None:
        self.executor = executor
        self.window = Window(tasks, executor.window)
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung by lanes after they have changed anything
        self.lock = threading.Lock()
        self.unfinished: dict[int, _Entry] = {}  # by id, in the order of the stream
        self.ready: list[_Entry] = []  # a heap: what the caller can do
        self.failure: BaseException | None = None  # the first
        self.num_running = 0  # in other lanes
        self.is_over = False

    def go(self) -> BaseException | None:
        try:
            while self.failure is None:
                self._read_ahead()
                if self.ready:
                    with self.lock:
                        entry = heappop(self.ready)
                    self._do_here(entry)
                elif self.unfinished:
                    self._wait()
                elif self.window.is_at_end:
                    break
        finally:
            self._end()
        try:
            return self.failure
        finally:
            self.failure = None  # errors hold the frames that hold this

    def _read_ahead(self) -> None:
        """Launch some tasks, or as many as it takes to have something to do here."""
        while tasks := self.window.read(len(self.unfinished)):
            for task in tasks:
                self._launch(task)
            if self.ready:
                return

    def _launch(self, task: Task) -> None:
        self.executor.check(task)
        entry = _Entry(task)
        with self.lock:
            for before in task.after:
                predecessor = self.unfinished.get(before)
                if predecessor is not None:
                    predecessor.successors.append(entry)
                    entry.num_missing += 1
            self.unfinished[task.id] = entry
            is_free = not entry.num_missing and self.failure is None  # a task before it may be the one that failed
        if is_free:
            self._start([entry])

    def _start(self, entries: Iterable[_Entry]) -> None:
        """Start tasks that wait for no other, each in its lane, in order."""
        for entry in entries:
            if entry.task.lane == COMPUTE:
                with self.lock:
                    heappush(self.ready, entry)
            else:
                self._submit(entry)

    def _submit(self, entry: _Entry) -> None:
        task = entry.task
        label = _UNTRACED if self.executor.row is None else partial(_label, task)
        lane = self.executor.lanes[task.lane]
        entry.future = lane.submit(self._do_there, entry, priority=task.priority, label=label)
        entry.future.on_done(partial(self._fail_if_refused, entry))

    def _do_here(self, entry: _Entry) -> None:
        row, task = self.executor.row, entry.task
        start_ns = 0 if row is None else perf_counter_ns()
        cost, failure = None, None
        try:
            cost = self.executor.ops[task.op](task)
        except Exception as error:
            failure = error
        if row is not None:
            row.record(_label(task, cost), start_ns, perf_counter_ns())
        freed, failure = self._finish(entry, failure), None  # its traceback holds this frame
        self._start(freed)

    # In the threads of lanes:

    def _do_there(self, entry: _Entry) -> Cost | None:
        with self.lock:
            if self.is_over:
                return None
            self.num_running += 1
        cost, failure = None, None
        try:
            cost = self.executor.ops[entry.task.op](entry.task)
        except BaseException as error:  # whatever it is, the caller has to get it
            failure = error
        self._report(entry, failure)
        failure = None  # its traceback holds this frame
        with self.lock:
            self.num_running -= 1
        self.bell.put(None)
        return cost

    def _fail_if_refused(self, entry: _Entry, future: Future[Cost | None]) -> None:
        """Fail what a lane cancels, as one that is closed does."""
        if future.error is not None:
            self._report(entry, future.error)
            self.bell.put(None)

    def _report(self, entry: _Entry, failure: BaseException | None) -> None:
        freed = self._finish(entry, failure)
        if not self.is_over:
            self._start(freed)

    # In any thread:

    def _finish(self, entry: _Entry, error: BaseException | None) -> list[_Entry]:
        """Return those that waited for nothing else; none after an error."""
        with self.lock:
            del self.unfinished[entry.task.id]
            if error is not None:
                self.failure = self.failure or error
                return []
            for successor in entry.successors:
                successor.num_missing -= 1
            return [successor for successor in entry.successors if not successor.num_missing]

    # In the caller's:

    def _wait(self) -> None:
        """Wait until there may be something to do here, or something to read, or all is done."""
        row = self.executor.row
        with waiting(row, _UNTRACED if row is None else self._awaited()):
            while self.unfinished and not self.ready and self.failure is None:
                if self.window.has_room(len(self.unfinished)):
                    break
                self.bell.get()

    def _awaited(self) -> Label:
        """Return what the first unfinished task of this lane waits for, or else the first of all."""
        with self.lock:
            entries = self.unfinished.values()
            mine = next((entry for entry in entries if entry.task.lane == COMPUTE), None)
            inputs = () if mine is None else (self.unfinished.get(before) for before in mine.task.after)
            awaited = next(filter(None, (*inputs, *entries)), None)
        if awaited is None:  # done in the meantime
            return _UNTRACED
        return Label(f"waits for {awaited.task.op}", awaited.task.layer, awaited.task.micro_batch)

    def _end(self) -> None:
        """Begin nothing more, and wait for what runs."""
        with self.lock:
            self.is_over = True
        while self.num_running:
            self.bell.get()
        for entry in list(self.unfinished.values()):
            if entry.future is not None:
                entry.future.cancel()


def _label(task: Task, cost: Cost | None) -> Label:
    num_bytes, flops = cost or (0, 0)
    return Label(task.op, task.layer, task.micro_batch, num_bytes, flops, task.id, task.after)
