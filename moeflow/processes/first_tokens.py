"""How many replicas keep the time to the first token below a target, by the times of the last seconds.

Knows no process. Its caller reports requests as they arrive, get tokens and end, and looks once a second.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from moeflow.core.engine_messages import Submission, TokenOutput

WINDOW_S = 30.0  # of measured times
SHARE = 0.9  # of requests that must meet the target
LEAST_WAITING = 0.5  # requests before their first token, per replica: with fewer, another replica saves no time
_RECENT_S = 2.0  # a slow request this long ago is recent


class FirstTokens:
    """Times to the first token of interactive requests, and the replicas that they need.

    When the number of ready replicas changes, measurements begin again.
    """

    def __init__(self, target_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._target_s = target_s
        self._clock = clock
        self._arrivals: dict[str, float] = {}  # request -> time, while it has no token
        self._measured: deque[tuple[float, float]] = deque()  # time of a first token, and the wait for it
        self._num_ready = 0
        self._since_s = clock()  # when this number became ready

    def note_arrival(self, submission: Submission) -> None:
        """A request begins to wait. Batch jobs and requests without tokens do not count."""
        if not submission.is_batch and submission.sampling.max_tokens != 0:
            self._arrivals[submission.request_id] = self._clock()

    def note_output(self, output: TokenOutput) -> None:
        """An output of a request arrives; perhaps it has the first token."""
        if output.token_ids and (arrived_s := self._arrivals.pop(output.request_id, None)) is not None:
            now_s = self._clock()
            self._measured.append((now_s, now_s - max(arrived_s, self._since_s)))

    def forget(self, request_id: str) -> None:
        """A request has ended, perhaps without a token."""
        self._arrivals.pop(request_id, None)

    def need(self, num_replicas: int, num_ready: int) -> int:
        """Return the number of replicas that meet the target, at most one more than now."""
        now_s = self._clock()
        if num_ready != self._num_ready:
            self._num_ready, self._since_s = num_ready, now_s
            self._measured.clear()
        while self._measured and self._measured[0][0] < now_s - WINDOW_S:
            self._measured.popleft()
        if num_ready == 0:
            return num_replicas
        waits = [now_s - max(arrived_s, self._since_s) for arrived_s in self._arrivals.values()]
        slow_waits = [wait_s for wait_s in waits if wait_s > self._target_s]
        times = [first_token_s for _, first_token_s in self._measured]
        num_waiting = (sum(times) + sum(waits)) / WINDOW_S / num_ready  # on average, by Little's law
        high_s = _high(times + slow_waits)
        if high_s <= self._target_s:
            return self._fewest(num_ready, high_s, num_waiting)
        is_slow_now = bool(slow_waits) or any(
            at_s >= now_s - _RECENT_S and first_token_s > self._target_s for at_s, first_token_s in self._measured
        )
        # With a replica on its way, its effect is awaited.
        return num_replicas + (is_slow_now and num_ready == num_replicas and num_waiting >= LEAST_WAITING)

    def _fewest(self, num_ready: int, high_s: float, num_waiting: float) -> int:
        """Return the smallest number of replicas that would still meet the target, by a pessimistic forecast.

        `num_waiting` is an upper bound of a replica's utilization. With `more` times the requests, passes take at most
        `more` times as long. The utilization then grows with the square, and times with 1 / (1 - utilization).
        """
        for number in range(1, num_ready):
            more = num_ready / number
            idle_share = 1 - num_waiting * more**2
            if idle_share > 0 and high_s * more * (1 - num_waiting) / idle_share <= self._target_s:
                return number
        return num_ready


def _high(times: list[float]) -> float:
    """Return the time that a `SHARE` of requests do not exceed; 0 without requests."""
    return sorted(times)[math.ceil(SHARE * len(times)) - 1] if times else 0.0
