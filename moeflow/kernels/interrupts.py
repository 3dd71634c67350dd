"""Puts Ctrl-C off while something must not be cut in two. Knows nothing of what that is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay a Ctrl-C that comes inside the block until its end.

    Does nothing outside the main thread, where Python delivers no signals, or where Ctrl-C is not handled in
    Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[-1])
