"""How many bytes of large request bodies are in memory at once, and whose turn it is to be parsed.

A body of some megabytes takes several times as much once it is parsed, and holds the interpreter's lock meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from moeflow.core.errors import QueueFullError
from moeflow.core.units import KIB

LARGE_BYTES = 64 * KIB  # smaller bodies are read and parsed at once
MAX_LARGEST = 16  # bodies of the largest size that may be in memory at once
_RETRY_AFTER_S = 2.0
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class LargeBodies:
    """What all requests with large bodies share."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._turn = asyncio.Semaphore(1)
        self._limit = MAX_LARGEST * max_body_bytes
        self._num_bytes = 0

    async def read(
        self, num_bytes: int, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call a function that reads so many bytes. Large ones are read in a thread, one at a time."""
        if num_bytes <= LARGE_BYTES:
            return function(*args, **kwargs)
        async with self._turn:
            return await asyncio.to_thread(function, *args, **kwargs)

    def reserve(self, num_bytes: int) -> None:
        """Count a body in, before it is read. Raises: QueueFullError when others must leave first."""
        if self._num_bytes + num_bytes > self._limit:
            raise QueueFullError(
                f"requests of {self._num_bytes} bytes in all are under way, of {self._limit} at most; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count a body out."""
        self._num_bytes -= num_bytes
