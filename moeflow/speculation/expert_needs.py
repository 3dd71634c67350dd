"""The experts that a pass needs with some drafted tokens, as far as speculators predict them, and the cost of more
tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from moeflow.speculation.draft_tree import DraftNode
from moeflow.speculation.speculator import Experts

WEIGHT: Final = 0.05  # of a token in what one usually adds


@dataclass(frozen=True, slots=True)
class Added:
    """Experts that a pass needs only because of one token."""

    experts: float  # how many
    absent: float  # of them


class UsualNeeds:
    """The mean cost of a drafted token, for tokens without predicted experts."""

    def __init__(self) -> None:
        self.mean = Added(0.0, 0.0)
        self._num_seen = 0

    def note(self, added: Added) -> None:
        """Count a token whose experts were known."""
        self._num_seen += 1
        weight = max(WEIGHT, 1 / self._num_seen)
        self.mean = Added(
            self.mean.experts + weight * (added.experts - self.mean.experts),
            self.mean.absent + weight * (added.absent - self.mean.absent),
        )


class ExpertNeeds:
    """The experts of a pass that is being planned."""

    def __init__(self, experts: Iterable[Experts], absent: Experts, usual: UsualNeeds) -> None:
        """Take those of the requests' last tokens, and which of all experts are not in memory."""
        self._absent = absent
        self._usual = usual
        self._known = set[int]().union(*experts)
        self.num_experts = float(len(self._known))
        self.num_absent = float(len(self._known & absent))

    def added(self, token: DraftNode) -> Added:
        """Return what a token would add."""
        if not token.experts:
            return self._usual.mean
        new = token.experts - self._known
        return Added(len(new), len(new & self._absent))

    def add(self, token: DraftNode) -> None:
        """Take a token in."""
        added = self.added(token)
        if token.experts:
            self._usual.note(added)
        self._known |= token.experts
        self.num_experts += added.experts
        self.num_absent += added.absent
