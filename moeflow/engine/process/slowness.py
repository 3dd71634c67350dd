"""When a replica is slow: it answers, but no pass of it ends for much longer than any of the others has taken.

All replicas run the same model with the same limits, so the longest pass of the others says what a pass may take. One
that has been slow rests for a while before it is trusted again, so that it does not waver. Knows no process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SLOWER: Final = 4.0  # than the longest pass of the others
LEAST_S: Final = 1.0  # that such a pass counts for: processes are looked at once a second
REST_S: Final = 10.0


class SlowWatch:
    """Judges one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = -1.0

    def note(self, pass_s: float, longest_of_others_s: float) -> None:
        """No pass has ended for `pass_s`, though there is work; the others have taken as long as that at most."""
        if pass_s > SLOWER * max(longest_of_others_s, LEAST_S):
            self._until_s = self._clock() + REST_S

    @property
    def is_slow(self) -> bool:
        """Whether it has been slow a moment ago."""
        return self._clock() < self._until_s
