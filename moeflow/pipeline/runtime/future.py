"""A value that will exist later, or the error that took its place.

The caller that launches work gets a future, and waits for its value or asks to be called back. The standard library's
future has a condition variable. This one has one lock and two lists, since a pass of a small model makes thousands.
Source: ExpertFlow 3.2 ("launching a task returns a future").
"""

from __future__ import annotations

import logging
from _thread import allocate_lock
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class Future(Generic[T]):
    """Set once, by the caller that got True from `begin`; read by any thread."""

    __slots__ = ("_begun", "_callbacks", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False  # whether there is a value or an error
        self._begun = allocate_lock()  # acquired once, to run or to cancel the work, and never released
        self._callbacks: list[Callable[[Future[T]], Any]] = []
        self._error: BaseException | None = None
        self._value: T

    @property
    def error(self) -> BaseException | None:
        """The error, if the future is done and has no value."""
        return self._error

    def begin(self) -> bool:
        """Claim the future: return True to the one caller that must set it, False to others and after `cancel`."""
        return self._begun.acquire(False)

    def cancel(self) -> bool:
        """Cancel the work if it has not begun; then the result is a CancelledError, and True is returned."""
        if not self.begin():
            return False
        self.set_error(CancelledError())
        return True

    def set_result(self, value: T) -> None:
        """Finish with a value."""
        self._value = value
        self._finish()

    def set_error(self, error: BaseException) -> None:
        """Finish with an error."""
        self._error = error
        self._finish()

    def result(self, timeout_s: float | None = None) -> T:
        """Return the value. Blocks: until it is done. Raises: the error that took its place; TimeoutError."""
        try:
            if not self.is_done:
                self._wait(timeout_s)
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # the error's traceback holds this frame, the frame would hold the future, and that the error

    def on_done(self, callback: Callable[[Future[T]], Any]) -> None:
        """Call back once it is done, in the thread that finishes it; at once, and in this one, if it is done."""
        self._callbacks.append(callback)
        if self.is_done:  # `_finish` may have missed the new one
            self._call_back()

    def _finish(self) -> None:
        self.is_done = True
        if self._callbacks:
            self._call_back()

    def _call_back(self) -> None:
        # Two threads may be here at once; each callback is popped by one of them.
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a future failed")

    def _wait(self, timeout_s: float | None) -> None:
        gate = allocate_lock()
        gate.acquire()
        self.on_done(lambda _: gate.release())
        if not gate.acquire(True, -1 if timeout_s is None else timeout_s):
            raise TimeoutError(f"no result after {timeout_s} s")
