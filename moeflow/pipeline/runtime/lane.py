"""A lane: threads that run queued work, the most urgent first, and among equals the oldest first.

A link has a lane of one thread. A disk has one of many, since concurrent reads are fastest. Queued work can be
cancelled, running work cannot (thesis 3.2: tasks are non-preemptible). A lane does not know its work.

The threads are Python's: long work must release the interpreter's lock, as reads and kernels do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter_ns
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple

from moeflow.pipeline.priority import DEMAND
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.trace import Label, Trace, TraceRow
from moeflow.pipeline.runtime.urgent_first import UrgentFirst

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LabelOf = Callable[[T | None], Label]

_UNNAMED = Label("work")


class Lane:
    """Threads and their common queue."""

    def __init__(self, name: str, num_threads: int = 1, *, trace: Trace | None = None) -> None:
        """Start the threads; `close` ends them."""
        self.name = name
        self._queue = UrgentFirst[_Job[Any]]()
        self._lock = threading.Lock()  # of the queue
        self._bell: SimpleQueue[None] = SimpleQueue()  # rung for each job; waiting at it costs no polling
        self._is_closed = False
        names = [name] if num_threads == 1 else [f"{name} {i}" for i in range(num_threads)]
        trace = trace or Trace(is_on=False)
        rows = [trace.row(row_name, lane=name) for row_name in names]
        self._threads = [
            threading.Thread(target=self._serve, args=(row,), name=f"lane {thread_name}", daemon=True)
            for thread_name, row in zip(names, rows, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, work: Callable[[*Ts], T], *args: *Ts, priority: int = DEMAND, label: Label | LabelOf[T] = _UNNAMED
    ) -> Future[T]:
        """Queue `work(*args)` and return its future result, or the error it raises.

        Smaller priorities go first. A label that only the result tells (None after an error) is a function of it.
        After `close` the result is a CancelledError.
        """
        job = _Job[T](work, args, label)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._queue.put(job, priority)
        if is_closed:
            job.cancel()
        else:
            self._bell.put(None)
        return job

    def close(self) -> None:
        """Cancel queued work, and end the threads after their running work.

        Blocks: until they have ended. May be called again, also after an interrupted call.
        """
        with self._lock:
            self._is_closed = True
            queued = list(self._queue)
        for job in queued:
            job.cancel()
        for _ in self._threads:
            self._bell.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, row: TraceRow) -> None:
        while True:
            self._bell.get()
            is_last = self._is_closed  # read first: after it nothing is added
            # All queued jobs, not one per ring: an interrupt in `submit` may have lost a ring.
            while (job := self._next()) is not None:
                job.run(row)
                del job  # and the objects it holds
            if is_last:
                return

    def _next(self) -> _Job[Any] | None:
        with self._lock:
            return self._queue.take()


class _Job(Future[T]):
    """Queued work, and its future."""

    __slots__ = ("_args", "_label", "_work")

    def __init__(self, work: Callable[..., T], args: tuple[Any, ...], label: Label | LabelOf[T]) -> None:
        super().__init__()
        self._work: Callable[..., T] | None = work
        self._args = args
        self._label = label

    def cancel(self) -> bool:
        """Cancel as any future, and drop the work's arguments."""
        if not super().cancel():
            return False
        self._work, self._args = None, ()
        return True

    def run(self, row: TraceRow) -> None:
        """Do the work, unless it was cancelled."""
        if not self.begin():
            return
        work, args = self._work, self._args
        assert work is not None
        self._work, self._args = None, ()
        start_ns = perf_counter_ns() if row.is_on else 0
        try:
            value = work(*args)
        except BaseException as error:  # the waiting caller gets every error
            self._record(row, start_ns, None)
            self.set_error(error)
            del self  # the error's traceback holds this frame, and would hold the future that holds the error
        else:
            self._record(row, start_ns, value)
            self.set_result(value)

    def _record(self, row: TraceRow, start_ns: int, value: T | None) -> None:
        if start_ns:
            end_ns = perf_counter_ns()
            label = self._label if isinstance(self._label, Label) else self._label(value)
            row.record(label, start_ns, end_ns)
