"""How often one of several speculators guesses the next token.

Source: "coverage" of a pool of small models, as the thesis on ExpertFlow counts it (section 4.4), after SpecInfer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def is_covered(guesses: Sequence[Tensor], said: Tensor, num_likeliest: int) -> Tensor:
    """Return where the token is among the likeliest of any of them.

    Shapes: guesses [R, K] int64 each, the likeliest first; said [R] int64 -> [R] bool.
    """
    found = said != said
    for each in guesses:
        found = found | (each[:, :num_likeliest] == said[:, None]).any(-1)
    return found


def coverage(guesses: Sequence[Tensor], said: Tensor, num_likeliest: int) -> list[float]:
    """Return for each n from 1 the share of places that the first n cover. Shapes: as `is_covered`; R is at least 1."""
    return [
        is_covered(guesses[: number + 1], said, num_likeliest).float().mean().item() for number in range(len(guesses))
    ]
