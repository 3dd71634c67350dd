"""Whether drafting pays: one trial for each speculator, by the time that its drafts save and take.

A gain is a share of a pass without drafts: kept tokens save time, while drafting and verifying take some. A token that
several speculators drafted counts for the one with the largest mean gain. So one of two with equal drafts rests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from moeflow.core.trial import GainTrial

MARGIN: Final = 1  # tokens that are drafted beyond the deepest that were lately worth computing
FIRST_DEPTH: Final = 4
LATELY: Final = 8  # passes


class ComputedDraft(msgspec.Struct, frozen=True):
    """A drafted token that was computed."""

    names: frozenset[str]  # who drafted it
    depth: int  # tokens from the request's last one: from 1 on
    is_kept: bool


class Usefulness:
    """Decides for each speculator whether it drafts, and how deep."""

    def __init__(self, names: Sequence[str]) -> None:
        self.trials = {name: GainTrial(f"drafts by {name}") for name in names}
        self._depths = {name: deque([FIRST_DEPTH], LATELY) for name in names}

    def pays(self, name: str) -> bool:
        """Return whether a speculator is to draft before the next pass."""
        return self.trials[name].is_on

    def is_tried(self, name: str) -> bool:
        """Whether a speculator drafts in tries at most, since its trial has not decided for it."""
        return not self.trials[name].verdict

    def depth(self, name: str) -> int:
        """Return how many tokens ahead its drafts are of use."""
        return max(self._depths[name]) + MARGIN

    def note(
        self,
        draft_s: Mapping[str, float],
        drafts: Sequence[ComputedDraft],
        *,
        num_requests: int,
        plain_s: float,
        extra_s: float,
    ) -> None:
        """Count a pass of decodes before which some drafted, for so many seconds each; the others rested.

        A pass without drafts takes `plain_s`, and the computed drafts made it `extra_s` longer.
        """
        gains = {name: -seconds / plain_s for name, seconds in draft_s.items()}
        deepest = dict.fromkeys(draft_s, 0)
        for draft in drafts:
            worth = draft.is_kept / num_requests - extra_s / plain_s / len(drafts)
            best = max(sorted(draft.names), key=lambda name: self.trials[name].gain)
            gains[best] = gains.get(best, 0.0) + worth
            for name in draft.names:
                deepest[name] = max(deepest.get(name, 0), draft.depth)
        for name, trial in self.trials.items():
            trial.note(gains.get(name))
        for name, depth in deepest.items():
            self._depths[name].append(depth)
