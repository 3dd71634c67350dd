"""The first SIGTERM or Ctrl-C asks a process to end in order. The second one ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_first_signal(leave: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call `leave` at the first signal. It may raise. Only for the main thread."""

    def handle(*_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        leave()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
