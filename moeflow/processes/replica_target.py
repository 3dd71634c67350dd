"""How many replicas a load needs: a few seconds of load add replicas, minutes without it remove them.

Knows no process. Its caller looks once a second, and starts or ends replicas.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from moeflow.processes.first_tokens import FirstTokens

GROW_AFTER_S = 5.0
SHRINK_AFTER_S = 300.0
FULL_SHARE = 0.8  # of a replica's places, or of its KV cache: with more in use, another replica is needed
_LOOK_TOLERANCE_S = 2.0  # looks are not exactly a second apart


class ReplicaTarget:
    """The number of replicas to have, between two bounds."""

    def __init__(
        self, least: int, most: int, first_token_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`first_token_s` is the target for the time to the first token; None: there is none."""
        self._least, self._most = least, most
        self.first_tokens = None if first_token_s is None else FirstTokens(first_token_s, clock)
        self._clock = clock
        self._needs: deque[tuple[float, int]] = deque()  # time and replicas needed, of the last minutes

    def note(self, *, num_requests: int, num_places: int, kv_blocks: float, num_ready: int, number: int) -> int:
        """Return the number of replicas to have instead of `number`.

        `num_requests` run or wait, and a replica has `num_places` for them. `kv_blocks` is the sum over replicas of the
        shares of their KV caches in use. `num_ready` of the replicas compute.
        """
        now_s = self._clock()
        need = math.ceil(max(num_requests / num_places, kv_blocks) / FULL_SHARE)
        if self.first_tokens is not None:
            need = max(need, self.first_tokens.need(number, num_ready))
        self._needs.append((now_s, min(max(need, self._least), self._most)))
        while self._needs[0][0] < now_s - SHRINK_AFTER_S:
            self._needs.popleft()
        if (lowest := self._over(now_s - GROW_AFTER_S, min)) is not None and lowest > number:
            return lowest
        if (highest := self._over(now_s - SHRINK_AFTER_S, max)) is not None and highest < number:
            return highest
        return number

    def _over(self, since_s: float, choose: Callable[[list[int]], int]) -> int | None:
        """Return the chosen need since then; None: it is not known for so long."""
        found = [need for at_s, need in self._needs if at_s >= since_s]
        oldest_s = self._needs[0][0]
        return choose(found) if oldest_s <= since_s + _LOOK_TOLERANCE_S else None
