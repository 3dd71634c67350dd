"""The number of micro-batches in flight where other processes compute some experts: tried, and measured.

More in flight wait less, because one computes while another waits. But they read weights again, which may take longer
than the waiting where tokens are few. So trials compare passes of about as many tokens and sequences: 2 in flight with
1, then 4 with 2, and 8 with 4.
"""

from __future__ import annotations

from typing import Final

from moeflow.core.trial import Trial

MAX_IN_FLIGHT: Final = 8


class _Size:
    """The choice for passes of about one size."""

    def __init__(self, name: str) -> None:
        steps = range(1, MAX_IN_FLIGHT.bit_length())
        self._trials = [Trial(f"{1 << step} micro-batches in flight, not {1 << step - 1}, {name}") for step in steps]

    @property
    def trials(self) -> list[Trial]:
        """Those asked so far: each after the one before it has decided for more."""
        asked = 1
        while asked < len(self._trials) and self._trials[asked - 1].verdict:
            asked += 1
        return self._trials[:asked]

    def choose(self, most: int) -> int:
        number = 1
        for trial in self.trials:
            if not trial.is_on:
                break
            number *= 2
        return min(number, most)

    def note(self, number: int, token_s: float) -> None:
        """Report a pass to the trials that compare its number. A number cut down to `most` is none of theirs."""
        for step, trial in enumerate(self.trials):
            if number == (2 if trial.is_on else 1) << step:
                trial.end_pass(1, token_s)


class InFlightChoice:
    """Learns from passes; sizes are told apart by powers of two."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}

    @property
    def trials(self) -> list[Trial]:
        """The trials of all sizes."""
        return [trial for key in sorted(self._sizes) for trial in self._sizes[key].trials]

    def choose(self, num_tokens: int, num_sequences: int, most: int) -> int:
        """Return the number for a pass that can be cut into so many at most: 1, 2, 4 or 8, or `most` if it is less."""
        return 1 if most == 1 else self._size(num_tokens, num_sequences).choose(most)

    def note(self, num_tokens: int, num_sequences: int, number: int, seconds: float) -> None:
        """Learn how long a pass took in so many micro-batches."""
        self._size(num_tokens, num_sequences).note(number, seconds / num_tokens)

    def _size(self, num_tokens: int, num_sequences: int) -> _Size:
        key = num_tokens.bit_length(), num_sequences.bit_length()
        if key not in self._sizes:
            tokens, sequences = (f"{1 << octave - 1} to {(1 << octave) - 1}" for octave in key)
            self._sizes[key] = _Size(f"passes of {tokens} tokens and {sequences} sequences")
        return self._sizes[key]
