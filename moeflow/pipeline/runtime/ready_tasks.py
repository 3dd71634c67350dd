"""The order of tasks of a stream: the common rules of the executor and of the virtual clock.

A task starts once all tasks in its `after` are done and its lane is free. The caller is the lane `COMPUTE`: it takes
the most urgent task, and among equals the earliest of the stream. It may have further lanes, whose tasks take it next
to no time and go first. The other lanes order their tasks by `UrgentFirst`.
The stream is read as far as the window permits. Lanes report finished tasks from any thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.task import COMPUTE, Task, checked

WINDOW = 256  # unfinished tasks at once
_READS_PER_TURN = 8  # tasks per read: the first task should not wait for a whole window


class Entry:
    """A task that was read and is not finished."""

    __slots__ = ("future", "num_missing", "successors", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.num_missing = 0  # unfinished tasks in `task.after`
        self.successors: list[Entry] = []
        self.future: Future[Any] | None = None  # in the queue of a real lane

    def __lt__(self, other: Entry) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[bool, int, int]:
        return (self.task.lane == COMPUTE, self.task.priority, self.task.id)


class ReadyTasks(ABC):
    """One run of a stream. `lock` guards `unfinished`, `is_stopped` and the caller's queue."""

    def __init__(self, tasks: Iterable[Task], window: int, own_lanes: Collection[str] = (COMPUTE,)) -> None:
        """At most `window` tasks are unfinished at once; `own_lanes` are the caller's."""
        self.lock = threading.Lock()
        self.unfinished: dict[int, Entry] = {}  # by id, in the order of the stream
        self.is_stopped = False  # no task starts any more
        self._stream = checked(tasks)
        self._is_at_end = False  # of the stream, as far as reading has shown
        self._window = window
        self._own_lanes = own_lanes
        self._own: list[Entry] = []  # a heap: tasks that the caller can run

    @abstractmethod
    def run_here(self, entry: Entry) -> None:
        """Run a task of the caller's, until it is finished or failed."""

    @abstractmethod
    def submit(self, entry: Entry) -> None:
        """Queue a task in its lane, which is not the caller's."""

    @abstractmethod
    def wait(self) -> None:
        """Wait while `must_wait`."""

    def run_all(self) -> None:
        """Run tasks until all are finished or one has failed.

        Raises: ValueError if a task of the stream does not come after its inputs.
        """
        while not (self.is_stopped or (self._is_at_end and not self.unfinished)):
            self._read_ahead()
            if self._own:
                with self.lock:
                    entry = heappop(self._own)
                self.run_here(entry)
            else:
                self.wait()

    @property
    def must_wait(self) -> bool:
        """Whether the caller can do nothing before another lane finishes a task."""
        return bool(self.unfinished) and not (self._own or self._has_room or self.is_stopped)

    def finish(self, entry: Entry) -> None:
        """Mark a task as finished, and start the tasks that waited for it alone, in the order of the stream."""
        with self.lock:
            del self.unfinished[entry.task.id]
            for successor in entry.successors:
                successor.num_missing -= 1
            freed = [] if self.is_stopped else [one for one in entry.successors if not one.num_missing]
        for successor in freed:
            self._start(successor)

    def fail(self, entry: Entry) -> None:
        """Remove a failed task, and start no other."""
        with self.lock:
            del self.unfinished[entry.task.id]
            self.is_stopped = True

    @property
    def _has_room(self) -> bool:
        return not self._is_at_end and len(self.unfinished) < self._window

    def _read_ahead(self) -> None:
        """Read a few tasks, or as many as it takes until the caller has one to run."""
        while self._has_room:
            wanted = min(self._window - len(self.unfinished), _READS_PER_TURN)
            tasks = list(islice(self._stream, wanted))
            self._is_at_end = len(tasks) < wanted
            for task in tasks:
                self._add(task)
            if self._own:
                return

    def _add(self, task: Task) -> None:
        entry = Entry(task)
        with self.lock:
            for before in task.after:
                predecessor = self.unfinished.get(before)
                if predecessor is not None:
                    predecessor.successors.append(entry)
                    entry.num_missing += 1
            self.unfinished[task.id] = entry
            is_free = not entry.num_missing and not self.is_stopped  # an input may be the task that failed
        if is_free:
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        if entry.task.lane in self._own_lanes:
            with self.lock:
                heappush(self._own, entry)
        else:
            self.submit(entry)
