"""Which rank the others wait for: all compute the same passes, so a slow one shows in how little it waits itself.

A pass takes every rank the same time, including waits for others in collectives. If one hardly waits, and each of the
others waits for at least half of its time, that one needs over twice as long. Its processor is shared, throttled or
weaker. Uneven parts make differences as well, but not for long, or not as large: experts move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SLOW_SHARE: Final = 0.5  # of passes that each of the others waits more than the slow one


def slow_rank(waited_shares: Sequence[float]) -> int | None:
    """Return the rank that all others wait for; None: there is none. `waited_shares` are of the passes' time, by rank.

    Other programs may slow down several ranks: then none is named.
    """
    first, second = sorted(range(len(waited_shares)), key=waited_shares.__getitem__)[:2]
    return first if waited_shares[second] - waited_shares[first] > SLOW_SHARE else None
