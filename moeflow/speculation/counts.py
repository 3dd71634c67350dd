"""What became of guesses since start: in all, by who guessed and how far ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from moeflow.speculation.usefulness import Guess

MAX_DEPTH: Final = 16  # tokens that are guessed ahead


class SpeculatorCounts(msgspec.Struct):
    """Of one speculator; a token that several guessed counts for each."""

    drafted: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DEPTH)  # by depth, from 1 on
    kept: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DEPTH)  # of them
    draft_s: float = 0.0  # that guessing took
    is_resting: bool = True  # it drafts to be tried at most: drafts do not pay, or it has failed


class SpeculationCounts(msgspec.Struct):
    """Totals since start."""

    drafted: int = 0  # tokens that were computed as guesses
    kept: int = 0  # of them
    passes: int = 0  # with guesses
    draft_s: float = 0.0  # that guessing took
    trees: list[int] = []  # for one request in one pass, by how many tokens were kept
    speculators: dict[str, SpeculatorCounts] = {}  # of these names

    @classmethod
    def of(cls, names: Sequence[str]) -> SpeculationCounts:
        """Return what can count the guesses of some speculators."""
        return cls(trees=[0] * (MAX_DEPTH + 1), speculators={name: SpeculatorCounts() for name in names})

    def note_tree(self, guesses: Sequence[Guess]) -> None:
        """Count what became of the guesses for one request in one pass."""
        num_kept = sum(guess.is_kept for guess in guesses)
        self.drafted += len(guesses)
        self.kept += num_kept
        self.trees[num_kept] += 1
        for guess in guesses:
            for name in guess.names:
                counts = self.speculators[name]
                counts.drafted[guess.depth - 1] += 1
                counts.kept[guess.depth - 1] += guess.is_kept
