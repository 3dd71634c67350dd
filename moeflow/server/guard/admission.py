"""Bounds the queue: counts sequences that are not finished, and refuses more than the engine can soon serve.

Counted here, in the processes of the API, so that a refusal costs the engine nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moeflow.core.errors import QueueFullError, RequestError
from moeflow.server.guard.occupancy import Occupancy

_SMOOTHING = 0.1  # weight of the newest sequence in the mean duration
_MAX_RETRY_AFTER_S = 60.0


class Admission:
    """How many sequences may be under way: those running and `max_queue` waiting ones."""

    def __init__(
        self, max_queue: int, clock: Callable[[], float] = time.monotonic, *, occupancy: Occupancy | None = None
    ) -> None:
        """`occupancy` counts those of all processes; without it, this is the only one."""
        self._max_queue = max_queue
        self._occupancy = occupancy or Occupancy()
        self._clock = clock
        self._mean_duration_s = 1.0
        self.num_open = 0  # requests under way here, those of batch jobs included

    @property
    def num_unfinished(self) -> int:
        """Sequences that are admitted and not finished, in all processes."""
        return self._occupancy.total

    def admit(self, num_sequences: int, *, max_num_seqs: int, is_batch: bool = False) -> Ticket:
        """Admit a request of so many sequences. Batch requests are not counted: their job limits how many there are.

        Raises: QueueFullError when it should come back later; RequestError when it can never come in.
        """
        limit = max_num_seqs + self._max_queue
        if num_sequences > limit:
            raise RequestError(
                f"the request has {num_sequences} sequences (texts, or prompts times n), and this server takes {limit} "
                "at once (--max-num-seqs plus --max-queue): send fewer, or several requests"
            )
        if is_batch:
            return Ticket(self, 0, self._clock(), self.num_unfinished, is_batch=True)
        if (num_ahead := self.num_unfinished) + num_sequences > limit:
            wait_s = self._mean_duration_s * num_sequences / max_num_seqs
            raise QueueFullError(
                f"Queue full ({num_ahead}/{limit}); try again later",
                retry_after_s=min(max(wait_s, 1.0), _MAX_RETRY_AFTER_S),
            )
        self._occupancy.add(num_sequences)
        return Ticket(self, num_sequences, self._clock(), num_ahead)

    def give_back(self, num_sequences: int) -> None:
        """So many sequences are finished."""
        self._occupancy.add(-num_sequences)

    def note_duration(self, admitted_s: float) -> None:
        """Learn how long sequences take, from one admitted then and finished now."""
        self._mean_duration_s += _SMOOTHING * (self._clock() - admitted_s - self._mean_duration_s)


class Ticket:
    """One request's share of the bound, given back sequence by sequence."""

    def __init__(
        self, admission: Admission, num_sequences: int, admitted_s: float, num_ahead: int, *, is_batch: bool = False
    ) -> None:
        self.admitted_s = admitted_s  # on the clock of time.monotonic
        self.num_ahead = num_ahead  # sequences that were not finished then, without those of batch jobs
        self.is_batch = is_batch
        self._admission = admission
        self._num_left = num_sequences
        self._is_open = True
        admission.num_open += 1

    def finish_one(self) -> None:
        """Give back a sequence that has come to its end."""
        if self._num_left:
            self._give_back(1)
            self._admission.note_duration(self.admitted_s)

    def close(self) -> None:
        """Release the rest; a second call is harmless."""
        self._give_back(self._num_left)
        self._admission.num_open -= self._is_open
        self._is_open = False

    def _give_back(self, num_sequences: int) -> None:
        self._num_left -= num_sequences
        self._admission.give_back(num_sequences)
