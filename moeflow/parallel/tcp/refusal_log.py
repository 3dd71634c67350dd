"""Logs why connections are refused, without a line for each of one that comes again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

REPEAT_S: Final = 60.0  # without a log line for the same host and reason
_MAX_KNOWN: Final = 1000  # of hosts and reasons: memory does not grow with who knocks


class RefusalLog:
    """Writes warnings, and for repeated ones debug lines. From any thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._told_s: OrderedDict[tuple[str, str], float] = OrderedDict()  # by host and reason, the oldest first

    def note(self, host: str, what: str, reason: str) -> None:
        """Log that `what`, which says who it is, for a reason."""
        level = logging.WARNING if self._is_news(host, reason) else logging.DEBUG
        self._logger.log(level, "%s: %s", what, reason)

    def _is_news(self, host: str, reason: str) -> bool:
        now_s, key = self._clock(), (host, reason)
        with self._lock:
            if now_s - self._told_s.get(key, -REPEAT_S) < REPEAT_S:
                return False
            self._told_s[key] = now_s
            self._told_s.move_to_end(key)
            if len(self._told_s) > _MAX_KNOWN:
                self._told_s.popitem(last=False)
            return True
