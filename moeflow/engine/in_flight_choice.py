"""The number of micro-batches in flight where other processes compute some experts: tried, and measured.

More in flight wait less, because one computes while another waits. But they read weights again, which may take longer
than the waiting where tokens are few. So trials compare passes of about as many tokens and sequences: 2 in flight with
1, then 4 with 2, and 8 with 4.
"""

from __future__ import annotations

from typing import Final

from moeflow.core.trial import Trial

MAX_IN_FLIGHT: Final = 8


class InFlightChoice:
    """Learns from passes; sizes are grouped by powers of two."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], list[Trial]] = {}  # by size: each trial doubles the number

    @property
    def trials(self) -> list[Trial]:
        """The trials of all sizes, as far as each step before has decided for more."""
        return [trial for key in sorted(self._steps) for trial in _asked(self._steps[key])]

    def choose(self, num_tokens: int, num_sequences: int, most: int) -> int:
        """Return the number for a pass that can be cut into so many at most: 1, 2, 4 or 8."""
        number = 1
        for trial in _asked(self._of_size(num_tokens, num_sequences)) if most > 1 else ():
            if not trial.is_on or 2 * number > most:
                break
            number *= 2
        return number

    def note(self, num_tokens: int, num_sequences: int, number: int, seconds: float) -> None:
        """Learn the time of a pass."""
        for step, trial in enumerate(_asked(self._of_size(num_tokens, num_sequences))):
            if number == (2 if trial.is_on else 1) << step:
                trial.end_pass(1, seconds / num_tokens)

    def _of_size(self, num_tokens: int, num_sequences: int) -> list[Trial]:
        key = num_tokens.bit_length(), num_sequences.bit_length()
        if key not in self._steps:
            tokens, sequences = (f"{1 << octave - 1} to {(1 << octave) - 1}" for octave in key)
            self._steps[key] = [
                Trial(f"{2 << step} micro-batches in flight, passes of {tokens} tokens and {sequences} sequences")
                for step in range(MAX_IN_FLIGHT.bit_length() - 1)
            ]
        return self._steps[key]


def _asked(steps: list[Trial]) -> list[Trial]:
    """Return the trials up to the first that has not decided for more."""
    return steps[: 1 + next((step for step, trial in enumerate(steps) if not trial.verdict), len(steps))]
