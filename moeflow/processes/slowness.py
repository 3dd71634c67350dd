"""When a replica is slow: it answers, but no pass of it ends for much longer than any of the others has taken.

All replicas run the same model with the same limits, so the longest pass of the others bounds the time of a pass. The
bound grows in proportion for a pass with more tokens than theirs. One that has been slow rests for a while
before it is trusted again, so that it does not waver. Knows no process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SLOWER: Final = 4.0  # than the longest pass of the others
LEAST_S: Final = 1.0  # that such a pass counts for: processes are looked at once a second
REST_S: Final = 10.0


@dataclass(slots=True)
class LargestPass:
    """Maxima over the passes of a replica's engines: tokens and seconds."""

    num_tokens: int = 0  # 0: it has computed nothing yet
    longest_s: float = 0.0

    def note(self, num_tokens: int, longest_s: float) -> None:
        """A pass has computed so many tokens; the engine's longest has taken so long."""
        self.num_tokens = max(self.num_tokens, num_tokens)
        self.longest_s = max(self.longest_s, longest_s)

    def expect_s(self, num_tokens: int) -> float:
        """Return the bound for a pass of this many tokens; at least one pass was recorded."""
        return max(self.longest_s, LEAST_S) * max(num_tokens / self.num_tokens, 1.0)


class SlowWatch:
    """Judges one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = -1.0

    def note(self, pass_s: float, expected_s: float) -> None:
        """No pass has ended for `pass_s`, though there is work; by what others took, it may take so long."""
        if pass_s > SLOWER * expected_s:
            self._until_s = self._clock() + REST_S

    @property
    def is_slow(self) -> bool:
        """Whether it has been slow a moment ago."""
        return self._clock() < self._until_s
