"""How often drafts were right, by who drafted, how sure he was, and how lucky he is with this request.

A draft is judged when the model has chosen the token in its place: where its parent was kept, or is the request's last
token. A speculator's grades are counted over all requests, since that many drafts are soon made; a request has one
factor on them, which follows quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

PRIOR_WEIGHT: Final = 4.0  # of what a speculator believes of a grade: as if so many drafts had been judged
MEMORY: Final = 512.0  # drafts of a grade after which earlier ones count for little
REQUEST_MEMORY: Final = 32.0  # drafts for a request likewise
MOST: Final = 0.99


@dataclass(slots=True)
class _Count:
    right: float
    seen: float

    def note(self, is_right: float, expected: float, memory: float) -> None:
        fading = max(1 - 1 / memory, 0.0) if self.seen + expected > memory else 1.0
        self.right = self.right * fading + is_right
        self.seen = self.seen * fading + expected


class Acceptance:
    """Counts right drafts."""

    def __init__(self, believed: Mapping[str, Callable[[int], float]]) -> None:
        """Take what each speculator believes of its grades, see `Speculator.believed`."""
        self._believed = believed
        self._grades: dict[tuple[str, int], _Count] = {}
        self._requests: dict[str, _Count] = {}

    def chance(self, request_id: str, speculator: str, grade: int) -> float:
        """Return how likely a token is to be right if those before it are."""
        base, request = self._base(speculator, grade), self._requests.get(request_id)
        factor = 1.0 if request is None else (request.right + PRIOR_WEIGHT) / (request.seen + PRIOR_WEIGHT)
        return min(base * factor, MOST)

    def note(self, request_id: str, speculator: str, grade: int, *, is_right: bool) -> None:
        """Count a draft that has been judged."""
        expected = self._base(speculator, grade)
        count = self._grades.setdefault((speculator, grade), _Count(expected * PRIOR_WEIGHT, PRIOR_WEIGHT))
        count.note(float(is_right), 1.0, MEMORY)
        self._requests.setdefault(request_id, _Count(0.0, 0.0)).note(float(is_right), expected, REQUEST_MEMORY)

    def forget(self, request_id: str) -> None:
        """Drop the counts of a request."""
        self._requests.pop(request_id, None)

    def _base(self, speculator: str, grade: int) -> float:
        count = self._grades.get((speculator, grade))
        return self._believed[speculator](grade) if count is None else count.right / count.seen
