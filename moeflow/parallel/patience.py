"""How long a rank waits for others in a collective: longer, the more it has computed itself between two of them.

Ranks compute about the same between two collectives. So one that is slow, with long prompts of a large model, makes the
others slow as well, and they wait for it. Counts processor time, so idle ranks do not become patient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SLOWER: Final = 10.0  # than this rank


class Patience:
    """Call `begin` and `end` in each collective."""

    def __init__(self, least_s: float, clock: Callable[[], float] = time.thread_time) -> None:
        """Wait at least so long. The `clock` counts what this thread computes."""
        self.limit_s = least_s
        self._clock = clock
        self._since_s: float | None = None  # the end of the last collective; None: there was none

    def begin(self) -> None:
        """A collective begins. Since the one before, this rank has computed; before the first, it has loaded."""
        if self._since_s is not None:
            self.limit_s = max(self.limit_s, SLOWER * (self._clock() - self._since_s))

    def end(self) -> None:
        """The collective is over."""
        self._since_s = self._clock()
