"""Threads for work on texts, so few that a burst of it leaves the processor to others, and apart for long texts.

Tokenizing a text takes a second for each million characters. Long texts wait for other long texts; a short prompt waits
for short ones only. What waits has no thread, and is dropped when its task is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

LONG_CHARS = 32 * 1024  # takes about 30 ms to tokenize
NUM_SHORT, NUM_LONG = 2, 1  # texts worked on at once


class TextLanes:
    """Two queues of work, each served in order of arrival."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT, thread_name_prefix="short-text")
        self._long = ThreadPoolExecutor(NUM_LONG, thread_name_prefix="long-text")

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Return what `work`, on texts of so many characters in all, returns. Raises: its exceptions."""
        lane = self._long if num_chars > LONG_CHARS else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """End the threads after their current tasks."""
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)
