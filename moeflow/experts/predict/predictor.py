"""What every predictor of experts offers. It only orders prefetches: the true router decides what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Predictor(Protocol):
    """Guesses a layer's experts from what routers chose before."""

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Hear what a layer's router chose in a pass: each token's experts, repeated if several tokens chose one."""
        ...

    def predict(self, layer: int) -> list[int]:
        """Return the experts that a layer will need next, likeliest first; only those worth prefetching."""
        ...
