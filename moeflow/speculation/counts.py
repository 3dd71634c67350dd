"""What became of drafts since start: in all, by who drafted and how far ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from moeflow.speculation.usefulness import ComputedDraft

MAX_DEPTH: Final = 16  # tokens that are drafted ahead


class SpeculatorCounts(msgspec.Struct):
    """Of one speculator; a token that several drafted counts for each."""

    drafted: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DEPTH)  # by depth, from 1 on
    kept: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DEPTH)  # of them
    draft_s: float = 0.0  # that drafting took
    is_resting: bool = True  # it drafts to be tried at most: drafts do not pay, or it has failed


class SpeculationCounts(msgspec.Struct):
    """Totals since start."""

    drafted: int = 0  # tokens that were computed as drafts
    kept: int = 0  # of them
    passes: int = 0  # with drafts
    draft_s: float = 0.0  # that drafting took
    trees: list[int] = []  # for one request in one pass, by how many tokens were kept
    speculators: dict[str, SpeculatorCounts] = {}  # of these names

    @classmethod
    def of(cls, names: Sequence[str]) -> SpeculationCounts:
        """Return what can count the drafts of some speculators."""
        return cls(trees=[0] * (MAX_DEPTH + 1), speculators={name: SpeculatorCounts() for name in names})

    def note_tree(self, drafts: Sequence[ComputedDraft]) -> None:
        """Count what became of the drafts for one request in one pass."""
        num_kept = sum(draft.is_kept for draft in drafts)
        self.drafted += len(drafts)
        self.kept += num_kept
        self.trees[num_kept] += 1
        for draft in drafts:
            for name in draft.names:
                counts = self.speculators[name]
                counts.drafted[draft.depth - 1] += 1
                counts.kept[draft.depth - 1] += draft.is_kept
