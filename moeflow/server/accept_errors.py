"""Connections that cannot be accepted for lack of descriptors or memory: a log line now and then.

asyncio would write a traceback for each connection that it could accept at once, every second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

logger = logging.getLogger(__name__)

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # for these, asyncio tries again
_INTERVAL_S = 10.0


class AcceptErrors:
    """An event loop's exception handler."""

    def __init__(self) -> None:
        """Nothing is in the log yet."""
        self._next_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of accepting a connection shortly and rarely, and any other one as asyncio does."""
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_s:
            self._next_s = loop.time() + _INTERVAL_S
            logger.error("new connections wait: %s; raise the limit of the server's process", error.strerror)
