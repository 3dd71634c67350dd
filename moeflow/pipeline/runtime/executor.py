"""Runs a stream of tasks on lanes, by the rules of `ready_tasks.py`.

The calling thread is the lane `COMPUTE`, so its tasks cost no change of threads. It also runs lanes whose tasks only
launch work: such a task is finished when its work is launched. A thread that finishes a task starts the tasks that
waited for it. Only the caller reads the stream. The executor does not know the data of an op.
Source: ExpertFlow 3.2 and 3.5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns
from typing import NamedTuple

from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.ready_tasks import WINDOW, Entry, ReadyTasks
from moeflow.pipeline.runtime.trace import Label, Trace, waiting
from moeflow.pipeline.runtime.traced_tasks import task_label
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
        launching: Collection[str] = (),
        window: int = WINDOW,
        trace: Trace | None = None,
    ) -> None:
        """At most `window` tasks are unfinished at once.

        The caller runs the tasks of the lane `COMPUTE` and of the lanes `launching`.
        """
        self.ops = ops
        self.lanes = lanes
        self.own_lanes = (COMPUTE, *launching)
        self.window = window
        trace = trace or Trace(is_on=False)
        self.rows = {name: trace.row(name) for name in self.own_lanes}
        self.row = self.rows[COMPUTE]

    def check(self, task: Task) -> Task:
        """Return the task. Raises: ValueError if its op or its lane is unknown."""
        if task.op not in self.ops:
            raise ValueError(f"task {task.id}: there is no op {task.op!r}, only {', '.join(self.ops)}")
        if task.lane not in self.own_lanes and task.lane not in self.lanes:
            names = ", ".join([*self.own_lanes, *self.lanes])
            raise ValueError(f"task {task.id} ({task.op}): there is no lane {task.lane!r}, only {names}")
        return task

    def run(self, tasks: Iterable[Task]) -> None:
        """Run all tasks, or stop at the first failure.

        Blocks: until no task runs any more, also after an interrupt. Raises: the error of the failed task.
        """
        failure = _ExecutorRun(self, tasks).go()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame


class _ExecutorRun(ReadyTasks):
    """One run. The lock guards `failure` and `num_running`, too."""

    def __init__(self, executor: Executor, tasks: Iterable[Task]) -> None:
        super().__init__(map(executor.check, tasks), executor.window, executor.own_lanes)
        self.executor = executor
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung by lanes after each change
        self.failure: BaseException | None = None  # the first
        self.num_running = 0  # in other lanes

    def go(self) -> BaseException | None:
        try:
            self.run_all()
        finally:
            self._end()
        try:
            return self.failure
        finally:
            self.failure = None  # errors hold the frames that hold this

    def submit(self, entry: Entry) -> None:
        task = entry.task
        label = partial(_label, task) if self.executor.row.is_on else _UNTRACED
        lane = self.executor.lanes[task.lane]
        entry.future = lane.submit(self._run_there, entry, priority=task.priority, label=label)
        entry.future.on_done(partial(self._fail_if_refused, entry))

    def run_here(self, entry: Entry) -> None:
        task = entry.task
        row = self.executor.rows[task.lane]
        start_ns = perf_counter_ns() if row.is_on else 0
        cost, failure = None, None
        try:
            cost = self.executor.ops[task.op](task)
        except Exception as error:
            failure = error
        if start_ns:
            row.record(_label(task, cost), start_ns, perf_counter_ns())
        self._end_task(entry, failure)
        failure = None  # its traceback holds this frame

    # In the threads of lanes:

    def _run_there(self, entry: Entry) -> Cost | None:
        with self.lock:
            if self.is_stopped:
                return None
            self.num_running += 1
        cost, failure = None, None
        try:
            cost = self.executor.ops[entry.task.op](entry.task)
        except BaseException as error:  # the caller gets every error
            failure = error
        self._end_task(entry, failure)
        failure = None  # its traceback holds this frame
        with self.lock:
            self.num_running -= 1
        self.bell.put(None)
        return cost

    def _fail_if_refused(self, entry: Entry, future: Future[Cost | None]) -> None:
        """Fail a task that its lane cancelled, as a closed lane does."""
        if future.error is not None:
            self._end_task(entry, future.error)
            self.bell.put(None)

    # In any thread:

    def _end_task(self, entry: Entry, error: BaseException | None) -> None:
        if error is None:
            self.finish(entry)
            return
        with self.lock:
            self.failure = self.failure or error
        self.fail(entry)

    # In the caller's thread:

    def wait(self) -> None:
        """Wait until the caller can run a task or read one, or until the run is over."""
        row = self.executor.row
        with waiting(row, self._awaited() if row.is_on else _UNTRACED):
            while self.must_wait:
                self.bell.get()

    def _awaited(self) -> Label:
        """Return the label of the task that this lane's first unfinished task waits for, or else of the first."""
        with self.lock:
            entries = self.unfinished.values()
            mine = next((entry for entry in entries if entry.task.lane == COMPUTE), None)
            inputs = () if mine is None else (self.unfinished.get(before) for before in mine.task.after)
            awaited = next(filter(None, (*inputs, *entries)), None)
        if awaited is None:  # finished in the meantime
            return _UNTRACED
        return Label(f"waits for {awaited.task.op}", awaited.task.layer, awaited.task.micro_batch)

    def _end(self) -> None:
        """Start no more tasks, and wait for the running ones."""
        with self.lock:
            self.is_stopped = True
        while self.num_running:
            self.bell.get()
        for entry in list(self.unfinished.values()):
            if entry.future is not None:
                entry.future.cancel()


def _label(task: Task, cost: Cost | None) -> Label:
    return task_label(task, *(cost or (0, 0)))
