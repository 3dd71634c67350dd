"""Coverage: the share of tokens that one of several speculators predicts.

Source: the thesis on ExpertFlow (section 4.4), after SpecInfer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def is_covered(predicted: Sequence[Tensor], said: Tensor, num_likeliest: int) -> Tensor:
    """Return where any of them has the token among its likeliest.

    Shapes: predicted [R, K] int64 each, the likeliest first; said [R] int64 -> [R] bool.
    """
    found = said != said
    for each in predicted:
        found = found | (each[:, :num_likeliest] == said[:, None]).any(-1)
    return found


def coverage(predicted: Sequence[Tensor], said: Tensor, num_likeliest: int) -> list[float]:
    """Return the share of places that the first n cover, for each n from 1. Shapes: as `is_covered`, R >= 1."""
    numbers = range(1, len(predicted) + 1)
    return [is_covered(predicted[:number], said, num_likeliest).float().mean().item() for number in numbers]
