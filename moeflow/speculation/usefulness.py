"""Whether guessing pays: what each speculator's guesses bring, against the time that they and guessing itself take.

A speculator has an account in units of a pass without guesses. What its kept tokens save is paid in, what guessing and
computing its guesses took is paid out, and each pass adds a small income. It guesses while there is something in the
account; once that is used up it rests until the income allows another trial. So a useless speculator costs the income,
a few percent, and what it had to begin with; and one that becomes useful is soon found to be. What several guessed is
to the account of the one that has most: one of two that know the same comes to rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

INCOME: Final = 0.02  # a pass: the share of time that may be lost
FIRST_CREDIT: Final = 32.0
MOST_CREDIT: Final = 64.0
TRIAL: Final = 8.0  # credit from which one that rests guesses again: what it missed has to be computed first
MARGIN: Final = 1  # tokens that are guessed beyond the deepest that were lately worth computing
FIRST_DEPTH: Final = 4
LATELY: Final = 8  # passes


class Guess(msgspec.Struct, frozen=True):
    """A guessed token that was computed."""

    names: frozenset[str]  # who guessed it
    depth: int  # tokens from the request's last one: from 1 on
    is_kept: bool


class _Account(msgspec.Struct):
    credit: float = FIRST_CREDIT
    is_resting: bool = False
    depths: deque[int] = msgspec.field(default_factory=lambda: deque([FIRST_DEPTH], LATELY))

    def add(self, gain: float) -> None:
        self.credit = min(self.credit + gain, MOST_CREDIT)
        self.is_resting = self.credit < (TRIAL if self.is_resting else 0.0)


class Usefulness:
    """One account for each speculator."""

    def __init__(self, names: Sequence[str]) -> None:
        self._accounts = {name: _Account() for name in names}

    def pays(self, name: str) -> bool:
        """Return whether a speculator is to guess before the next pass."""
        return not self._accounts[name].is_resting

    def depth(self, name: str) -> int:
        """Return how many tokens ahead its guesses are of use."""
        return max(self._accounts[name].depths) + MARGIN

    def note(
        self,
        draft_s: Mapping[str, float],
        guesses: Sequence[Guess],
        *,
        num_requests: int,
        plain_s: float,
        extra_s: float,
    ) -> None:
        """Count a pass of decodes before which some guessed, for so many seconds each; the others rested.

        A pass without guesses takes `plain_s`, and the computed guesses made it `extra_s` longer. What several guessed
        counts for the one with most in its account: others are of use for what they add to that.
        """
        gains = {name: INCOME - draft_s.get(name, 0.0) / plain_s for name in self._accounts}
        deepest = dict.fromkeys(draft_s, 0)
        for guess in guesses:
            worth = guess.is_kept / num_requests - extra_s / plain_s / len(guesses)
            gains[max(sorted(guess.names), key=self._credit)] += worth
            for name in guess.names:
                deepest[name] = max(deepest.get(name, 0), guess.depth)
        for name, gain in gains.items():
            self._accounts[name].add(gain)
        for name, depth in deepest.items():
            self._accounts[name].depths.append(depth)

    def _credit(self, name: str) -> float:
        return self._accounts[name].credit
