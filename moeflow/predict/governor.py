"""Switches a predictor off while it does not pay, and tries it again from time to time.

A prefetch pays if a pass then needs what it brought, and costs if a pass has to wait for its end, if it took the place
of something needed, or if nobody needs it. Only the last is cheap: the disk was idle. On a disk that is busy anyhow a
predictor that was right in 79% of cases made a model slower by 21% (BigMoeOnEdge), which is why nobody's word is taken.
A predictor has no credit at first; later, two windows of passes must speak against it, and a trial clearly for it, so
that it does not flicker. Each failed trial doubles the time until the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeflow.core.units import format_bytes

WINDOW_PASSES: Final = 16
# What reading a byte costs even if the disk is idle, as a share of what it costs to wait for it: the processor, which
# computes meanwhile, makes checksums at 6 GB/s of what a disk brings at 1.2 (measured).
WASTE_PRICE: Final = 0.2
_CLEARLY: Final = 1.5  # what a trial has to bring for its price
_FIRST_PAUSE: Final = 4  # windows
_LONGEST_PAUSE: Final = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """What prefetching did in a time, in bytes."""

    used_bytes: int = 0  # prefetched, and then needed
    wasted_bytes: int = 0  # prefetched, and evicted without having been needed
    harmed_bytes: int = 0  # demand that waited for a prefetch, or whose slot one took

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.used_bytes + other.used_bytes,
            self.wasted_bytes + other.wasted_bytes,
            self.harmed_bytes + other.harmed_bytes,
        )

    @property
    def price_bytes(self) -> float:
        """What it cost, in bytes of demand."""
        return self.harmed_bytes + WASTE_PRICE * self.wasted_bytes


class Governor:
    """Decides for one predictor whether it may prefetch."""

    def __init__(self, name: str, *, window_passes: int = WINDOW_PASSES) -> None:
        """Begin with the predictor switched on; `name` is for messages."""
        self.is_on = True
        self._name = name
        self._window_passes = window_passes
        self._num_passes = 0  # of the current window
        self._window = Outcome()
        self._is_trial = False
        self._doubt: Outcome | None = Outcome()  # the last window, if it spoke against the predictor
        self._pause = _FIRST_PAUSE
        self._windows_off = 0

    def end_pass(self, outcome: Outcome) -> str | None:
        """Take a pass's outcome into account; return a message if the predictor was switched on or off by it."""
        self._num_passes += 1
        self._window += outcome
        if self._num_passes < self._window_passes:
            return None
        window, self._window, self._num_passes = self._window, Outcome(), 0
        if not self.is_on:
            self._rest()
            return None
        return self._judge_trial(window) if self._is_trial else self._judge(window)

    def _judge(self, window: Outcome) -> str | None:
        if window.used_bytes >= window.price_bytes:
            self._doubt = None
            return None
        if self._doubt is None:
            self._doubt = window
            return None
        both, self._doubt = self._doubt + window, None
        return self._switch_off(both)

    def _judge_trial(self, window: Outcome) -> str | None:
        if window.price_bytes == 0 == window.used_bytes:  # nothing was prefetched: no answer yet
            return None
        self._is_trial = False
        if window.used_bytes >= _CLEARLY * window.price_bytes:
            self._pause = _FIRST_PAUSE
            return f"prefetching by {self._name} pays again: {_describe(window)}"
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._switch_off(window)
        return None  # nobody was told of the trial either

    def _switch_off(self, window: Outcome) -> str:
        self.is_on = False
        self._windows_off = 0
        return f"prefetching by {self._name} is switched off, since it does not pay: {_describe(window)}"

    def _rest(self) -> None:
        self._windows_off += 1
        if self._windows_off >= self._pause:
            self.is_on = self._is_trial = True


def _describe(window: Outcome) -> str:
    return (
        f"{format_bytes(window.used_bytes)} of what it read were needed, {format_bytes(window.wasted_bytes)} were not, "
        f"and passes waited for {format_bytes(window.harmed_bytes)} on its account"
    )
