"""Into how many micro-batches passes are best cut while other processes compute a part of them: tried, and measured.

More in flight wait less, as one computes while another waits, and read weights again, which of few tokens may take
longer than the waiting. What is shorter depends on machines and routing, so it is found out in passes of about as many
tokens and sequences: half as many micro-batches as are best so far are tried now and then, and twice as many unless
they could not win even if nothing waited. A try that changes nothing makes the next ones rarer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

MAX_IN_FLIGHT: Final = 8
_WINDOW: Final = 7  # passes that a number is judged by: the last ones
_FIRST_TRY_PASSES: Final = 32  # between the judgement of a number and the next try, ...
_LAST_TRY_PASSES: Final = 1024  # ... twice as many after each that changes nothing, up to this


@dataclass(slots=True)
class _Measured:
    """The last passes with one number of micro-batches, in seconds a token."""

    whole: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def is_known(self) -> bool:
        return len(self.whole) == _WINDOW


class _Size:
    """What is known of passes of about the same size."""

    def __init__(self) -> None:
        self.best = 1
        self._measured: dict[int, _Measured] = {}
        self._tried: int | None = None
        self._num_passes = 0  # since the last try
        self._interval = _FIRST_TRY_PASSES
        self._goes_up = True

    def choose(self, most: int) -> int:
        if self._tried is not None and self._tried <= most:
            return self._tried
        return min(self.best, most)

    def note(self, number: int, whole: float, busy: float) -> None:
        measured = self._measured.setdefault(number, _Measured())
        measured.whole.append(whole)
        measured.busy.append(busy)
        if number == self._tried:
            if self._num_tried(measured):
                self._judge(number)
        elif number == self.best and self._tried is None:
            self._num_passes += 1
            if measured.is_known and self._num_passes >= self._interval:
                self._begin_try()

    def _num_tried(self, measured: _Measured) -> bool:
        """Count a pass of a try; return whether it was the last."""
        self._num_passes += 1
        return self._num_passes >= _WINDOW and measured.is_known

    def _judge(self, number: int) -> None:
        """Take a number that is shorter than the best's shortest quarter: less is noise. Else, try less often."""
        if median(self._measured[number].whole) < sorted(self._measured[self.best].whole)[_WINDOW // 4]:
            self.best = number
        else:
            self._interval = min(2 * self._interval, _LAST_TRY_PASSES)
            self._goes_up = not self._goes_up
        self._tried, self._num_passes = None, 0

    def _begin_try(self) -> None:
        self._num_passes = 0
        up, down = self.best * 2, self.best // 2
        can_go_up = up <= MAX_IN_FLIGHT and self._can_win(up)
        if can_go_up and (self._goes_up or not down):
            self._tried = up
        elif down:
            self._tried = down
        else:
            self._interval = min(2 * self._interval, _LAST_TRY_PASSES)

    def _can_win(self, number: int) -> bool:
        """Return whether more micro-batches would be shorter if they waited for nothing at all."""
        before = self._measured.get(number)
        if before is None:
            return True
        return median(before.busy) < median(self._measured[self.best].whole)


class InFlightChoice:
    """Learns from passes; sizes are told apart by powers of two."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}

    def choose(self, num_tokens: int, num_sequences: int, most: int) -> int:
        """Return the number for a pass that can be cut into so many at most: 1, 2, 4 or 8, or `most` if it is less."""
        return 1 if most == 1 else self._size(num_tokens, num_sequences).choose(most)

    def note(self, num_tokens: int, num_sequences: int, number: int, seconds: float, idle_s: float) -> None:
        """Take down how long a pass took in so many micro-batches, and how long of that nothing was computed."""
        self._size(num_tokens, num_sequences).note(number, seconds / num_tokens, (seconds - idle_s) / num_tokens)

    def _size(self, num_tokens: int, num_sequences: int) -> _Size:
        return self._sizes.setdefault((num_tokens.bit_length(), num_sequences.bit_length()), _Size())
